"""The client for the label holder's own features, which runs inside the server's process.

It has the same protocol object, checkpoints, ledger and model folder as any other client. Only its connection
differs (`vafl.transport.grpc.local`): it needs no certificate, address or second command.
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
from vafl.run.continued import require_new_models
from vafl.run.plan import Plan
from vafl.transport.grpc.client import FederationClient
from vafl.transport.grpc.handler import Served
from vafl.transport.grpc.server import FederationServer
from vafl.transport.grpc.terms import RunTerms
from vafl.transport.identity import Credentials

log = logging.getLogger("vafl.server")

_TOLD_EVERY = 15.0  # seconds between two log lines while this process waits


def local_client(
    plan: Plan,
    path: Path,
    terms: RunTerms,
    server: FederationServer[Server],
    credentials: Credentials | None,
    *,
    resume: bool,
    accept_ledger: bool,
) -> ClientRun | None:
    """Create the label holder's own client for a training run; None if the label holder has no features.

    Args:
        credentials: the server's credentials, which sign the keys of a secure sum.
    """
    names = [party.name for party in plan.data.parties]
    if LOCAL_CLIENT not in names:
        return None
    folder = path / STATE / LOCAL_CLIENT
    # A server that was killed before it started to serve has not written this client's first checkpoint.
    if resume and not has_checkpoint(folder):
        resume = False
        require_new_models(folder)
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
    """Return whether the client has made at most as many activations as the fastest other client.

    Messages of the local client take no time. Without this limit it would make most updates of an
    asynchronous run, and the run would reach its planned updates before the other clients were trained.
    """
    away = server.absent | server.finished | {index}
    others = [count for other, count in enumerate(server.activations) if other not in away]
    return not others or client.activation <= max(others)


async def serve_with(
    server: FederationServer[Served],
    client: FederationClient | None,
    listening: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve until the run is over. Run the label holder's own client too, if there is one.

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
        # The server has told the client that the run is over. Wait for it to finish its turn.
        while tasks and not tasks[0].done():
            await asyncio.wait(tasks, timeout=_TOLD_EVERY)
            if not tasks[0].done():
                log.info("the run is over; waiting for %s to finish its turn", LOCAL_CLIENT)


async def _take_part(server: FederationServer[Served], client: FederationClient) -> None:
    try:
        await client.run()
    except Exception as error:
        if not server.is_over:  # otherwise the server has ended the run already, and reports the reason
            server.fail(error)
