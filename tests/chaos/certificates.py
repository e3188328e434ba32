"""Clients that a live server must refuse, and what both sides report."""

import asyncio
from dataclasses import dataclass, replace

import grpc

from tests.chaos.parties import Parties
from tests.forgery import forge
from vafl.config import read_config
from vafl.errors import RemoteFault
from vafl.run.agreement import make_terms
from vafl.run.assembly import make_client
from vafl.run.plan import make_plan
from vafl.transport.grpc.client import FederationClient
from vafl.transport.identity import SERVER, Credentials, issue, make_authority


class Unproven(Credentials):
    """Trusts the server and shows no certificate."""

    def channel_credentials(self):
        return grpc.ssl_channel_credentials(self.authority)


class Careless(Credentials):
    """Does not check the dates of its certificate before it dials."""

    def require_in_date(self, **_):
        pass


@dataclass(frozen=True)
class Impostor:
    """A peer with a wrong certificate, and what both sides must report."""

    case: str
    credentials: Credentials
    at_client: str
    at_server: str


def impostors(parties: Parties) -> list[Impostor]:
    """Return all peers that a server must not admit."""
    certs, others = parties.folder / "certs", parties.folder / "other-authority"
    make_authority(others)
    other = Credentials.load(issue(others, "client-1"), "client-1")
    mallory = Credentials.load(issue(certs, "mallory"), "mallory")
    mine = Credentials.load(certs / "client-1", "client-1")
    second = Credentials.load(certs / "client-2", "client-2")
    unproven = Unproven(**vars(mine))
    trusting = replace(other, authority=mine.authority)
    expired = Careless(**vars(forge(certs, begin=-2, end=-1)))
    closed = "must accept this party's certificate"
    return [
        Impostor("no certificate", unproven, closed, "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        Impostor("another authority's", trusting, closed, "issuer certificate"),
        Impostor("expired", expired, closed, "certificate has expired"),
        Impostor("another party's", second, "Found that of", 'Found that of "client-2", shown by "client-1"'),
        Impostor("no member's", mallory, "shown by", 'Found that of "mallory", shown by "client-1"'),
    ]


def refused(parties: Parties, impostor: Impostor) -> dict:
    """Dial as client-1 with a wrong certificate; return what both sides report."""
    config = read_config(parties.folder / "run.toml")
    plan, before = make_plan(config), len(parties.log(SERVER))
    client = FederationClient(
        make_client(plan, 0), "client-1", make_terms(plan), config.network, impostor.credentials
    )
    try:
        told = asyncio.run(client.run())
    except RemoteFault as fault:
        told = str(fault)
    parties.until(
        lambda: impostor.at_server in parties.log(SERVER)[before:], f"the server's word on {impostor.case}"
    )
    return {"certificate": impostor.case, "client": told, "refused": impostor.at_client in told}
