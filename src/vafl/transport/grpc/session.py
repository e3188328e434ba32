"""One connection as a client sees it: a reader, a writer, flow control and an alarm clock.

A session is open until exactly one of three things happens. The first one decides what `run` does:

    OPEN ──── `end(reason)`: the server has ended the run ────> return the reason ──┐
      ├────── `fail(error)`: the worker has failed ───────────> raise the error ────┼──> CLOSED
      └────── the stream ends without Stop ───────────────────> raise AioRpcError ──┘

Once the session is CLOSED, the futures of `find_room` and `pause` are set to False. So a worker that waits
for one of them never blocks forever.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

import grpc
import grpc.aio

from vafl.transport.grpc.flow_control import Credit, Outbox
from vafl.transport.grpc.local import ClientStream

_INBOX = 4  # messages of the server that may wait for the worker


class Session:
    """One connection to the server.

    Both queues are bounded: messages that were read and not handled, and answers that were not sent. A server
    that sends requests without reading the answers is held back by flow control.

    All methods run on the event loop.

    Args:
        stream: the gRPC call.
        largest_unsent: bytes that may be unsent before the session stops reading.

    Attributes:
        welcome: whether the server has sent Welcome. Until then the client has nothing to do.
        sent: bytes that were passed to the stream.
        answered: bytes of answers that the worker has made since `find_room` last found room.
    """

    def __init__(self, stream: ClientStream, largest_unsent: int) -> None:
        self.welcome, self.answered, self.sent = False, 0, 0
        self._stream = stream
        self._outbox = Outbox()
        self._unsent, self._largest_unsent = 0, largest_unsent
        self._credit, self._handled = Credit(_INBOX), 0
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._alarm: asyncio.TimerHandle | None = None
        self._room: Future[bool] | None = None
        self._pause: Future[bool] | None = None
        self._closed = False

    async def run(self, hear: Callable[[bytes], None]) -> str:
        """Read and write until the run is over; return the server's reason for ending it.

        Args:
            hear: called with each message of the server.

        Raises:
            grpc.aio.AioRpcError: the connection is lost.
            Exception: the error that `fail` was called with.
        """
        tasks = [asyncio.create_task(self._read(hear)), asyncio.create_task(self._write())]
        try:
            return await self._ended
        finally:
            for task in tasks:
                task.cancel()
            if self._alarm is not None:
                self._alarm.cancel()
            self._stream.cancel()
            # The worker may be waiting for room or for the end of a pause: release it.
            self._closed = True
            self._give_credit()
            self._end_pause()

    def say(self, contents: Sequence[bytes], *, handled: bool = False) -> None:
        """Queue contents to be sent in order.

        Args:
            handled: whether this completes the handling of a message of the server, so that another one may
                be read.
        """
        for content in contents:
            self._unsent += len(content)
            self._outbox.put(content)
        self._handled += handled
        self._give_credit()

    def find_room(self, room: "Future[bool]") -> None:
        """Set `room` to True once at most `largest_unsent` bytes are unsent, or to False on closing."""
        self._room = room
        self._give_credit()

    def pause(self, seconds: float, over: "Future[bool]") -> None:
        """Set `over` to True after these seconds, or to False as soon as the session closes."""
        self._pause = over
        if self._closed:
            self._end_pause()
        else:
            asyncio.get_running_loop().call_later(seconds, self._end_pause)

    def _end_pause(self) -> None:
        if self._pause is not None:
            self._pause.set_result(not self._closed)
            self._pause = None

    def end(self, reason: str) -> None:
        """Make `run` return this reason: the server has ended the run."""
        if not self._ended.done():
            self._ended.set_result(reason)

    def fail(self, error: Exception) -> None:
        """Make `run` raise this error. Only the first call of `end` or `fail` counts."""
        if not self._ended.done():
            self._ended.set_exception(error)

    def wake_after(self, pause: Callable[[], float], awake: Callable[[], None]) -> None:
        """Call `awake` once, `pause()` seconds from now, unless an earlier alarm is still pending."""
        if self._alarm is None and not self._ended.done():
            self._alarm = asyncio.get_running_loop().call_later(pause(), self._ring, awake)

    def _ring(self, awake: Callable[[], None]) -> None:
        self._alarm = None
        awake()

    def _give_credit(self) -> None:
        """If few enough bytes are unsent, let the reader read on and the worker make more answers."""
        if self._room is not None and (self._closed or self._unsent <= self._largest_unsent):
            self._room.set_result(not self._closed)
            self._room = None
        if self._handled and self._unsent <= self._largest_unsent:
            self._credit.give(self._handled)
            self._handled = 0

    async def _read(self, hear: Callable[[bytes], None]) -> None:
        try:
            while (content := await self._stream.read()) is not grpc.aio.EOF:
                hear(content)
                await self._credit.take()
        except grpc.aio.AioRpcError:
            pass  # `status_of` reports it
        self.fail(await status_of(self._stream))

    async def _write(self) -> None:
        """Send queued contents. Once the stream has ended, drop them.

        The reader reports how the stream ended. It may itself wait for credit, which is returned only while
        few enough bytes are unsent, so the writer has to empty the queue even if nothing can be sent.
        """
        while (content := await self._outbox.take()) is not None:
            with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                await self._stream.write(content)
                self.sent += len(content)
            self._unsent -= len(content)
            self._give_credit()


async def status_of(stream: ClientStream) -> grpc.aio.AioRpcError:
    """Return the stream's status as an error. A stream that ends without Stop is always an error."""
    code, details = await stream.code(), await stream.details()
    if code is grpc.StatusCode.OK:
        code, details = grpc.StatusCode.UNAVAILABLE, "the server closed the stream"
    initial, trailing = await stream.initial_metadata(), await stream.trailing_metadata()
    return grpc.aio.AioRpcError(code, initial, trailing, details=details)
