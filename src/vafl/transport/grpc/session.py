"""One connection as a client sees it: bytes in, bytes out, an alarm clock, and how it ends."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

import grpc
import grpc.aio

from vafl.transport.grpc.flow_control import Credit, Outbox
from vafl.transport.grpc.local import ClientStream

_INBOX = 4  # of the server's messages that may wait for the worker


class Session:
    """One connection to the server.

    What it has read and not handled is bounded, and so is what it answers: a server that asks and asks waits
    on its own side.

    Args:
        stream: the call.
        largest_unsent: bytes that may lie unsent before no more is read.

    Attributes:
        welcome: whether the server has said where the run stands: before, there is nothing to do.
        sent: bytes that were handed to the stream.
        answered: bytes that the worker has made in answer to the server since there was `room` for more.
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
        """Moves bytes until the run is over; gives the server's reason for ending it.

        Raises:
            grpc.aio.AioRpcError: the connection is lost.
            Exception: whatever `fail` was called with.
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
            self._closed = True
            self._give_credit()
            self._end_pause()

    def say(self, contents: Sequence[bytes], *, handled: bool = False) -> None:
        """Says these in turn; `handled` if with that a message of the server is done with."""
        for content in contents:
            self._unsent += len(content)
            self._outbox.put(content)
        self._handled += handled
        self._give_credit()

    def find_room(self, room: "Future[bool]") -> None:
        """Says True once no more lies unsent than may; False if the connection ends before."""
        self._room = room
        self._give_credit()

    def pause(self, seconds: float, over: "Future[bool]") -> None:
        """Set `over` to True after these seconds, or to False as soon as the connection ends."""
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
        """The run is over."""
        if not self._ended.done():
            self._ended.set_result(reason)

    def fail(self, error: Exception) -> None:
        """Nothing more can be said or heard."""
        if not self._ended.done():
            self._ended.set_exception(error)

    def wake_after(self, pause: Callable[[], float], awake: Callable[[], None]) -> None:
        """Calls `awake` once, after so many seconds, unless that is about to happen already."""
        if self._alarm is None and not self._ended.done():
            self._alarm = asyncio.get_running_loop().call_later(pause(), self._ring, awake)

    def _ring(self, awake: Callable[[], None]) -> None:
        self._alarm = None
        awake()

    def _give_credit(self) -> None:
        """To read on, for what was handled, and to make more, unless too much lies unsent."""
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
            pass  # its status is read below
        self.fail(await status_of(self._stream))

    async def _write(self) -> None:
        """If the stream has ended, what is left is dropped: the reader, who may wait for that, tells how."""
        while (content := await self._outbox.take()) is not None:
            with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                await self._stream.write(content)
                self.sent += len(content)
            self._unsent -= len(content)
            self._give_credit()


async def status_of(stream: ClientStream) -> grpc.aio.AioRpcError:
    """How the stream ended, as an error: nobody had said goodbye."""
    code, details = await stream.code(), await stream.details()
    if code is grpc.StatusCode.OK:
        code, details = grpc.StatusCode.UNAVAILABLE, "the server closed the stream"
    initial, trailing = await stream.initial_metadata(), await stream.trailing_metadata()
    return grpc.aio.AioRpcError(code, initial, trailing, details=details)
