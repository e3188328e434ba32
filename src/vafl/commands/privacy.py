"""`vafl privacy`: show the privacy spent on a party's records, and the budget left, from its ledger."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vafl.commands.configured import as_json
from vafl.config import Config, read_config
from vafl.errors import DataError, RunFolderError
from vafl.observe.plots import COLOURS, STYLE, save
from vafl.observe.record import SIMULATED_LEDGERS
from vafl.privacy.ledger.ledger import read_history, read_ledger
from vafl.privacy.ledger.statement import Statement, person
from vafl.run.ledgers import make_statement, run_ledgers

_MEANINGS = {
    "zero_out": "telling a record's uploads from zeros is at least as hard as telling N(0, 1) from N(mu, 1); "
    "no client sends zeros, even for a record that it lacks, and any two values of one record are 2 mu apart",
    "replace": "telling any two values of one record apart is at least as hard as telling N(0, 1) from "
    "N(mu, 1)",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vafl privacy`."""
    parser.add_argument(
        "path", type=Path, metavar="RUN", help="the run folder of private clients, or a ledger"
    )
    parser.add_argument("--record", metavar="ID", help="show one record's account, and the share of each run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--out", type=Path, help="the plot's path, without extension (RUN/privacy-spent)")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace, console: Console) -> None:
    """Print the account of each ledger of a run, or of one ledger."""
    paths, config = _find(options.path)
    simulated = paths[0].parent.name == SIMULATED_LEDGERS
    statements = [_statement(path, config) for path in paths]
    if options.record is not None:
        accounts = _record(options.record, paths, statements)
        together = person(statements, options.record)
        if options.json:
            sys.stdout.write(as_json({"record": options.record, "person": together, "parties": accounts}))
        else:
            _show_record(options.record, accounts, console)
            _show_person(together, console)
        return
    folder = options.path if options.path.is_dir() else options.path.parent
    stem = options.out or folder / "privacy-spent"
    stem.parent.mkdir(parents=True, exist_ok=True)
    plots = _plot(statements, stem)
    if options.json:
        report = {
            "simulated": simulated,
            "person": person(statements),
            "parties": [statement.as_json() for statement in statements],
        }
        sys.stdout.write(as_json(report))
    else:
        _show(statements, simulated, console)
        console.print(f"plots: {', '.join(map(str, plots))}")


def _find(path: Path) -> tuple[list[Path], Config | None]:
    """Return the ledgers of a run and its configuration, or a single ledger and None."""
    if path.is_file():
        return [path], None
    if not (path / "config.toml").is_file():
        raise RunFolderError(
            "VFL-9111", f'"{path}" must be a ledger or the folder of a run. Found no config.toml there.'
        )
    config = read_config(path / "config.toml")
    if not (ledgers := run_ledgers(config, path)):
        raise RunFolderError(
            "VFL-9112",
            f'"{path}" has no privacy ledgers. Its clients were not private (privacy.mode '
            f"{config.privacy.kind}), or their ledgers are on their own machines. Run this command there.",
        )
    return ledgers, config


def _statement(path: Path, config: Config | None) -> Statement:
    """Make a statement with the run's settings; without a run, with those of the last run in the ledger."""
    ledger = read_ledger(path)
    if not ledger.spenders:
        raise RunFolderError("VFL-9113", f'"{path}" has no charges yet: no run has used this ledger.')
    if config is None:
        last = ledger.spenders[-1]
        return Statement(path.stem, ledger, last.settings, last.batch, last.local_steps)
    return make_statement(path, ledger, config)


def _record(record: str, paths: Sequence[Path], statements: Sequence[Statement]) -> dict[str, dict[str, Any]]:
    """Return one record's account at every party that has one."""
    accounts = {}
    for path, statement in zip(paths, statements, strict=True):
        account = statement.record(record)
        if account is not None:
            shares = [
                {
                    "run": share.spender.run,
                    "purpose": share.spender.purpose,
                    "parties": share.spender.parties,
                    "mode": share.spender.settings.kind,
                    "began": share.spender.began,
                    "mu": statement.settings.clips_apart * math.sqrt(share.spent),
                    "uploads": share.uploads,
                }
                for share in read_history(path, record)
            ]
            accounts[statement.party] = account | {"ledger": str(path), "runs": shares}
    if not accounts:
        example = next((str(statement.ledger.ids[0]) for statement in statements), "")
        raise DataError(
            "VFL-9114",
            f'--record needs the id of a record that has an account. Found none for "{record}" in '
            f'{", ".join(map(str, paths))}. Ids there look like "{example}".',
        )
    return accounts


def _show(statements: Sequence[Statement], simulated: bool, console: Console) -> None:
    settings = statements[0].settings
    console.print(
        Text.assemble((f"privacy.mode {settings.kind}", "bold"), f": {settings.protection.guarantee}")
    )
    table = Table("")
    for statement in statements:
        table.add_column(statement.party, justify="right")
    for label, texts in _lines([statement.as_json() for statement in statements]).items():
        table.add_row(label, *texts, style="dim" if label.startswith("paper") else None)
    console.print(table)
    _show_person(person(statements), console)
    console.print(
        f"Any record (privacy.neighbours {settings.neighbours}): {_MEANINGS[settings.neighbours]}. "
        "All together: the same for all of a party's records at once. The paper's mu is not valid against "
        "the server, which knows the records of each batch.",
        style="dim",
    )
    if simulated:
        console.print(
            Text.assemble(
                ("A simulation:", "yellow"),
                " nothing left this machine. A federation with the same uploads and evaluations would have "
                "spent this.",
            )
        )


