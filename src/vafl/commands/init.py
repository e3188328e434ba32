"""`vafl init`: write a commented configuration for a CSV, parties' data, or scikit-learn's digits.

With the data of one party, it writes federation.toml, which all parties share, and the party's own
party.toml. With the data of all parties, it writes one file.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from vafl.commands.starter import starter_csv, starter_digits, starter_sources
from vafl.config import from_document, read_document
from vafl.config.files import FEDERATION
from vafl.data.source_settings import SourceSettings, TableSettings
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
    parser.add_argument(
        "--out",
        type=Path,
        help="the file to write (default: vafl.toml); with one party's data, a folder (default: this one)",
    )
    parser.set_defaults(command=init)


def init(options: argparse.Namespace, console: Console) -> None:
    """Write the configuration, and print the choices made for the user."""
    if options.clients is not None and options.clients < 1:
        raise ConfigError("VFL-9091", f"--clients must be 1 or more. Found {options.clients}.")
    _refuse_unused(options)
    if options.table:
        _init_parties(options, console)
        return
    path = options.out or Path("vafl.toml")
    _require_new(path)
    if options.csv:
        text, notes = starter_csv(options.csv, options.label, options.clients or _CLIENTS)
    else:
        text, notes = starter_digits(options.clients or _CLIENTS), []
    path.write_text(text, encoding="utf-8")
    for note in notes:
        console.print(note)
    console.print(f"wrote {path}; now: vafl run {shlex.quote(str(path))}")


def _init_parties(options: argparse.Namespace, console: Console) -> None:
    """Write the configuration of one party, or of all parties in one file."""
    given = _tables(options.table, options.id)
    clients = [check_party(name.strip()) for name in options.parties.split(",") if name]
    folder = options.out or Path()
    is_alone, shared = len(given) == 1, None
    if is_alone and folder.suffix == ".toml":
        raise ConfigError(
            "VFL-9098",
            f"with one party's table, --out names the folder for party.toml and {FEDERATION}. Found "
            f'"{folder}". Name a folder, or leave --out out for this one.',
        )
    if is_alone and (folder / FEDERATION).is_file():
        shared = from_document(read_document(folder / FEDERATION))
        console.print(f"using {folder / FEDERATION}, with the clients {', '.join(shared.data.parties)}")
    starter = starter_sources(given, clients, options.label, shared)
    out = options.out or Path("vafl.toml")
    files = {folder / name if is_alone else out: text for name, text in starter.files.items()}
    for path in files:
        _require_new(path)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for note in starter.notes:
        console.print(note)
    console.print(f"wrote {' and '.join(map(str, files))}")
    if is_alone and shared is None:
        console.print(f"send {folder / FEDERATION} to the other parties: all need the same file")
    first = next(iter(files))
    console.print(f"now: vafl check {shlex.quote(str(first))}")


def _require_new(path: Path) -> None:
    if path.exists():
        raise ConfigError(
            "VFL-9092",
            f'"{path}" already exists, and vafl init does not overwrite files. Name another --out.',
        )


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


def _tables(texts: Sequence[str], id_column: str) -> dict[str, SourceSettings]:
    """Parse --table options into a map from party to its source."""
    pairs = [text.partition("=") for text in texts]
    for party, equals, file in pairs:
        if not (party and equals and file):
            raise ConfigError("VFL-9096", f'--table takes PARTY=FILE. Found "{party}{equals}{file}".')
        check_party(party)
    tables: dict[str, SourceSettings] = {
        party: TableSettings(str(Path(file).resolve()), id_column) for party, _, file in pairs
    }
    if len(tables) < len(pairs):
        raise ConfigError(
            "VFL-9097", f"--table takes each party once. Found {', '.join(texts)}. Join its files first."
        )
    return tables
