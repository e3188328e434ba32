"""One end of a gRPC stream. Training, prediction and alignment share it, at both ends.

    read():  the call ──> a message ──> its reader handles it ──> give_credit(1) ──> the next read()
    put():   a content ──> the outbox ──> the writer ──> the call

Invariants:

- At most `INBOX` messages were read and not handled. Further ones stay in the network, so HTTP/2 flow control
  makes the peer wait.
- No credit returns while too much is unsent (`is_full`). So a peer that keeps sending and never reads cannot
  fill this process's memory with answers.
- Once the peer has ended the stream, `read` returns None. The writer drops what is queued, so a task that
  waits for room goes on.
- Once this end is closed, nothing waits: `find_room` and `pause` return False.

gRPC's keepalive notices a peer that is frozen or cut off: see `channel_options`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import grpc
import grpc.aio

from vafl.transport.grpc.flow_control import Credit, Outbox
from vafl.transport.grpc.local import ClientCall
from vafl.transport.grpc.wire import printable

INBOX = 4  # messages that may wait to be handled
_ENDED = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)  # raised once a stream has ended


class Call(Protocol):
    """The part of a gRPC call that a stream needs, at either end."""

    async def read(self) -> Any:
        """Return the next message, or anything but bytes at the stream's end."""

    async def write(self, content: bytes) -> None:
        """Send a message; wait while the network takes no more."""


class Stream:
    """Read and write one gRPC call. All methods run on the event loop.

    Args:
        call: the gRPC call, or a local one.
        largest_unsent: bytes that may be unsent before the stream counts as full.

    Attributes:
        sent: bytes that were passed to gRPC.
    """

    def __init__(self, call: Call, largest_unsent: int) -> None:
        self.sent = 0
        self._call, self._largest_unsent = call, largest_unsent
        self._outbox, self._unsent = Outbox(), 0
        self._credit, self._handled = Credit(INBOX), 0
        self._room, self._closed = asyncio.Event(), asyncio.Event()

    @property
    def queued(self) -> int:
        """Return the number of contents that wait to be sent."""
        return len(self._outbox)

    @property
    def is_full(self) -> bool:
        """Return whether so much is unsent that this end should read and make no more."""
        return self._unsent > self._largest_unsent

    def put(self, content: bytes) -> None:
        """Queue a content to be sent."""
        self._unsent += len(content)
        self._outbox.put(content)

    def end_outbox(self) -> None:
        """Let the writer end after everything that is queued. Contents queued later are never sent."""
        self._outbox.put(None)

    def clear_outbox(self) -> None:
        """Drop everything that is queued."""
        self._unsent -= self._outbox.clear()

    def give_credit(self, handled: int = 0) -> None:
        """Return the credit of handled messages, unless the stream is full.

        Args:
            handled: messages that were handled since the last call.
        """
        # Hold the credit back while too much is unsent. The writer calls this again after each content, so
        # the credit is given as soon as the peer has read enough.
        self._handled += handled
        if self.is_full:
            return
        if self._handled:
            self._credit.give(self._handled)
            self._handled = 0
        self._room.set()

    async def read(self) -> bytes | None:
        """Return the next message, or None once the stream has ended. Wait first if there is no credit."""
        await self._credit.take()
        try:
            content = await self._call.read()
        except _ENDED:
            return None
        return content if isinstance(content, bytes) else None

    async def find_room(self) -> bool:
        """Wait while the stream is full. Return False if this end has been closed."""
        while self.is_full and not self._closed.is_set():
            self._room.clear()
            await self._room.wait()
        return not self._closed.is_set()

    async def pause(self, seconds: float) -> bool:
        """Wait for these seconds. Return False, and at once, if this end has been closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()
        return not self._closed.is_set()

    @asynccontextmanager
    async def open(self, *parts: Awaitable[Any]) -> AsyncIterator[Sequence["asyncio.Future[Any]"]]:
        """Write the outbox and run `parts` beside it while the block runs; then cancel them and close.

        Yields:
            The tasks of the writer and of the parts.
        """
        tasks = [asyncio.ensure_future(part) for part in (self._write(), *parts)]
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            self._closed.set()
            self._room.set()

    async def run(self, *parts: Awaitable[Any]) -> None:
        """Write the outbox and run `parts` until the first of them ends, with a result or an error."""
        async with self.open(*parts) as tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _write(self) -> None:
        while (content := await self._outbox.take()) is not None:
            try:
                await self._call.write(content)
                self.sent += len(content)
            except _ENDED:
                # Go on and drop what is queued: the reader reports the end, and it may be waiting for credit
                # that returns only when the outbox is empty enough.
                pass
            self._unsent -= len(content)
            self.give_credit()


async def status_of(call: ClientCall) -> grpc.aio.AioRpcError:
    """Return the status of a stream that has ended, as an error whose details are safe to show.

    A server ends a stream by a message that says so. If it only closes the stream, that is an error, too.
    """
    code, details = await call.code(), printable(await call.details() or "")
    if code is grpc.StatusCode.OK:
        code, details = grpc.StatusCode.UNAVAILABLE, "the server closed the stream"
    initial, trailing = await call.initial_metadata(), await call.trailing_metadata()
    return grpc.aio.AioRpcError(code, initial, trailing, details=details)
