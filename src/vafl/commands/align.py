"""`vafl align`: find the records that the parties share, without revealing the others."""

import argparse
from pathlib import Path

from rich.console import Console

from vafl.commands.configured import add_config_options, log_to_stderr, overrides, party_of
from vafl.config import read_config
from vafl.errors import ConfigError
from vafl.run.align import align_all, align_party


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vafl align`."""
    add_config_options(parser)
    who = parser.add_mutually_exclusive_group()
    who.add_argument(
        "--party", help='the name of this party, if the file is for all; "server" is the label holder'
    )
    who.add_argument("--all", action="store_true", help="run every party on this machine")
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        help="worker processes at each party (default: one per core)",
    )
    parser.set_defaults(command=align)


def align(options: argparse.Namespace, console: Console) -> None:
    """Run the alignment as one party, or as all parties."""
    log_to_stderr()
    if options.workers < 0:
        raise ConfigError(
            "VFL-9001", f"--workers must be 0 or more (0: one per core). Found {options.workers}."
        )
    config = read_config(Path(options.config), overrides(options))
    if options.all:
        align_all(config, console, options.workers)
    else:
        align_party(
            config,
            party_of(options, config.party),
            console,
            options.workers,
            lambda address: console.print(f"listening on {address}"),
        )
