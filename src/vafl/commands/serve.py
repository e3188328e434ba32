"""`vafl serve`: a trained model asked live; the server answers HTTP, clients answer the server."""

import argparse

from rich.console import Console

from vafl.commands.deployed import add_model_options
from vafl.config import Config
from vafl.federation.serving import serve

_ADDRESS = "127.0.0.1:8080"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of `vafl serve`."""
    add_model_options(parser, _serve)
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        help=f"the server's: where to ask it ({_ADDRESS})",
    )


def _serve(config: Config, options: argparse.Namespace, console: Console) -> None:
    def listening(clients: str, http: str) -> None:
        console.print(f"listening on {clients} for clients, on {http} for requests")

    serve(config, options.model, options.http or _ADDRESS, listening)
