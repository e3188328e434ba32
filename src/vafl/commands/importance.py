"""`vafl importance`: how much each party's features matter to a trained model."""

import argparse

from rich.console import Console

from vafl.commands.deployed import add_model_options, client_config
from vafl.config import Config
from vafl.errors import ConfigError
from vafl.observe.importance import table
from vafl.run.importance import REPEATS, ROWS, is_local, measure_locally, measure_over_network
from vafl.run.model_store import open_model
from vafl.transport.identity import SERVER


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vafl importance`."""
    add_model_options(parser, _measure, _check, may_be_local=True)
    parser.add_argument(
        "--repeats", type=int, help=f"server only: permutations of each group of features ({REPEATS})"
    )
    parser.add_argument("--rows", type=int, help=f"server only: the most held-out rows to use ({ROWS:,})")


def _check(options: argparse.Namespace) -> None:
    for name in ("repeats", "rows"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ConfigError("VFL-9081", f"--{name} must be 1 or more. Found {value}.")


def _measure(config: Config, options: argparse.Namespace, console: Console) -> None:
    repeats, rows = options.repeats or REPEATS, options.rows or ROWS
    parties = open_model(options.model, SERVER).manifest.parties
    if options.party is None and is_local(options.model, parties):
        importance = measure_locally(
            config,
            lambda party: client_config(options, party),
            options.model,
            console,
            repeats=repeats,
            rows=rows,
        )
    else:
        importance = measure_over_network(
            config,
            options.model,
            console,
            repeats=repeats,
            rows=rows,
            listening=lambda address: console.print(f"listening on {address}"),
            accept_ledger=options.accept_ledger,
        )
    paths = importance.write(options.model)
    console.print(table(importance))
    console.print(f"measured on {importance.rows:,} held-out rows, {repeats} permutations each")
    for party, reason in importance.refused.items():
        console.print(f"measured only in part: {party}: {reason}", style="yellow")
    console.print(
        f"written: {', '.join(map(str, paths))}; `vafl report {options.model}` adds it to the report"
    )