def _lines(accounts: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the lines of the table: label -> the text for each party."""
    first = accounts[0]
    left = [account["minibatches_left"] for account in accounts]
    lines = {
        "records": [f"{account['records']:,}" for account in accounts],
        "runs": [f"{len(account['runs']):,}" for account in accounts],
        "mu, any record": [_number(account["mu_any_record"]) for account in accounts],
        f"epsilon at delta {first['delta']:g}": [
            _number(account["epsilon_any_record"]) for account in accounts
        ],
        "mu, median record": [_number(account["mu_median"]) for account in accounts],
        "mu, all together": [_number(account["mu_all_records_together"]) for account in accounts],
        "mu_max": [_number(account["mu_max"] or math.inf) for account in accounts],
        "minibatches left": ["no limit" if count is None else str(count) for count in left],
    }
    if first["neighbours"] == "zero_out":
        lines["mu, any two values of one"] = [_number(account["mu_two_values"]) for account in accounts]
    for kind in first["uploads"]:
        if any(account["uploads"][kind] for account in accounts):
            label = "charged for torn entries" if kind == "torn" else f"uploaded: {kind}"
            lines[label] = [f"{account['uploads'][kind]:,}" for account in accounts]
    if any(account["ledgers_accepted"] for account in accounts):
        lines["accepted as incomplete"] = [
            f"{len(account['ledgers_accepted'])} times" for account in accounts
        ]
    if first["paper"] is not None:
        lines["paper's mu (not valid)"] = [_number(account["paper"]["mu"]) for account in accounts]
    return lines


def _show_record(record: str, accounts: dict[str, dict[str, Any]], console: Console) -> None:
    for party, account in accounts.items():
        limit, left = account["mu_max"], account["minibatches_left"]
        console.print(
            Text.assemble(
                (f"record {record} at {party}", "bold"),
                f": mu {_number(account['mu'])} spent (privacy.neighbours {account['neighbours']}; "
                f"{_number(account['mu_two_values'])} between any two of its values), epsilon "
                f"{_number(account['epsilon'])} at delta {account['delta']:g}",
            )
        )
        if limit is None:
            console.print("left: no limit is set (privacy.mu_max)")
        else:
            batches = "" if left is None else f", {left} minibatches"
            console.print(f"left: mu {_number(account['mu_left'])} of {limit:g}{batches}")
        table = Table(box=None, header_style="bold", pad_edge=False)
        for heading in ("run", "began (UTC)", "for", "with", "mode", "mu", "uploads"):
            table.add_column(heading, overflow="fold")
        for share in account["runs"]:
            others = [name for name in share["parties"] if name != party]
            table.add_row(
                share["run"] or "a simulation",
                share["began"][:16].replace("T", " "),
                share["purpose"],
                ", ".join(others),
                share["mode"],
                _number(share["mu"]),
                _uploads(share["uploads"]),
            )
        table.add_row("all", "", "", "", "", _number(account["mu"]), _uploads(account["uploads"]))
        console.print(table)
        console.print(
            f"mu^2 adds up over runs. {account['ledger']} recorded every upload before it was sent.",
            style="dim",
        )


def _show_person(together: dict[str, Any], console: Console) -> None:
    """Print the total that all clients have spent on one person."""
    ledgers, clients = together["ledgers"], together["clients"]
    if ledgers > 1:
        console.print(
            Text.assemble(
                ("one person, all ledgers here", "bold"),
                f": mu {_number(together['mu'])}, epsilon {_number(together['epsilon'])} at delta "
                f"{together['delta']:g} is spent on record {together['record']}, which is in "
                f"{together['ledgers_with_it']} of {ledgers} ledgers; mu^2 adds up over clients",
            )
        )
    if (estimate := together["if_other_clients_spent_as_much"]) is not None:
        console.print(
            Text.assemble(
                (f"one person, all {clients} clients, an estimate", "bold"),
                f": mu {_number(estimate['mu'])}, epsilon {_number(estimate['epsilon'])} at delta "
                f"{together['delta']:g}, if each client whose ledger is elsewhere ({clients - ledgers} of "
                f"{clients}) has spent as much as the clients here",
            )
        )


def _uploads(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "none"


def _number(value: float) -> str:
    return "unbounded" if math.isinf(value) else f"{value:.4g}"


def _plot(statements: Sequence[Statement], stem: Path) -> list[Path]:
    """Plot the distribution of mu over each party's records."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 4), layout="constrained")
        axis = figure.subplots()
        for number, statement in enumerate(statements):
            mu = np.sort(statement.mu[np.isfinite(statement.mu)])
            if len(mu):
                share = np.arange(1, len(mu) + 1) / len(mu)
                axis.plot(
                    mu, share, color=COLOURS[number % len(COLOURS)], linewidth=1.8, label=statement.party
                )
        limit = statements[0].settings.limit
        if math.isfinite(limit):
            axis.axvline(limit, color="#7a7a7a", linestyle="--", linewidth=1.2, label="mu_max")
        axis.set_xlim(left=0)
        axis.set_ylim(0, 1.02)
        axis.set_xlabel("mu spent")
        axis.set_ylabel("share of records with at most this mu")
        handles, labels = axis.get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside upper center", ncols=min(6, len(handles)))
        return save(figure, stem)
