"""`vafl init`: a commented configuration for a CSV, for the parties' tables, or for scikit-learn's digits."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from vafl.commands.starter import starter_csv, starter_digits, starter_tables
from vafl.errors import ConfigError
from vafl.names import check_party

_CLIENTS = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of `vafl init`."""
    parser.add_argument("csv", type=Path, nargs="?", help="your CSV file (default: scikit-learn's digits)")
    parser.add_argument(
        "--label",
        default="",
        help="the label column (default: the last of the CSV, or of the server's table); clients ignore it",
    )
    parser.add_argument(
        "--clients", type=int, help="among how many a CSV's columns are shared out (default: 2)"
    )
    parser.add_argument(
        *("--table", "-t"),
        action="append",
        default=[],
        metavar="PARTY=FILE",
        help='a party\'s own table, repeatable; the party "server" holds the labels',
    )
    parser.add_argument(
        "--parties", default="", help="all clients, as bank,shop (default: those with a table)"
    )
    parser.add_argument("--id", default="", help="the tables' id column (default: the first)")
    parser.add_argument("--out", type=Path, default=Path("vafl.toml"))
    parser.set_defaults(command=init)


def init(options: argparse.Namespace, console: Console) -> None:
    """Writes the configuration, and says what was decided."""
    if options.clients is not None and options.clients < 1:
        raise ConfigError("VFL-9091", f"--clients must be 1 or more. Found {options.clients}.")
    if options.out.exists():
        raise ConfigError("VFL-9092", f'"{options.out}" exists and is left as it is. Name another --out.')
    _refuse_unused(options)
    then = "vafl data" if options.table else "vafl run"
    if options.table:
        parties = [check_party(name.strip()) for name in options.parties.split(",") if name]
        text, notes = starter_tables(_tables(options.table), parties, options.id, options.label)
    elif options.csv:
        text, notes = starter_csv(options.csv, options.label, options.clients or _CLIENTS)
    else:
        text, notes = starter_digits(options.clients or _CLIENTS), []
    options.out.write_text(text, encoding="utf-8")
    for note in notes:
        console.print(note)
    console.print(f"wrote {options.out}; now: {then} {shlex.quote(str(options.out))}")


def _refuse_unused(options: argparse.Namespace) -> None:
    """Options that the file written would say nothing of are refused, with what was meant instead."""
    if options.table and (options.csv or options.clients):
        found = f'"{options.csv}"' if options.csv else f"--clients {options.clients}"
        raise ConfigError(
            "VFL-9093",
            f"--table names every client's file. Found {found} beside it. Name each as --table PARTY=FILE, "
            "or leave out --table.",
        )
    if not options.table and (options.parties or options.id):
        found = f"--parties {options.parties}" if options.parties else f"--id {options.id}"
        raise ConfigError(
            "VFL-9094",
            f"--parties and --id are for tables of parties. Found {found} without --table. Add --table "
            "PARTY=FILE for the file at hand, or leave it out.",
        )
    if options.label and not (options.table or options.csv):
        raise ConfigError(
            "VFL-9095", f'--label is a column of a file. Found "{options.label}" and no file. Name one.'
        )


def _tables(given: Sequence[str]) -> dict[str, Path]:
    """Party -> file."""
    pairs = [text.partition("=") for text in given]
    for party, equals, file in pairs:
        if not (party and equals and file):
            raise ConfigError("VFL-9096", f'--table takes PARTY=FILE. Found "{party}{equals}{file}".')
        check_party(party)
    if len(tables := {party: Path(file) for party, _, file in pairs}) < len(pairs):
        raise ConfigError(
            "VFL-9097", f"--table takes each party once. Found {', '.join(given)}. Join its files first."
        )
    return tables
