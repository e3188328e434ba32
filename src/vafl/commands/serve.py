"""`vafl serve`: a trained model asked live; the server answers HTTP, clients answer the server."""

import argparse
from pathlib import Path

from rich.console import Console

from vafl.commands.configured import add_config_options, log_to_stderr, overrides
from vafl.config import read_config
from vafl.federation.prediction import answer
from vafl.federation.serving import serve
from vafl.runtime.identity import SERVER


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of `vafl serve`."""
    add_config_options(parser)
    parser.add_argument("--party", default=SERVER, help="who this is (%(default)s)")
    parser.add_argument("--model", type=Path, required=True, metavar="RUN", help="where the model is")
    parser.add_argument(
        "--http",
        default="127.0.0.1:8080",
        metavar="HOST:PORT",
        help="where to ask the server (%(default)s)",
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace, console: Console) -> None:
    """One party's part, until the server is told to stop."""
    log_to_stderr()
    config = read_config(options.config, overrides(options))
    if options.party != SERVER:
        console.print(f"the server is done: {answer(config, options.party, options.model)}")
        return

    def listening(clients: str, http: str) -> None:
        console.print(f"listening on {clients} for clients, on {http} for requests", soft_wrap=True)

    serve(config, options.model, options.http, listening)
