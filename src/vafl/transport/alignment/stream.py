"""One stream of an alignment, at either end: messages with a timeout on every wait, and heartbeats.

A reader task and a writer task own the gRPC stream. `say` and `hear` only use queues, so the tasks that call
them may be cancelled at any time without breaking the stream.

Three limits apply to the other end:

- heartbeats: it must send something, if only BEAT, every `SILENT_BEATS` heartbeats (VFL-6064);
- patience: it must send the message that `hear` waits for within `patience` seconds (VFL-6062), counted from
  the last `excuse`;
- reading: it must read what this end sends within `patience` seconds (VFL-6065).
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

TOLD_EVERY = 15.0  # seconds between two log lines about the party that is awaited
SILENT_BEATS = 3  # heartbeats without any message after which the other end is considered gone
_WAITING = 2  # messages that may be queued in each direction
_BROKEN = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)  # raised once a stream has ended


class AlignmentStream:
    """Send and receive messages. Use as a context manager: while it is open, it sends heartbeats.

    Args:
        other: the party at the other end, for logs and errors.
        read: returns the next message, or anything but bytes at the stream's end.
        write: sends a message.
        settings: `heartbeat` and `patience`.
        got_on: returns a number that changes whenever this party makes progress with any other. The heartbeat
            is then BUSY instead of BEAT.

    Attributes:
        heard: number of messages that `hear` has returned.
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
        # The writer is gone. Tasks that still wait in `say` must not wait for room forever: make room for
        # each in turn, then replace the queue by an unbounded one for any later calls.
        while not self._outbox.empty():
            self._outbox.get_nowait()
            await asyncio.sleep(0)
        self._outbox = asyncio.Queue()

    async def say(self, content: bytes) -> None:
        """Queue a message; wait while the queue is full. If it can never be sent, `hear` raises."""
        await self._outbox.put(content)

    async def flush(self) -> None:
        """Wait until every queued message is passed to gRPC."""
        await self._outbox.join()

    async def refuse(self, reason: str, grace: float) -> None:
        """Send FAILED with a reason, then read until the other end closes, for at most `grace` seconds.

        If this end closed the stream while the other is still sending, gRPC would drop the reason.
        """
        await self.say(pack(Kind.FAILED, reason.encode()[:LONGEST_REASON]))
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while isinstance(await self._inbox.get(), bytes):
                    pass

    def excuse(self) -> None:
        """Restart the patience of `hear`: the other end makes progress, if only with other parties."""
        self._excused = time.monotonic()

    async def hear(self, *expected: Kind) -> tuple[Kind, bytes]:
        """Return the next message that is not a heartbeat; it must be of an expected kind.

        Raises:
            InvalidMessage: the message is of another kind, or malformed.
            Stalled: nothing but heartbeats has arrived for `patience` seconds, or not even these.
            RunError, grpc.aio.AioRpcError: the stream has ended.
        """
        content = await self._next()
        if isinstance(content, Exception):
            self._inbox.put_nowait(content)  # every later call raises it, too
            raise content
        self.heard += 1
        kind, body = unpack(content)
        if kind not in expected:
            names = " or ".join(each.name for each in expected)
            raise InvalidMessage("VFL-6061", f"the next message must be {names}. Found {kind.name}.")
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
            f"{self.other} has sent only heartbeats for {patience:.0f} s. Check what it is doing, or raise "
            "network.patience to wait longer.",
        )

    async def _take(self) -> None:
        silence = SILENT_BEATS * self._settings.heartbeat
        try:
            while isinstance(content := await _within(silence, self._read()), bytes):
                if content != pack(Kind.BEAT):
                    await self._inbox.put(content)
            await self._inbox.put(
                Stalled(
                    "VFL-6063",
                    f"{self.other} closed the connection before the alignment was done. Start every party "
                    "again.",
                )
            )
        except TimeoutError:
            await self._inbox.put(
                Stalled(
                    "VFL-6064",
                    f"{self.other} has been silent for {silence:.0f} s, {SILENT_BEATS} heartbeats "
                    "(network.heartbeat). Check that it is running, and start every party again.",
                )
            )
        except (RunError, *_BROKEN) as error:
            await self._inbox.put(error)

    async def _send(self) -> None:
        """Write queued messages. Once the stream has ended, drop them: `hear` reports how it ended."""
        broken = False
        while True:
            content = await self._outbox.get()
            try:
                if not broken:
                    await _within(self._settings.patience, self._write(content))
            except TimeoutError:
                broken = True
                # Report through the inbox. It may be full, because a task that only sends does not read it:
                # stop the reader and make room, so that the error is there for the next `hear`.
                self._reader.cancel()
                while not self._inbox.empty():
                    self._inbox.get_nowait()
                self._inbox.put_nowait(
                    Stalled(
                        "VFL-6065",
                        f"{self.other} has read nothing for {self._settings.patience:.0f} s "
                        "(network.patience). Check that it is running, and start every party again.",
                    )
                )
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
    """Await with a timeout. Python 3.11's wait_for loses a cancellation if the work ends at that moment."""
    async with asyncio.timeout(seconds):
        return await work


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run coroutines at the same time and return their results. When one fails, cancel the others."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
