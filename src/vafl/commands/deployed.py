"""What commands that use a trained model share: where it is, and the clients' part, the same in all."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from vafl.commands.configured import add_client_options, add_config_options, log_to_stderr, overrides
from vafl.config import Config, read_config
from vafl.errors import ConfigError
from vafl.federation.prediction import answer
from vafl.runtime.identity import SERVER

_OF_THE_SERVER = ("out", "http")  # options that mean nothing to a client
ServersPart = Callable[[Config, argparse.Namespace, Console], None]


def add_model_options(parser: argparse.ArgumentParser, serve: ServersPart) -> None:
    """The configuration, who this is, and the model; `serve` is what the server does with them."""
    add_config_options(parser)
    parser.add_argument("--party", default=SERVER, help="who this is (%(default)s, who asks the others)")
    parser.add_argument("--model", type=Path, required=True, metavar="RUN", help="where the model is")
    add_client_options(parser)
    parser.set_defaults(command=partial(_run, serve))


def _run(serve: ServersPart, options: argparse.Namespace, console: Console) -> None:
    log_to_stderr()
    config = read_config(options.config, overrides(options))
    if options.party == SERVER:
        serve(config, options, console)
        return
    for name in _OF_THE_SERVER:
        if getattr(options, name, None) is not None:
            raise ConfigError(
                f"--{name} is for the server. Found it with --party {options.party}, who answers the server "
                "and nobody else. Leave it out."
            )
    reason = answer(
        config,
        options.party,
        options.model,
        replace=options.replace,
        accept_ledger=options.accept_ledger,
    )
    console.print(f"the server is done: {reason}")
