"""One stream, from either end: messages in and out, a time-out on every wait, signs of life in between.

Two tasks own the stream, so that whoever says or hears may be cancelled at any time without harm to it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Self

import grpc
import grpc.aio

from vafl.errors import InvalidMessage, RunError, Stalled
from vafl.transport.alignment.frames import Kind, pack, unpack
from vafl.transport.alignment.reasons import LONGEST_REASON
from vafl.transport.settings import NetworkSettings

log = logging.getLogger("vafl.alignment")

TOLD_EVERY = 15.0  # seconds: whom a party waits for
SILENT_BEATS = 3
_WAITING = 2  # messages, either way
_BROKEN = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)


class AlignmentStream:
    """Says and hears. Use as a context manager: while it is open, the other end hears signs of life.

    Args:
        other: who is at the other end, for messages.
        read: gives the next message, or anything but bytes at the stream's end.
        write: sends one.
        got_on: a number that changes whenever this party gets on with anybody: signs of life show it.

    Attributes:
        heard: how many messages were.
    """

    def __init__(
        self,
        other: str,
        read: Callable[[], Awaitable[Any]],
        write: Callable[[bytes], Awaitable[None]],
        settings: NetworkSettings,
        got_on: Callable[[], int] = lambda: 0,
    ) -> None:
        self.other, self.heard = other, 0
        self._got_on, self._excused = got_on, 0.0
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
        while not self._outbox.empty():  # whoever is still speaking, or does later, must not wait for room
            self._outbox.get_nowait()
            await asyncio.sleep(0)
        self._outbox = asyncio.Queue()

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
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while isinstance(await self._inbox.get(), bytes):
                    pass

    def excuse(self) -> None:
        """The other end gets on, if not with this one: it has all its time again for what it has to say."""
        self._excused = time.monotonic()

    async def hear(self, *expected: Kind) -> tuple[Kind, bytes]:
        """The next message that is more than a sign of life; it must be of an expected kind.

        Raises:
            InvalidMessage: it said something else.
            Stalled: it said nothing for `patience` seconds, alive as it was.
            RunError, grpc.aio.AioRpcError: it cannot be heard any more.
        """
        content = await self._next()
        if isinstance(content, Exception):
            self._inbox.put_nowait(content)  # it stays so
            raise content
        self.heard += 1
        kind, body = unpack(content)
        if kind not in expected:
            names = " or ".join(each.name for each in expected)
            raise InvalidMessage("VFL-6061", f"{names} comes next. Found {kind.name}.")
        return kind, body

    async def _next(self) -> bytes | Exception:
        begun, patience = time.monotonic(), self._settings.patience
        while (left := max(begun, self._excused) + patience - time.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, TOLD_EVERY)):
                    return await self._inbox.get()
            log.info("waiting for %s, for %.0f s so far", self.other, time.monotonic() - begun)
        raise Stalled(
            "VFL-6062",
            f"{self.other} has sent nothing but signs of life for {patience:.0f} s. network.patience sets "
            "how long to wait.",
        )

    async def _take(self) -> None:
        silence = SILENT_BEATS * self._settings.heartbeat
        try:
            while isinstance(content := await _within(silence, self._read()), bytes):
                if content != pack(Kind.BEAT):
                    await self._inbox.put(content)
            await self._inbox.put(Stalled("VFL-6063", f"{self.other} hung up before the alignment was done."))
        except TimeoutError:
            await self._inbox.put(Stalled("VFL-6064", f"{self.other} has been silent for {silence:.0f} s."))
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
                while not self._inbox.empty():  # whoever says may not be hearing: nothing must wait for room
                    self._inbox.get_nowait()
                self._inbox.put_nowait(Stalled("VFL-6065", f"{self.other} takes nothing any more."))
            except _BROKEN:
                broken = True
            finally:
                self._outbox.task_done()

    async def _beat(self) -> None:
        before = self._got_on()
        while True:
            now = self._got_on()
            await self.say(pack(Kind.BEAT if now == before else Kind.BUSY))
            before = now
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
