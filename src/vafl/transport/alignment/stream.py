"""One stream of an alignment, at either end: messages with a deadline on every wait.

Two limits apply to the other end, both of `patience` seconds (network.patience):

- it must send the next message of the exchange (VFL-6062);
- it must read what this end sends (VFL-6065).

`Stream` reads and writes, and gRPC's keepalive notices a party that is frozen or cut off.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from vafl.errors import InvalidMessage, Stalled
from vafl.transport.alignment.frames import Kind, pack, unpack
from vafl.transport.alignment.reasons import LONGEST_REASON
from vafl.transport.grpc.stream import Call, Stream

log = logging.getLogger("vafl.alignment")

TOLD_EVERY = 15.0  # seconds between two log lines about the party that is awaited
_UNSENT = 1 << 18  # bytes that may be queued before `send` waits: two full messages of points


class AlignmentStream(Stream):
    """Send and receive the messages of an alignment while `exchanging`.

    A reader task owns the gRPC call, so the tasks that call `send` and `receive` may be cancelled at any time
    without breaking the stream.

    Args:
        other: the party at the other end, for logs and errors.
        call: the gRPC call.
        patience: seconds for every wait.

    Attributes:
        received: number of messages that were received.
    """

    def __init__(self, other: str, call: Call, patience: float) -> None:
        super().__init__(call, _UNSENT)
        self.other, self.received = other, 0
        self._patience = patience
        self._inbox: asyncio.Queue[bytes | None] = asyncio.Queue()  # bounded by the stream's credit

    @asynccontextmanager
    async def exchanging(self) -> AsyncIterator[None]:
        """Read and write while the block runs."""
        async with self.open(self._read_all()) as (self._writer, _):
            yield

    async def send(self, content: bytes) -> None:
        """Queue a message; wait while much is unsent. Drop it if the stream has ended: `receive` raises.

        Raises:
            Stalled: the other end has read nothing for `patience` seconds.
        """
        try:
            async with asyncio.timeout(self._patience):
                await self.find_room()
        except TimeoutError as error:
            raise Stalled(
                "VFL-6065",
                f"{self.other} has read nothing for {self._patience:.0f} s (network.patience). Check that it "
                "is running, and start every party again.",
            ) from error
        self.put(content)

    async def flush(self) -> None:
        """Wait until everything that is queued was passed to gRPC. Nothing can be sent after this."""
        self.end_outbox()
        await self._writer

    async def refuse(self, reason: str, grace: float) -> None:
        """Send FAILED with a reason, then read until the other end closes, for at most `grace` seconds.

        If this end closed the stream while the other is still sending, gRPC would drop the reason.
        """
        self.put(pack(Kind.FAILED, reason.encode()[:LONGEST_REASON]))
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while await self._inbox.get() is not None:
                    self.give_credit(1)

    async def receive(self, *expected: Kind) -> tuple[Kind, bytes]:
        """Return the next message, which must be of an expected kind.

        Raises:
            InvalidMessage: the message is of another kind, or malformed.
            Stalled: nothing has arrived for `patience` seconds, or the other end has closed the stream.
        """
        kind, body = await self._receive_any()
        if kind not in expected:
            names = " or ".join(each.name for each in expected)
            raise InvalidMessage("VFL-6061", f"the next message must be {names}. Found {kind.name}.")
        return kind, body

    async def _receive_any(self) -> tuple[Kind, bytes]:
        """Return the next message, whatever its kind."""
        content = await self._next()
        if content is None:
            self._inbox.put_nowait(None)  # every later call raises, too
            raise await self._ended()
        self.give_credit(1)
        self.received += 1
        return unpack(content)

    async def _next(self) -> bytes | None:
        begun = time.monotonic()
        while (left := begun + self._patience - time.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, TOLD_EVERY)):
                    return await self._inbox.get()
            log.info("waiting for %s, for %.0f s so far", self.other, time.monotonic() - begun)
        raise Stalled(
            "VFL-6062",
            f"{self.other} has sent nothing for {self._patience:.0f} s. Check what it is doing, or raise "
            "network.patience to wait longer.",
        )

    async def _ended(self) -> Exception:
        """Return the error of a stream that the other end has closed."""
        return Stalled(
            "VFL-6063",
            f"{self.other} closed the connection before the alignment was done. Start every party again.",
        )

    async def _read_all(self) -> None:
        while (content := await self.read()) is not None:
            self._inbox.put_nowait(content)
        self._inbox.put_nowait(None)


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run coroutines at the same time and return their results. When one fails, cancel the others."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
