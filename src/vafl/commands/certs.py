"""`vafl certs`: an authority, a folder of files for each party, and who must get what."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vafl.errors import ConfigError
from vafl.names import SERVER, check_client
from vafl.transport.identity import issue, make_authority
from vafl.transport.identity.authority import host_name, refuse_issued
from vafl.transport.identity.pem import read_certificate


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of `vafl certs`."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="where they go; made, for your eyes only")
    parser.add_argument(
        "--party",
        action="append",
        required=True,
        metavar="NAME",
        help=f'a party to issue for, repeatable; "{SERVER}" is the one that serves',
    )
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        help="a further DNS name or IP address of the server, for others than vafl's clients, repeatable",
    )
    parser.add_argument(
        "--days", type=int, default=825, help="how long a party's certificate holds (%(default)s)"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="issue anew for parties that have files; the authority stays"
    )
    parser.set_defaults(command=certs)


def certs(options: argparse.Namespace, console: Console) -> None:
    """Makes the authority if the folder has none, issues what is asked for, says what to do with it."""
    folder, parties = options.folder, list(dict.fromkeys(options.party))
    _check(folder, parties, options)
    if not any((folder / name).exists() for name in ("ca.pem", "ca.key")):
        make_authority(folder)
    for party in parties:
        hosts = options.host if party == SERVER else ()
        issue(folder, party, hosts=hosts, days=options.days, overwrite=options.overwrite)
    console.print(f"in {folder}:")
    console.print(_table(folder, parties))
    console.print(
        Text.assemble(
            (f"Keep {folder / 'ca.key'} offline", "bold yellow"),
            ", away from every party: whoever holds it can pose as any of them. It is needed again only to "
            "issue more certificates.",
        ),
    )


def _check(folder: Path, parties: Sequence[str], options: argparse.Namespace) -> None:
    """Everything that can be refused before a file is written."""
    for party in parties:
        if party != SERVER:
            check_client(party)
        if not options.overwrite:
            refuse_issued(folder, party)
    for host in options.host:
        host_name(host)
    if options.days < 1:
        raise ConfigError("VFL-9031", f"--days must be 1 or more. Found {options.days}.")
    if options.host and SERVER not in parties:
        raise ConfigError(
            "VFL-9032",
            f"--host is for the server's certificate. Found --host {' '.join(options.host)} without --party "
            f"{SERVER}. Add that party or leave out --host.",
        )


def _table(folder: Path, parties: Sequence[str]) -> Table:
    table = Table("file", "what it is", "who must get it", "until", box=None, header_style="bold")
    table.columns[0].overflow = "fold"
    table.add_row("ca.pem", "the authority's certificate", "everyone has a copy", _end(folder / "ca.pem"))
    table.add_row("ca.key", "the authority's private key", "nobody", "")
    for party in parties:
        purpose = "serve" if party == SERVER else "dial"
        own, until = f"{party}/{party}", _end(folder / party / f"{party}.pem")
        table.add_row(f"{party}/ca.pem", "whom it trusts", party, "")
        table.add_row(f"{own}.pem", f"its certificate, to {purpose}", party, until)
        table.add_row(f"{own}.key", "its private key", f"{party}, in secret", "")
    return table


def _end(path: Path) -> str:
    return f"{read_certificate(path).not_valid_after_utc:%Y-%m-%d}"
