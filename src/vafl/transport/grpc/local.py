"""A connection inside the server's process, for the client of the label holder's own features.

Both ends use these objects like a gRPC stream: the same frames, admission and flow control, without a socket
or a certificate. Only the server's own process can open such a connection, which proves who the client is. On
every other connection the server refuses the name of that client (`identify`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio

from vafl.names import LOCAL_CLIENT
from vafl.transport.grpc.flow_control import Credit, Outbox

log = logging.getLogger("vafl.server")

_UNREAD = 4  # messages that may wait in one direction before the writer has to wait
Metadata = tuple[tuple[str, str], ...]


class _Aborted(Exception):
    """The server refused the connection."""


class _Pipe:
    """Messages in one direction, for one writer and one reader."""

    def __init__(self) -> None:
        self._contents, self._credit = Outbox(), Credit(_UNREAD)

    async def write(self, content: bytes) -> None:
        await self._credit.take()
        self._contents.put(content)

    async def read(self) -> bytes | None:
        """Return the next message; None once the other end is closed."""
        content = await self._contents.take()
        self._credit.give(1)
        return content

    def close(self) -> None:
        self._contents.put(None)


class LocalContext:
    """The server's end of a local connection."""

    party = LOCAL_CLIENT

    def __init__(self, call: "LocalCall", metadata: Metadata) -> None:
        self._call, self._metadata = call, metadata

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    async def read(self) -> bytes | None:
        return await self._call.up.read()

    async def write(self, content: bytes) -> None:
        await self._call.down.write(content)

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        self._call.status = code, details
        raise _Aborted(details)


class LocalCall:
    """The client's end of a local connection.

    Args:
        serve: the server's connection handler.
        metadata: sent to the server with the call.
    """

    def __init__(self, serve: Callable[[LocalContext], Awaitable[None]], metadata: Metadata) -> None:
        self.up, self.down = _Pipe(), _Pipe()
        self.status = grpc.StatusCode.OK, ""
        self._task = asyncio.create_task(self._run(serve, LocalContext(self, metadata)))

    async def _run(self, serve: Callable[[LocalContext], Awaitable[None]], context: LocalContext) -> None:
        try:
            await serve(context)
        except _Aborted:
            pass  # the client reads the reason from the status
        except Exception as error:
            self.status = grpc.StatusCode.UNKNOWN, repr(error)
            log.exception("the connection of %s failed", context.party)
        finally:
            self.down.close()

    async def read(self) -> Any:
        content = await self.down.read()
        return grpc.aio.EOF if content is None else content

    async def write(self, content: bytes) -> None:
        await self.up.write(content)

    def cancel(self) -> None:
        """Close the connection; the server's handler ends too."""
        self.up.close()
        self._task.cancel()

    async def code(self) -> grpc.StatusCode:
        return self.status[0]

    async def details(self) -> str:
        return self.status[1]

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()


ServerCall: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes] | LocalContext"
ClientCall: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes] | LocalCall"
