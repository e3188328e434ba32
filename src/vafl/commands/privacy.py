"""`vafl privacy`: what has been spent on every record of a run, what is left, and how we know."""

import argparse
import json
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

from vafl.config import read_config
from vafl.errors import RunFolderError
from vafl.observe.plots import COLOURS, STYLE, save
from vafl.observe.record import LEDGERS, SIMULATED_LEDGERS
from vafl.privacy.ledger import read_ledger
from vafl.privacy.statement import Statement

_GUARANTEES = {
    "release_once": "per record, whatever is done with what was released",
    "frozen": "per record: every upload is noised, the embedding is not trained",
    "dp_train": "per record: every upload and every local update is noised",
    "embed_only": "valid bound only: the trained model carries records past the noise",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of `vafl privacy`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder of private clients")
    parser.add_argument("--record", type=int, metavar="N", help="one record's account")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--out", type=Path, help="where the plot goes, without ending (default: RUN/privacy)")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace, console: Console) -> None:
    """Prints the account of every ledger of the run."""
    statements, simulated = read_statements(options.run)
    if options.record is not None:
        accounts = {statement.party: statement.record(options.record) for statement in statements}
        if options.json:
            sys.stdout.write(json.dumps(accounts, indent=2) + "\n")
        else:
            _show_record(accounts, statements[0].settings.delta, console)
        return
    plots = _plot(statements, options.out or options.run / "privacy-spent")
    if options.json:
        report = {"simulated": simulated, "parties": [statement.as_json() for statement in statements]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _show(statements, simulated, console)
        console.print(f"plots: {', '.join(map(str, plots))}")


def read_statements(run: Path) -> tuple[list[Statement], bool]:
    """The statements of a run's ledgers, and whether nothing really left a machine."""
    if not (run / "config.toml").is_file():
        raise RunFolderError(f'"{run}" must be the folder of a run. Found no config.toml there.')
    config = read_config(run / "config.toml")
    folders = [run / LEDGERS, run / SIMULATED_LEDGERS]
    if config.privacy.ledger:
        folders.insert(0, Path(config.privacy.ledger))
    found = [(folder, sorted(folder.glob("*.ledger"))) for folder in folders]
    folder, paths = next((entry for entry in found if entry[1]), (run, []))
    if not paths:
        raise RunFolderError(
            f'"{run}" has no privacy ledgers. Its clients were not private (privacy.mode '
            f"{config.privacy.kind}), or have their ledgers on their own machines."
        )
    batch, steps = config.schedule.batch_size, config.rule.local_steps
    statements = [Statement(path.stem, read_ledger(path), config.privacy, batch, steps) for path in paths]
    return statements, folder.name == SIMULATED_LEDGERS


def _show(statements: Sequence[Statement], simulated: bool, console: Console) -> None:
    settings = statements[0].settings
    console.print(f"[bold]privacy.mode {settings.kind}[/]: {_GUARANTEES[settings.kind]}")
    table = Table("")
    for statement in statements:
        table.add_column(statement.party, justify="right")
    for label, texts in _lines([statement.as_json() for statement in statements]).items():
        table.add_row(label, *texts, style="dim" if label.startswith("paper") else None)
    console.print(table)
    console.print(
        "Any record: no test tells one record's values apart better than N(0, 1) from N(mu, 1). "
        "All together: the same for all of a party's records at once. The paper's mu is not valid against "
        "the server, which knows who is in a batch.",
        style="dim",
    )
    if simulated:
        console.print(
            "[yellow]A simulation:[/] nothing left this machine; this is what a federation would have spent."
        )


def _lines(accounts: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """What the table says of every party, line by line."""
    first = accounts[0]
    left = [account["minibatches_left"] for account in accounts]
    lines = {
        "records": [f"{account['records']:,}" for account in accounts],
        "mu, any record": [_number(account["mu_any_record"]) for account in accounts],
        f"epsilon at delta {first['delta']:g}": [
            _number(account["epsilon_any_record"]) for account in accounts
        ],
        "mu, median record": [_number(account["mu_median"]) for account in accounts],
        "mu, all together": [_number(account["mu_all_records_together"]) for account in accounts],
        "mu_max": [_number(account["mu_max"] or math.inf) for account in accounts],
        "minibatches left": ["no limit" if each is None else str(each) for each in left],
    }
    for kind in first["uploads"]:
        if any(account["uploads"][kind] for account in accounts):
            lines[f"uploaded: {kind}"] = [f"{account['uploads'][kind]:,}" for account in accounts]
    if first["paper"] is not None:
        lines["paper's mu (not valid)"] = [_number(account["paper"]["mu"]) for account in accounts]
    return lines


def _show_record(accounts: dict[str, dict[str, Any]], delta: float, console: Console) -> None:
    number = next(iter(accounts.values()))["record"]
    table = Table(title=f"record {number}")
    for column in ("party", "mu spent", f"epsilon (delta {delta:g})", "uploads", "batches left"):
        table.add_column(column)
    for party, account in accounts.items():
        uploads = ", ".join(f"{count} {kind}" for kind, count in account["uploads"].items() if count)
        left = account["minibatches_left"]
        table.add_row(
            party,
            _number(account["mu"]),
            _number(account["epsilon"]),
            uploads or "none",
            "no limit" if left is None else str(left),
        )
    console.print(table)


def _number(value: float) -> str:
    return "unbounded" if math.isinf(value) else f"{value:.4g}"


def _plot(statements: Sequence[Statement], stem: Path) -> list[Path]:
    """How much the records of each party have spent."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 4), layout="constrained")
        axis = figure.subplots()
        for number, statement in enumerate(statements):
            mu = statement.valid_mu
            mu = np.sort(mu[np.isfinite(mu)])
            if len(mu):
                share = np.arange(1, len(mu) + 1) / len(mu)
                axis.plot(
                    mu, share, color=COLOURS[number % len(COLOURS)], linewidth=1.8, label=statement.party
                )
        limit = statements[0].settings.mu_max
        if limit:
            axis.axvline(limit, color="#7a7a7a", linestyle="--", linewidth=1.2, label="mu_max")
        axis.set_xlim(left=0)
        axis.set_ylim(0, 1.02)
        axis.set_xlabel("mu spent")
        axis.set_ylabel("share of records that spent at most this")
        handles, labels = axis.get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside upper center", ncols=min(6, len(handles)))
        return save(figure, stem)
