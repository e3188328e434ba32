"""`vafl audit`: attack a configuration, and check whether it leaks more than it claims."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vafl.audit.canaries import AUDITED, Finding
from vafl.audit.report import Report, audit
from vafl.commands.configured import add_config_options, as_json, overrides
from vafl.config import read_config
from vafl.errors import AuditFailed, ConfigError
from vafl.files import write_atomically
from vafl.privacy.settings import GUARANTEED


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vafl audit`."""
    add_config_options(parser)
    parser.add_argument(
        "--canaries",
        type=int,
        default=1000,
        metavar="K",
        help="the number of canaries, each with a coin to guess (%(default)s)",
    )
    parser.add_argument(
        "--noise-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="scale the audited client's noise by X; below 1, the audit should fail",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace, console: Console) -> None:
    """Run the audit, show its results, and raise AuditFailed if a claim is broken."""
    config = read_config(options.config, overrides(options))
    if options.canaries < 100:
        raise ConfigError(
            "VFL-9011", f"--canaries must be 100 or more: fewer prove too little. Found {options.canaries}."
        )
    if not options.noise_scale > 0:
        raise ConfigError("VFL-9012", f"--noise-scale must be above 0. Found {options.noise_scale}.")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        if options.json.is_dir():
            raise ConfigError(
                "VFL-9013", f'--json takes a file. "{options.json}" is a folder. Name a file in it.'
            )
    with console.status("auditing with canaries, then attacking a run ..."):
        report = audit(config, canaries=options.canaries, noise_scale=options.noise_scale)
    if options.json:
        write_atomically(options.json, as_json(report.as_json()).encode())
    _show(report, console)
    failed = [finding for finding in report.findings if finding.verdict == "broken"]
    if failed:
        raise AuditFailed(
            "VFL-9014",
            "the configuration leaks more than it claims: "
            + "; ".join(
                f"{finding.name}: accountant mu <= {finding.claimed:.3g}, audit mu >= {finding.found:.3g}"
                for finding in failed
            )
            + f". Do not rely on the claim. Use one of the modes {', '.join(GUARANTEED)} with the noise that "
            "`vafl calibrate` prints.",
        )


_COLOURS = {"holds": "green", "cannot tell": "yellow", "broken": "bold red"}


def _too_weak(finding: Finding) -> str:
    """Return why the audit was inconclusive, and the remedy."""
    needed = finding.canaries_needed
    remedy = f"use about --canaries {needed}" if needed else "a million canaries would not be enough"
    return (
        f"{finding.name}: inconclusive, because the audit would detect half the noise only with probability "
        f"{finding.power:.2f}; {remedy}"
    )


def _show(report: Report, console: Console) -> None:
    if report.findings:
        table = Table(title="canaries")
        for column in ("audit", "accountant", "audit (95 %)", "guessed right", "verdict"):
            table.add_column(column)
        for finding in report.findings:
            table.add_row(
                finding.name,
                f"mu <= {finding.claimed:.3f}",
                f"mu >= {finding.found:.3f}",
                f"{finding.accuracy:.1%} of {finding.canaries}",
                Text(finding.verdict, _COLOURS[finding.verdict]),
            )
        console.print(table)
        console.print(f"Audited: {AUDITED}.", style="dim")
        for finding in report.findings:
            if finding.verdict == "cannot tell":
                console.print(_too_weak(finding), style="yellow")
    else:
        console.print(Text.assemble(("no canaries:", "yellow"), f" {report.silent}"))
    table = Table(title="attacks on one run (a failed attack proves nothing)")
    for column in ("attack", "measure", "result", "by guessing"):
        table.add_column(column)
    for attack in report.attacks:
        table.add_row(attack.name, attack.measure, f"{attack.value:.3f}", f"{attack.by_guessing:.3f}")
    console.print(table)
    console.print(
        "Gradients reveal the labels to clients unless labels.epsilon enables randomised response.",
        style="dim",
    )
