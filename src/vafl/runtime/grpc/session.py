"""One connection as a client sees it: bytes in, bytes out, an alarm clock, and how it ends."""

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio


class Session:
    """One connection to the server.

    Attributes:
        outbox: what is to be said next.
        welcome: whether the server has said where the run stands: before, there is nothing to do.
    """

    def __init__(self, stream: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
        self.outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self.welcome = False
        self._stream = stream
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._alarm: asyncio.TimerHandle | None = None

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

    async def _read(self, hear: Callable[[bytes], None]) -> None:
        try:
            while (content := await self._stream.read()) is not grpc.aio.EOF:
                hear(content)
        except grpc.aio.AioRpcError:
            pass  # its status is read below
        self.fail(await status_of(self._stream))

    async def _write(self) -> None:
        try:
            while True:
                await self._stream.write(await self.outbox.get())
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            pass  # the stream has ended: the reader tells how


async def status_of(stream: "grpc.aio.StreamStreamCall[bytes, bytes]") -> grpc.aio.AioRpcError:
    """How the stream ended, as an error: nobody had said goodbye."""
    code, details = await stream.code(), await stream.details()
    if code is grpc.StatusCode.OK:
        code, details = grpc.StatusCode.UNAVAILABLE, "the server closed the stream"
    initial, trailing = await stream.initial_metadata(), await stream.trailing_metadata()
    return grpc.aio.AioRpcError(code, initial, trailing, details=details)
