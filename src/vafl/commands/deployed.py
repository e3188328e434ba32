"""What commands that use a trained model share: where it is, and the clients' part, the same in all."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from vafl.commands.configured import add_client_options, add_config_options, log_to_stderr, overrides
from vafl.config import Config
from vafl.errors import ConfigError
from vafl.names import check_client
from vafl.run.model_store import read_deployed
from vafl.run.predict import answer
from vafl.transport.identity import SERVER

_OF_THE_SERVER = (
    "out",
    "http",
    "keys",
    "tls",
    "tls_certificate",
    "tls_key",
    "repeats",
    "rows",
)  # not for clients
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
        serve: the server's part of the command.
        check: checks the server's options before any file is read.
        may_be_local: without --party, the command can do the parts of all parties; else it is the server.
    """
    add_config_options(parser)
    if may_be_local:
        parser.add_argument("--party", help="who this is (default: everyone, if RUN has all their models)")
    else:
        parser.add_argument("--party", default=SERVER, help="who this is (%(default)s, who asks the others)")
    parser.add_argument("--model", type=Path, required=True, metavar="RUN", help="where the model is")
    add_client_options(parser)
    parser.set_defaults(command=partial(_run, serve, check))


def _run(
    serve: ServersPart,
    check: Callable[[argparse.Namespace], None],
    options: argparse.Namespace,
    console: Console,
) -> None:
    log_to_stderr()
    if options.party in (None, SERVER):
        check(options)
        serve(_config(options, SERVER), options, console)
        return
    check_client(options.party)
    for name in _OF_THE_SERVER:
        if getattr(options, name, None) is not None:
            raise ConfigError(
                "VFL-9061",
                f"--{name.replace('_', '-')} is for the server. Found it with --party {options.party}, which "
                "answers the server only. Leave it out.",
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
    is_named = any(text.partition("=")[0].strip() == "model.embedding" for text in options.set)
    if config.model.has_factory and is_inside and not is_named:
        raise ConfigError(
            "VFL-9062",
            f'vafl imports "{config.model.embedding}" only if your own configuration names it. Found it in '
            f'"{options.config}", inside the run folder. If you trust that code, add --set '
            f"model.embedding={config.model.embedding}, or use a configuration outside the run folder.",
        )
