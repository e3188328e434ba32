"""What every command that takes a configuration has in common."""

import argparse
import json
import logging
import math
import os
import sys
from pathlib import Path
from typing import Any


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """The configuration, and what overrides it."""
    parser.add_argument("config", type=Path, help="the TOML file; `vafl init` writes one")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="section.key=value",
        help="override a setting, repeatable; files are meant from the TOML file's folder, as in it",
    )
    parser.add_argument("--data", help="the folder of public data sets (or VAFL_DATA)")


def add_client_options(parser: argparse.ArgumentParser) -> None:
    """Add the options with which a client's operator overrules a refusal."""
    parser.add_argument(
        "--replace",
        action="store_true",
        help="take the place of another process of this party that takes part already",
    )
    add_ledger_option(parser)


def add_ledger_option(parser: argparse.ArgumentParser) -> None:
    """Add the option to go on with an older ledger, which the label holder's own client has too."""
    parser.add_argument(
        "--accept-ledger",
        action="store_true",
        help="go on with a privacy ledger that is not the newest one, because that one is lost",
    )


def overrides(options: argparse.Namespace) -> list[str]:
    """`section.key=value` for each thing that the command line says."""
    folder = options.data or os.environ.get("VAFL_DATA", "")
    return [*([f"data.folder={json.dumps(folder)}"] if folder else []), *options.set]


def log_to_stderr() -> None:
    """What a party of a federation does is told there, beside what its command prints."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)


def as_json(report: Any) -> str:
    """The report as a document; what is infinite becomes null, since JSON has no word for it."""
    return json.dumps(_finite(report), indent=2) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
