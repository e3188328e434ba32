"""Options and output shared by the commands that take a configuration."""

import argparse
import json
import logging
import math
import os
import sys
from pathlib import Path
from typing import Any

from vafl.errors import ConfigError


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Add the configuration file and the options that override it."""
    parser.add_argument("config", type=Path, help="the TOML file; `vafl init` writes one")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="section.key=value",
        help="override a setting, repeatable; relative paths start at the TOML file's folder",
    )
    parser.add_argument("--data", help="the folder of public data sets (or VAFL_DATA)")


def party_of(options: argparse.Namespace, owner: str) -> str:
    """Return the party that runs the command: --party, or the party whose file the configuration is.

    Args:
        owner: the party whose file the configuration is; empty for a file for all parties.

    Raises:
        ConfigError: neither names a party, or they name different ones.
    """
    named: str = options.party or owner
    if not named:
        raise ConfigError(
            "VFL-9151",
            f'"{options.config}" is a file for all parties, so the command needs --party NAME. Found none.',
        )
    if owner and named != owner:
        raise ConfigError(
            "VFL-9152",
            f'"{options.config}" is the file of {owner}. Found --party {named}. Remove --party, or use '
            f"the file of {named}.",
        )
    return named


def add_client_options(parser: argparse.ArgumentParser) -> None:
    """Add the options with which a client's operator overrides a refusal."""
    parser.add_argument(
        "--replace",
        action="store_true",
        help="replace another process of this party that is already connected",
    )
    add_ledger_option(parser)


def add_ledger_option(parser: argparse.ArgumentParser) -> None:
    """Add the option to continue with an older ledger. The label holder's own client has it too."""
    parser.add_argument(
        "--accept-ledger",
        action="store_true",
        help="continue with an older copy of the privacy ledger, because the newest one is lost",
    )


def overrides(options: argparse.Namespace) -> list[str]:
    """Return `section.key=value` for each override on the command line or in the environment."""
    folder = options.data or os.environ.get("VAFL_DATA", "")
    return [*([f"data.folder={json.dumps(folder)}"] if folder else []), *options.set]


def log_to_stderr() -> None:
    """Log to stderr, so that stdout has only the command's own output."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)


def as_json(report: Any) -> str:
    """Return the report as JSON text. Infinity and nan become null, since JSON cannot represent them."""
    return json.dumps(_finite(report), indent=2) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
