"""`vafl init`: write a commented configuration for a CSV, parties' tables, or scikit-learn's digits."""

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
    """Add the options of `vafl init`."""
    parser.add_argument("csv", type=Path, nargs="?", help="your CSV file (default: scikit-learn's digits)")
    parser.add_argument(
        "--label",
        default="",
        help="the label column (default: the last column of the CSV or of the server's table)",
    )
    parser.add_argument(
        "--clients", type=int, help="the number of clients that share a CSV's columns (default: 2)"
    )
    parser.add_argument(
        *("--table", "-t"),
        action="append",
        default=[],
        metavar="PARTY=FILE",
        help='a party\'s own table, repeatable; the party "server" holds the labels',
    )
    parser.add_argument(
        "--parties",
        default="",
        help="the names of all clients, such as bank,shop (default: those with a table)",
    )
    parser.add_argument("--id", default="", help="the id column of the tables (default: the first)")
    parser.add_argument("--out", type=Path, default=Path("vafl.toml"))
    parser.set_defaults(command=init)


def init(options: argparse.Namespace, console: Console) -> None:
    """Write the configuration, and print the choices made for the user."""
    if options.clients is not None and options.clients < 1:
        raise ConfigError("VFL-9091", f"--clients must be 1 or more. Found {options.clients}.")
    if options.out.exists():
        raise ConfigError(
            "VFL-9092",
            f'"{options.out}" already exists, and vafl init does not overwrite files. Name another --out.',
        )
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
    """Refuse options that would have no effect on the written file, and suggest the right ones."""
    if options.table and (options.csv or options.clients):
        found = f'"{options.csv}"' if options.csv else f"--clients {options.clients}"
        raise ConfigError(
            "VFL-9093",
            f"--table cannot be combined with a CSV file or --clients. Found {found} as well. Name each "
            "party's file as --table PARTY=FILE, or remove --table.",
        )
    if not options.table and (options.parties or options.id):
        found = f"--parties {options.parties}" if options.parties else f"--id {options.id}"
        raise ConfigError(
            "VFL-9094",
            f"--parties and --id need --table. Found {found} without it. Add --table PARTY=FILE, or remove "
            "that option.",
        )
    if options.label and not (options.table or options.csv):
        raise ConfigError(
            "VFL-9095",
            f'--label needs a CSV file or --table. Found "{options.label}" without a file. Name one.',
        )


def _tables(texts: Sequence[str]) -> dict[str, Path]:
    """Parse --table options into a map from party to file."""
    pairs = [text.partition("=") for text in texts]
    for party, equals, file in pairs:
        if not (party and equals and file):
            raise ConfigError("VFL-9096", f'--table takes PARTY=FILE. Found "{party}{equals}{file}".')
        check_party(party)
    if len(tables := {party: Path(file) for party, _, file in pairs}) < len(pairs):
        raise ConfigError(
            "VFL-9097", f"--table takes each party once. Found {', '.join(texts)}. Join its files first."
        )
    return tables
