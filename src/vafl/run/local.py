"""The client of the label holder's own features, run inside the server's process.

It is a client like any other: the same protocol object, checkpoints, ledger and model folder. Only its
connection is special (`vafl.transport.grpc.local`): it needs no certificate, address or second command.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from vafl.names import LOCAL_CLIENT
from vafl.protocol.client import Client
from vafl.protocol.server import Server
from vafl.run.agreement import STATE, require_same_run
from vafl.run.checkpoint import has_checkpoint
from vafl.run.client import ClientRun
from vafl.run.plan import Plan
from vafl.transport.grpc.client import FederationClient
from vafl.transport.grpc.server import FederationServer, Served
from vafl.transport.grpc.wire import Agreement
from vafl.transport.identity import Credentials

log = logging.getLogger("vafl.server")

_TOLD_EVERY = 15.0  # seconds between two notes about what this process waits for


def local_client(
    plan: Plan,
    path: Path,
    terms: Agreement,
    server: FederationServer[Server],
    credentials: Credentials | None,
    *,
    resume: bool,
    accept_ledger: bool,
) -> ClientRun | None:
    """Make the label holder's own client of a training run; None if it has no features.

    Args:
        credentials: the server's, which vouch for the keys of a secure sum.
    """
    names = [party.name for party in plan.data.parties]
    if LOCAL_CLIENT not in names:
        return None
    folder = path / STATE / LOCAL_CLIENT
    # A server that was killed before it served has not written this client's first checkpoint yet.
    resume = resume and has_checkpoint(folder)
    if resume:
        require_same_run(folder, terms)
    index = names.index(LOCAL_CLIENT)
    return ClientRun(
        plan,
        LOCAL_CLIENT,
        path,
        terms,
        credentials,
        resume=resume,
        takes_over=resume,
        accept_ledger=accept_ledger,
        connect=server.connect,
        may_wake=lambda client: keeps_pace(client, server.server, index),
    )


def keeps_pace(client: Client, server: Server, index: int) -> bool:
    """Return whether the client has made no more activations than the fastest of the other clients.

    Its messages take no time. Without this rule it would make most updates of an asynchronous run, and the
    run's planned updates would be over before the other clients were trained.
    """
    away = server.absent | server.finished | {index}
    others = [count for other, count in enumerate(server.activations) if other not in away]
    return not others or client.activation <= max(others)


async def serve_with(
    server: FederationServer[Served],
    client: FederationClient | None,
    listening: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve until the run is over, with the label holder's own client beside the server if there is one.

    If that client fails, the run fails.
    """
    tasks: list[asyncio.Task[None]] = []

    def began(address: str) -> None:
        if client is not None:
            tasks.append(asyncio.create_task(_take_part(server, client)))
        listening(address)

    try:
        await server.serve(began)
    finally:
        while tasks and not tasks[0].done():  # it was told that the run is over, and ends after its turn
            await asyncio.wait(tasks, timeout=_TOLD_EVERY)
            if not tasks[0].done():
                log.info("the run is over; waiting for %s to finish its turn", LOCAL_CLIENT)


async def _take_part(server: FederationServer[Served], client: FederationClient) -> None:
    try:
        await client.run()
    except Exception as error:
        if not server.is_over:  # otherwise the server ended the run, and says why itself
            server.fail(error)
