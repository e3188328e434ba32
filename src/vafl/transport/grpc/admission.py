"""Listen for clients, and admit those that prove who they are and agree on the terms.

`serve_streams` starts the gRPC server. Each stream then passes `identify` and `agree`, whatever it is for. A
stream that fails is refused by `refuse`: its client gets the reason as the status of its call.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from typing import NoReturn

import grpc
import grpc.aio

from vafl.errors import ConfigError, InvalidMessage, RemoteFault, Stalled, Unauthenticated
from vafl.names import LOCAL_CLIENT
from vafl.transport.grpc.local import LocalContext, ServerCall
from vafl.transport.grpc.terms import Terms
from vafl.transport.grpc.wire import CLAIM, INSTANCE, SERVICE, TAKES_OVER, channel_options
from vafl.transport.identity import Credentials, party_of, require_loopback
from vafl.transport.settings import NetworkSettings

log = logging.getLogger("vafl.server")

_LAST_PORT = 65535
_LONGEST_INSTANCE = 64


@asynccontextmanager
async def serve_streams(
    method: str,
    handle: Callable[[ServerCall], Awaitable[None]],
    settings: NetworkSettings,
    credentials: Credentials | None,
) -> AsyncIterator[str]:
    """Serve streams of one gRPC method while the block runs; yield host:port, where clients can connect.

    Args:
        handle: serves one stream, and closes it by returning.

    Raises:
        ConfigError: the server cannot listen on `settings.address`.
    """

    async def stream(_: object, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        await handle(context)

    server = grpc.aio.server(options=channel_options(settings))
    handler = grpc.stream_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {method: handler}),))
    address = _listen(server, settings, credentials)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(grace=1.0)


def _listen(server: grpc.aio.Server, settings: NetworkSettings, credentials: Credentials | None) -> str:
    """Bind the server to `settings.address` and return host:port, with the actual port for port 0."""
    if credentials is None:
        require_loopback(settings.address)
        log.warning("PLAINTEXT: no encryption and no identities; for trials on one machine only")
    try:
        if credentials is None:
            port = server.add_insecure_port(settings.address)
        else:
            port = server.add_secure_port(settings.address, credentials.server_credentials())
    except RuntimeError as error:
        require_free(settings.address)  # gRPC does not say why it failed; this usually finds out
        raise _cannot_listen(settings.address, "gRPC could not bind it") from error
    return f"{settings.address.rpartition(':')[0]}:{port}"


def require_free(address: str) -> None:
    """Raise ConfigError unless a server can listen on this address now.

    Commands call this before they create or change any file.
    """
    host, _, port = address.rpartition(":")
    if int(port) > _LAST_PORT:
        raise _cannot_listen(address, "no such port")
    why = ""
    try:
        for family, kind, _, _, endpoint in socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    trial.bind(endpoint)
                    trial.listen(1)
                    return  # one of the host's addresses is enough, as it is for gRPC
                except OSError as error:
                    why = why or error.strerror or str(error)
    except (OSError, UnicodeError) as error:
        why = str(error)
    raise _cannot_listen(address, why)


def _cannot_listen(address: str, why: str) -> ConfigError:
    return ConfigError(
        "VFL-6101",
        "network.address must be an address of this machine with a free port, so that the server can listen "
        f'on it. Found "{address}": {why}. Stop the process that listens there, or choose another port. If '
        "clients reach this machine through another address (NAT), start the server alone with "
        f"--set network.address=0.0.0.0:{address.rpartition(':')[2]}.",
    )


def identify(context: ServerCall, credentials: Credentials | None, parties: Collection[str]) -> str:
    """Return the party at the other end of a connection.

    With TLS, the certificate names the party, and the name that the client claims must be the same. With
    plaintext there is only the claim. The label holder's own client always connects inside this process.

    Raises:
        Unauthenticated: the names differ, or a peer poses as the label holder's own client.
        InvalidMessage: the party is not one of `parties`.
    """
    if isinstance(context, LocalContext):
        return context.party
    claimed = str(dict(context.invocation_metadata() or ()).get(CLAIM, ""))
    party = claimed if credentials is None else party_of(context.auth_context())
    if party == LOCAL_CLIENT:
        raise Unauthenticated(
            "VFL-6102",
            f'only the client inside the server\'s process may be called "{LOCAL_CLIENT}". Found a peer with '
            "that name. Start clients under the names in data.parties.",
        )
    if claimed not in ("", party):
        raise Unauthenticated(
            "VFL-6103",
            f'a party must use its own certificate. Found that of "{party}", shown by "{claimed}". Start '
            "each party with the files that were made for it.",
        )
    if party not in parties:
        raise InvalidMessage(
            "VFL-6104",
            f'a client must be a party of this run. Found "{party}". The clients of this run: '
            f"{', '.join(parties)}.",
        )
    return party


def arrival(context: ServerCall) -> tuple[str, bool]:
    """Return the instance id of the peer's process, and whether it may take another process's place."""
    metadata = dict(context.invocation_metadata() or ())
    return str(metadata.get(INSTANCE, ""))[:_LONGEST_INSTANCE], metadata.get(TAKES_OVER) == "yes"


async def first_message(context: ServerCall, seconds: float) -> bytes:
    """Return the next message of a client that was not admitted yet.

    Raises:
        Stalled: no message arrived within these seconds, or the client has closed the stream.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            content = await context.read()
        if isinstance(content, bytes):
            return content
    raise Stalled(
        "VFL-6105", f"a client must send its terms within {seconds:g} s of connecting (network.heartbeat)."
    )


async def agree(context: ServerCall, terms: Terms, seconds: float) -> None:
    """Read the client's terms, the first message of its stream, and compare them with the server's.

    Raises:
        InvalidMessage: the client sent something else, or other terms.
        Stalled: the client did not send its terms within these seconds.
    """
    theirs = type(terms).from_bytes(await first_message(context, seconds))
    if difference := terms.difference(theirs):
        raise InvalidMessage(
            "VFL-6106",
            f"the parties must agree on the terms. Different: {difference}. Use the same configuration and "
            "data at every party. If from_earlier_run differs, every party needs --from with its folder of "
            "the same run, and a new client --join.",
        )


async def refuse(context: ServerCall, error: RemoteFault | Stalled) -> NoReturn:
    """End the call of a client that is not admitted, and tell it why."""
    # A client dials again after DEADLINE_EXCEEDED, and gives up after FAILED_PRECONDITION.
    late = isinstance(error, Stalled)
    code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.FAILED_PRECONDITION
    await context.abort(code, str(error))
    raise error  # never reached: abort has raised
