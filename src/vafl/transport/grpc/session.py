"""One connection as a client of a run sees it: a stream with an alarm clock and three ways to end.

A session is open until exactly one of three things happens. The first one decides what `converse` does:

    OPEN ──── `end(reason)`: the server has ended the run ────> return the reason ──┐
      ├────── `fail(error)`: the worker has failed ───────────> raise the error ────┼──> CLOSED
      └────── the stream ends without Stop ───────────────────> raise AioRpcError ──┘

A worker that waits for room or for the end of a pause is released when the session closes (see `Stream`).
"""

import asyncio
from collections.abc import Callable, Sequence

from vafl.transport.grpc.local import ClientCall
from vafl.transport.grpc.stream import Stream, status_of


class Session(Stream):
    """One connection to the server.

    The session reads on only while few enough bytes are unsent. So a server that sends requests without
    reading the answers is held back by flow control.

    Args:
        call: the gRPC call.
        largest_unsent: bytes that may be unsent before the session stops reading.

    Attributes:
        welcome: whether the server has sent Welcome. Until then the client has nothing to do.
        answered: bytes of answers that the worker has made since it last found room.
    """

    def __init__(self, call: ClientCall, largest_unsent: int) -> None:
        super().__init__(call, largest_unsent)
        self.welcome, self.answered = False, 0
        self._client_call = call
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._alarm: asyncio.TimerHandle | None = None

    async def converse(self, receive: Callable[[bytes], None]) -> str:
        """Read and write until the run is over; return the server's reason for ending it.

        Args:
            receive: called with each message of the server.

        Raises:
            grpc.aio.AioRpcError: the connection is lost.
            Exception: the error that `fail` was called with.
        """
        try:
            await self.run(self._read_all(receive), self._ended)
            return self._ended.result()
        finally:
            if self._alarm is not None:
                self._alarm.cancel()
            self._client_call.cancel()

    def send(self, contents: Sequence[bytes], *, handled: bool = False) -> None:
        """Queue contents to be sent in order.

        Args:
            handled: whether this completes the handling of a message of the server, so that another one may
                be read.
        """
        for content in contents:
            self.put(content)
        if handled:
            self.give_credit(1)

    def end(self, reason: str) -> None:
        """Make `converse` return this reason: the server has ended the run."""
        if not self._ended.done():
            self._ended.set_result(reason)

    def fail(self, error: Exception) -> None:
        """Make `converse` raise this error. Only the first call of `end` or `fail` counts."""
        if not self._ended.done():
            self._ended.set_exception(error)

    def wake_after(self, pause: Callable[[], float], awake: Callable[[], None]) -> None:
        """Call `awake` once, `pause()` seconds from now, unless an earlier alarm is still pending."""
        if self._alarm is None and not self._ended.done():
            self._alarm = asyncio.get_running_loop().call_later(pause(), self._ring, awake)

    def _ring(self, awake: Callable[[], None]) -> None:
        self._alarm = None
        awake()

    async def _read_all(self, receive: Callable[[bytes], None]) -> None:
        while (content := await self.read()) is not None:
            receive(content)
        self.fail(await status_of(self._client_call))
