"""One stream, from either end: messages in and out, a time-out on every wait, signs of life in between.

Two tasks own the stream, so that whoever says or hears may be cancelled at any time without harm to it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

import grpc
import grpc.aio

from vafl.errors import InvalidMessage, RunError, Stalled
from vafl.runtime.alignment.frames import LONGEST_REASON, Kind, pack, unpack
from vafl.runtime.settings import NetworkSettings

_SILENT_BEATS = 3
_WAITING = 2  # messages, either way
_BROKEN = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)


class Line:
    """Says and hears. Use as a context manager: while it is open, the other end hears signs of life.

    Args:
        other: who is at the other end, for messages.
        read: gives the next message, or anything but bytes at the stream's end.
        write: sends one.
    """

    def __init__(
        self,
        other: str,
        read: Callable[[], Awaitable[Any]],
        write: Callable[[bytes], Awaitable[None]],
        settings: NetworkSettings,
    ) -> None:
        self.other = other
        self._read, self._write, self._settings = read, write, settings
        self._inbox: asyncio.Queue[bytes | Exception] = asyncio.Queue(_WAITING)
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue(_WAITING)

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._take())
        self._others = [asyncio.create_task(self._send()), asyncio.create_task(self._beat())]
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = (self._reader, *self._others)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def say(self, content: bytes) -> None:
        """Sends a message, as soon as the other end has room for it; `hear` tells if it never has."""
        await self._outbox.put(content)

    async def flush(self) -> None:
        """Waits until everything said is on its way."""
        await self._outbox.join()

    async def refuse(self, reason: str, grace: float) -> None:
        """Says why it goes no further, and hears the other end out until that hangs up, for a while: if the
        stream ended while it is speaking, gRPC would lose the reason."""
        await self.say(pack(Kind.FAILED, reason.encode()[:LONGEST_REASON]))
        with suppress(TimeoutError, RunError, *_BROKEN):
            async with asyncio.timeout(grace):
                while True:
                    with suppress(InvalidMessage):
                        await self.hear()

    async def hear(self, *expected: Kind) -> tuple[Kind, bytes]:
        """The next message that is more than a sign of life; it must be of an expected kind.

        Raises:
            InvalidMessage: it said something else.
            RunError, grpc.aio.AioRpcError: it cannot be heard any more.
        """
        content = await self._inbox.get()
        if isinstance(content, Exception):
            self._inbox.put_nowait(content)  # it stays so
            raise content
        kind, body = unpack(content)
        if kind not in expected:
            names = " or ".join(each.name for each in expected)
            raise InvalidMessage(f"{names} comes next. Found {kind.name}.")
        return kind, body

    async def _take(self) -> None:
        silence = _SILENT_BEATS * self._settings.heartbeat
        try:
            while isinstance(content := await _within(silence, self._read()), bytes):
                if content != pack(Kind.BEAT):
                    await self._inbox.put(content)
            await self._inbox.put(Stalled(f"{self.other} hung up before the alignment was done."))
        except TimeoutError:
            await self._inbox.put(Stalled(f"{self.other} has been silent for {silence:.0f} s."))
        except (RunError, *_BROKEN) as error:
            await self._inbox.put(error)

    async def _send(self) -> None:
        """What cannot be sent is dropped: the stream has ended, and whoever hears is told how."""
        broken = False
        while True:
            content = await self._outbox.get()
            try:
                if not broken:
                    await _within(self._settings.patience, self._write(content))
            except TimeoutError:
                broken = True
                self._reader.cancel()
                await self._inbox.put(Stalled(f"{self.other} takes nothing any more."))
            except _BROKEN:
                broken = True
            finally:
                self._outbox.task_done()

    async def _beat(self) -> None:
        while True:
            await self.say(pack(Kind.BEAT))
            await asyncio.sleep(self._settings.heartbeat)


async def _within(seconds: float, work: Awaitable[Any]) -> Any:
    """Python 3.11's wait_for forgets that it was cancelled if the work ends at that moment; this does not."""
    async with asyncio.timeout(seconds):
        return await work


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results of all; when one fails, the others are ended."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@contextmanager
def blaming(other: str) -> Iterator[None]:
    """Whoever sent what was refused is named."""
    try:
        yield
    except InvalidMessage as fault:
        raise InvalidMessage(f"{other} broke the protocol: {fault}") from fault
