"""One stream, from either end: messages with a time-out on every wait, and signs of life in between."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

import grpc
import grpc.aio

from vafl.errors import InvalidMessage, Stalled
from vafl.runtime.alignment.frames import Kind, pack, unpack
from vafl.runtime.grpc.wire import NetworkSettings

_SILENT_BEATS = 3


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
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._beating.cancel()

    async def say(self, content: bytes) -> None:
        """Sends a message, as soon as the other end has room for it."""
        async with self._turn:
            try:
                await asyncio.wait_for(self._write(content), self._settings.patience)
            except TimeoutError:
                raise Stalled(f"{self.other} takes nothing any more.") from None

    async def hear(self, *expected: Kind) -> tuple[Kind, bytes]:
        """The next message that is more than a sign of life; it must be of an expected kind."""
        while True:
            kind, body = unpack(await self._next())
            if kind in expected:
                return kind, body
            if kind is not Kind.BEAT:
                names = " or ".join(each.name for each in expected)
                raise InvalidMessage(f"{names} comes next. Found {kind.name}.")

    async def _next(self) -> bytes:
        silence = _SILENT_BEATS * self._settings.heartbeat
        try:
            content = await asyncio.wait_for(self._read(), silence)
        except TimeoutError:
            raise Stalled(f"{self.other} has been silent for {silence:.0f} s.") from None
        if not isinstance(content, bytes):
            raise Stalled(f"{self.other} hung up before the alignment was done.")
        return content

    async def _beat(self) -> None:
        with suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError, Stalled):  # hear tells
            while True:
                await self.say(pack(Kind.BEAT))
                await asyncio.sleep(self._settings.heartbeat)


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
