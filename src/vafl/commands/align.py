"""`vafl align`: which of the parties' records are the same, without showing the others."""

import argparse
from pathlib import Path

from rich.console import Console

from vafl.commands.configured import add_config_options, log_to_stderr, overrides
from vafl.config import read_config
from vafl.errors import ConfigError
from vafl.run.align import align_all, align_party


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of `vafl align`."""
    add_config_options(parser)
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--party", help='whose table this is; "server" is the label holder')
    who.add_argument("--all", action="store_true", help="every party, on this machine")
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        help="processes that compute, at each party (default: one for each core)",
    )
    parser.set_defaults(command=align)


def align(options: argparse.Namespace, console: Console) -> None:
    """Runs one party's part, or everybody's."""
    log_to_stderr()
    if options.workers < 0:
        raise ConfigError("VFL-9001", f"--workers must be 0 or more. Found {options.workers}.")
    config = read_config(Path(options.config), overrides(options))
    if options.all:
        align_all(config, console, options.workers)
    else:
        align_party(
            config,
            options.party,
            console,
            options.workers,
            lambda address: console.print(f"listening on {address}"),
        )
