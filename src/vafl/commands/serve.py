"""`vafl serve`: answer HTTP requests for predictions. The server requests embeddings from the clients."""

import argparse
from pathlib import Path

from rich.console import Console

from vafl.commands.deployed import add_model_options
from vafl.config import Config
from vafl.errors import ConfigError
from vafl.run.api_access import Access
from vafl.run.credentials import load_https
from vafl.run.serve import serve
from vafl.transport.identity import SERVER, Callers, HttpAddress, Https

_ADDRESS = "127.0.0.1:8080"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vafl serve`."""
    add_model_options(parser, _serve, _check_tls)
    parser.add_argument("--http", metavar="HOST:PORT", help=f"server only: the HTTP address ({_ADDRESS})")
    parser.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help="server only: answer only callers with a key from `vafl keys`",
    )
    parser.add_argument(
        "--tls",
        action="store_const",
        const=True,
        help="server only: serve HTTPS with the certificate in network.certificates",
    )
    for name, text in (("certificate", "certificate (chain)"), ("key", "private key")):
        parser.add_argument(
            f"--tls-{name}",
            type=Path,
            metavar="FILE",
            help=f"server only: serve HTTPS with this {text}, as PEM",
        )


def _serve(config: Config, options: argparse.Namespace, console: Console) -> None:
    def listening(clients: str, http: str) -> None:
        console.print(f"listening on {clients} for clients, on {http} for requests")

    access = Access(
        HttpAddress.of(options.http or _ADDRESS),
        None if options.keys is None else Callers(options.keys),
        _https(config, options),
    )
    serve(config, options.model, access, listening, accept_ledger=options.accept_ledger)


def _check_tls(options: argparse.Namespace) -> None:
    files = [path for path in (options.tls_certificate, options.tls_key) if path is not None]
    if len(files) == 1 or (files and options.tls):
        raise ConfigError(
            "VFL-9121",
            "TLS needs --tls, for the server's own certificate, or both --tls-certificate and --tls-key. "
            f"Found {'--tls and ' if options.tls else 'only '}{', '.join(map(str, files))}. "
            "Remove one, or add the other.",
        )


def _https(config: Config, options: argparse.Namespace) -> Https | None:
    if options.tls_certificate is not None:
        return Https.load(options.tls_certificate, options.tls_key)
    return load_https(config, SERVER) if options.tls else None
