"""`vafl init`: a commented configuration for a CSV, for the parties' tables, or for scikit-learn's digits."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from vafl.errors import ConfigError
from vafl.starter import starter_csv, starter_digits, starter_tables


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of `vafl init`."""
    parser.add_argument("csv", type=Path, nargs="?", help="your CSV file (default: scikit-learn's digits)")
    parser.add_argument(
        "--label",
        default="",
        help="the label column (default: the last of the CSV, or of the server's table); clients ignore it",
    )
    parser.add_argument("--clients", type=int, default=2)
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
    if options.clients < 1:
        raise ConfigError(f"--clients must be 1 or more. Found {options.clients}.")
    if options.out.exists():
        raise ConfigError(f'"{options.out}" exists and is left as it is. Name another --out.')
    notes: list[str] = []
    then = "vafl data" if options.table else "vafl run"
    if options.table:
        parties = [name for name in options.parties.split(",") if name]
        text = starter_tables(_tables(options.table), parties, options.id, options.label)
    elif options.csv:
        text, notes = starter_csv(options.csv, options.label, options.clients)
    else:
        text = starter_digits(options.clients)
    options.out.write_text(text, encoding="utf-8")
    for note in notes:
        console.print(escape(note), highlight=False, soft_wrap=True)
    console.print(f"wrote {options.out}; now: {then} {options.out}")


def _tables(given: Sequence[str]) -> dict[str, Path]:
    """Party -> file."""
    pairs = [text.partition("=") for text in given]
    for party, equals, file in pairs:
        if not (party and equals and file):
            raise ConfigError(f'--table takes PARTY=FILE. Found "{party}{equals}{file}".')
    return {party: Path(file) for party, _, file in pairs}
