"""`vafl keys`: create, list and remove the API keys that `vafl serve` accepts."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vafl.transport.identity import add_key, read_keys, remove_key


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vafl keys`."""
    actions = parser.add_subparsers(required=True, metavar="action")
    for name, text, command in (
        ("add", "create a key and print it once; creates the file if needed", _add),
        ("list", "list the keys by name", _list),
        ("remove", "remove a key; a running server refuses it within a second", _remove),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument(
            "file", type=Path, metavar="FILE", help="the file of keys, for `vafl serve --keys`"
        )
        if name != "list":
            action.add_argument(
                "name", metavar="NAME", help="the user of the key; the name appears in metrics and logs"
            )
        action.set_defaults(command=command)


def _add(options: argparse.Namespace, console: Console) -> None:
    key = add_key(options.file, options.name)
    console.print(
        f"{key}\nThis is the key of {options.name}. It is not stored: pass it on now, over a secure channel."
    )


def _list(options: argparse.Namespace, console: Console) -> None:
    table = Table("name", "created", box=None, header_style="bold")
    for name, key in read_keys(options.file).items():
        table.add_row(name, key.created)
    console.print(table)


def _remove(options: argparse.Namespace, console: Console) -> None:
    remove_key(options.file, options.name)
    console.print(f"removed the key of {options.name} from {options.file}")
