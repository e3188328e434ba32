"""Options shared by the commands that use a trained model, and the clients' part of those commands."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from vafl.commands.configured import (
    add_client_options,
    add_config_options,
    log_to_stderr,
    overrides,
    party_of,
)
from vafl.config import Config, read_document
from vafl.errors import ConfigError
from vafl.names import check_client
from vafl.run.model_store import read_deployed
from vafl.run.predict import answer
from vafl.transport.identity import SERVER

_SERVER_ONLY = (
    "out",
    "http",
    "keys",
    "tls",
    "tls_certificate",
    "tls_key",
    "repeats",
    "rows",
)
ServersPart = Callable[[Config, argparse.Namespace, Console], None]


def add_model_options(
    parser: argparse.ArgumentParser,
    serve: ServersPart,
    check: Callable[[argparse.Namespace], None] = lambda options: None,
    *,
    may_be_local: bool = False,
) -> None:
    """Add the options of a command that uses a trained model.

    Args:
        parser: the parser of the command.
        serve: the server's part of the command.
        check: checks the server's options before any file is read.
        may_be_local: whether the command without --party may run all parties; if not, it is the server.
    """
    add_config_options(parser)
    otherwise = "all, if RUN has their models" if may_be_local else SERVER
    parser.add_argument(
        "--party", help=f"the name of this party (default: the one whose file it is, otherwise {otherwise})"
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="RUN", help="the run folder with the model"
    )
    add_client_options(parser)
    parser.set_defaults(command=partial(_run, serve, check))


def _run(
    serve: ServersPart,
    check: Callable[[argparse.Namespace], None],
    options: argparse.Namespace,
    console: Console,
) -> None:
    log_to_stderr()
    if owner := read_document(options.config).get("party"):
        options.party = party_of(options, owner)
    if options.party in (None, SERVER):
        check(options)
        serve(_config(options, SERVER), options, console)
        return
    check_client(options.party)
    for name in _SERVER_ONLY:
        if getattr(options, name, None) is not None:
            raise ConfigError(
                "VFL-9061",
                f"--{name.replace('_', '-')} is an option of the server. Found it with --party "
                f"{options.party}, a client. Remove it.",
            )
    config = client_config(options, check_client(options.party))
    reason = answer(
        config,
        options.party,
        options.model,
        replace=options.replace,
        accept_ledger=options.accept_ledger,
    )
    console.print(f"the server is done: {reason}")


def client_config(options: argparse.Namespace, party: str) -> Config:
    """Return the configuration with which a client uses its trained model."""
    config = _config(options, party)
    _require_own_factory(config, options)
    return config


def _config(options: argparse.Namespace, party: str) -> Config:
    return read_deployed(options.config, overrides(options), options.model, party)


def _require_own_factory(config: Config, options: argparse.Namespace) -> None:
    """Raise ConfigError if only the run folder itself names the code that makes the model.

    RUN/config.toml came with the model. It cannot vouch for what the model's manifest names.
    """
    is_inside = options.config.resolve().is_relative_to(options.model.resolve())
    is_named = any(text.partition("=")[0].strip() == "embedding.model" for text in options.set)
    if config.embedding.has_factory and is_inside and not is_named:
        raise ConfigError(
            "VFL-9062",
            f'vafl imports "{config.embedding.model}" only if your own configuration names it. Found it in '
            f'"{options.config}", inside the run folder. If you trust that code, add --set '
            f"embedding.model={config.embedding.model}, or use a configuration outside the run folder.",
        )
