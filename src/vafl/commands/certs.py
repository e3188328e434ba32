"""`vafl certs`: create a certificate authority and each party's files, and say who gets which file."""

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
    """Add the options of `vafl certs`."""
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="the folder for the files; created if missing, readable only by you",
    )
    parser.add_argument(
        "--party",
        action="append",
        required=True,
        metavar="NAME",
        help=f'a party to issue a certificate for, repeatable; "{SERVER}" is the server',
    )
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        help="another DNS name or IP address of the server, for callers other than vafl clients, repeatable",
    )
    parser.add_argument(
        "--days", type=int, default=825, help="days until a party's certificate expires (%(default)s)"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the files of parties that have some; keep the authority",
    )
    parser.set_defaults(command=certs)


def certs(options: argparse.Namespace, console: Console) -> None:
    """Create the authority if the folder has none, issue the certificates, and say who gets which file."""
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
            ", away from every party: anyone who has it can impersonate any party. You need it again only to "
            "issue more certificates.",
        ),
    )


def _check(folder: Path, parties: Sequence[str], options: argparse.Namespace) -> None:
    """Refuse bad options before any file is written."""
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
            f"{SERVER}. Add that party, or remove --host.",
        )


def _table(folder: Path, parties: Sequence[str]) -> Table:
    table = Table("file", "what it is", "who must get it", "until", box=None, header_style="bold")
    table.columns[0].overflow = "fold"
    table.add_row(
        "ca.pem",
        "the authority's certificate",
        "every party (copies are in their folders)",
        _end(folder / "ca.pem"),
    )
    table.add_row("ca.key", "the authority's private key", "nobody", "")
    for party in parties:
        purpose = "serve" if party == SERVER else "connect"
        stem, until = f"{party}/{party}", _end(folder / party / f"{party}.pem")
        table.add_row(f"{party}/ca.pem", "the authority it trusts", party, "")
        table.add_row(f"{stem}.pem", f"its certificate, to {purpose}", party, until)
        table.add_row(f"{stem}.key", "its private key", f"{party}, in secret", "")
    return table


def _end(path: Path) -> str:
    return f"{read_certificate(path).not_valid_after_utc:%Y-%m-%d}"
