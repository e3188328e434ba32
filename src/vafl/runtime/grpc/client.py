"""A client's end: dials out, says where it stands, works while it is welcome, dials again when cut off."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import grpc.aio

from vafl.errors import RemoteFault, Stalled
from vafl.protocol.client import Client
from vafl.protocol.messages import ClientMessage, Durable, Gradient, Refused, Skipped, Stop, Welcome
from vafl.runtime.codec import Codec
from vafl.runtime.delays import Sleeper
from vafl.runtime.grpc.wire import CLAIM, PATH, NetworkSettings, Terms, channel_options
from vafl.runtime.identity import LOOPBACK_OPTIONS, Credentials, closed_early, refusal, require_loopback

log = logging.getLogger("vafl.client")

_FATAL = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
_CERTAIN = 5  # connections closed at once, one after the other: a server that is killed does that once


class FederationClient:
    """Runs one client until the server says that the run is over.

    Args:
        client: the protocol's client.
        party: this party's name.
        terms: what it thinks the run's terms are.
        settings: address, limits, patience.
        credentials: this party's certificate, or None for plaintext on loopback.
        sleeper: when to wake up next, for experiments; None is as soon as possible.
        after: called in the worker thread after each turn, for checkpoints.
    """

    def __init__(
        self,
        client: Client,
        party: str,
        terms: Terms,
        settings: NetworkSettings,
        credentials: Credentials | None,
        sleeper: Sleeper | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self.client, self.party = client, party
        self.durable = 0
        self.reconnects = -1
        self._terms, self._settings, self._credentials = terms, settings, credentials
        self._sleeper, self._after = sleeper, after
        self._codec = Codec(settings.encoding, settings.largest_message)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="vafl-torch")
        self._heard = time.monotonic()
        self._began = time.monotonic()
        self._skips = 0
        self._closings = 0

    async def run(self) -> str:
        """Works until the run is over; gives the server's reason for ending it.

        Raises:
            RemoteFault: the server refused this party, and why.
            Stalled: the server could not be reached for `patience` seconds.
        """
        try:
            return await self._persist()
        finally:
            self._worker.shutdown()  # whoever saves the client's state now must not do it amid a turn

    async def _persist(self) -> str:
        """Dials again whenever it is cut off."""
        pause = _FIRST_PAUSE
        while True:
            began = self._heard
            try:
                return await self._session()
            except grpc.aio.AioRpcError as error:
                self._judge(error)
            if self._heard > began:
                pause = _FIRST_PAUSE
            log.info("the server is out of reach; trying again in %.1f s", pause)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - spreads reconnects
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _judge(self, error: grpc.aio.AioRpcError) -> None:
        """Raises unless it makes sense to try again."""
        if error.code() in _FATAL:
            raise RemoteFault(f"the server refused {self.party}: {error.details()}") from error
        details = error.details() or ""
        if fault := refusal(details):
            self._closings = self._closings + 1 if closed_early(details) else _CERTAIN
            if self._closings >= _CERTAIN:
                raise fault from error
        else:
            self._closings = 0
        silent = time.monotonic() - self._heard
        if silent > self._settings.patience:
            raise Stalled(
                f"{self._settings.address} could not be reached for {silent:.0f} s: {error.details()}. "
                "Is the server running, and do the certificates belong to one authority? "
                "network.patience sets how long to try."
            ) from error

    def _channel(self) -> grpc.aio.Channel:
        options = channel_options(self._settings)
        if self._credentials is None:
            require_loopback(self._settings.address)
            return grpc.aio.insecure_channel(self._settings.address, [*options, *LOOPBACK_OPTIONS])
        options += self._credentials.channel_options()
        return grpc.aio.secure_channel(
            self._settings.address, self._credentials.channel_credentials(), options
        )

    async def _session(self) -> str:
        """One connection, from joining to the run's end."""
        async with self._channel() as channel:
            stream = channel.stream_stream(PATH)(metadata=((CLAIM, self.party),))
            await _write(stream, [self._terms.to_bytes(), self._codec.encode(self.client.join())])
            self.reconnects += 1
            incoming: asyncio.Queue[bytes | None] = asyncio.Queue()
            reader = asyncio.create_task(_read(stream, incoming))
            try:
                return await self._converse(stream, incoming)
            finally:
                reader.cancel()
                stream.cancel()

    async def _converse(
        self, stream: "grpc.aio.StreamStreamCall[bytes, bytes]", incoming: "asyncio.Queue[bytes | None]"
    ) -> str:
        loop = asyncio.get_running_loop()
        wakes_at: float | None = None
        welcome = False
        while True:
            frames = await _gather(incoming, None if wakes_at is None else wakes_at - time.monotonic())
            if None in frames:
                if welcome:
                    self._heard = time.monotonic()  # however long it had nothing to say, it was there
                await _raise_status(stream)
            awake = wakes_at is not None and time.monotonic() >= wakes_at
            received = [frame for frame in frames if frame is not None]
            if received:
                self._heard = time.monotonic()
            said, stop, welcomed = await loop.run_in_executor(self._worker, self._turn, received, awake)
            await _write(stream, said)
            if stop is not None:
                with suppress(asyncio.InvalidStateError):  # the server may be gone already
                    await stream.done_writing()
                return stop
            welcome = welcome or welcomed
            if awake:
                wakes_at = None
            if welcome and wakes_at is None and not self.client.waiting:
                wakes_at = self._next_wake()

    def _next_wake(self) -> float:
        """As soon as may be; later and later while the server has to skip what comes."""
        now = time.monotonic()
        if self._skips:
            now += min(_FIRST_PAUSE * 2.0 ** min(self._skips, 10), _LONGEST_PAUSE)
        return self._began + self._sleeper.wakes_at(now - self._began) if self._sleeper else now

    def _turn(self, frames: list[bytes], awake: bool) -> tuple[list[bytes], str | None, bool]:
        """In the worker thread: takes what came, acts if awake; (frames to say, end of run, welcomed)."""
        said: list[ClientMessage] = []
        welcomed = False
        for frame in frames:
            message = self._codec.from_server(frame, self.client.index)
            if isinstance(message, Stop):
                return [], message.reason, welcomed
            if isinstance(message, Refused):
                raise RemoteFault(f"the server refused a message of {self.party}: {message.reason}")
            if isinstance(message, Durable):
                self.durable = message.activation
            if isinstance(message, Welcome):
                welcomed, self.durable = True, message.durable
            if isinstance(message, Gradient | Skipped):
                self._skips = self._skips + 1 if isinstance(message, Skipped) else 0
            said += self.client.receive(message)
        at_once = self._sleeper is None and bool(frames) and not welcomed and not self._skips
        may_wake = awake or at_once
        if may_wake and not self.client.waiting:
            said += self.client.wake()
        self._after()
        return [self._codec.encode(message) for message in said], None, welcomed


async def _read(
    stream: "grpc.aio.StreamStreamCall[bytes, bytes]", incoming: "asyncio.Queue[bytes | None]"
) -> None:
    """Moves frames into the queue; None says that the stream has ended."""
    try:
        while (frame := await stream.read()) is not grpc.aio.EOF:
            incoming.put_nowait(frame)
    except grpc.aio.AioRpcError:
        pass  # its status is read by whoever takes the None
    incoming.put_nowait(None)


async def _write(stream: "grpc.aio.StreamStreamCall[bytes, bytes]", frames: Sequence[bytes]) -> None:
    try:
        for frame in frames:
            await stream.write(frame)
    except asyncio.InvalidStateError:  # the stream has ended meanwhile
        await _raise_status(stream)


async def _gather(incoming: "asyncio.Queue[bytes | None]", timeout: float | None) -> list[bytes | None]:
    """All that has come; waits for the first, but no longer than `timeout`."""
    frames: list[bytes | None] = []
    try:
        if incoming.empty() and (timeout is None or timeout > 0):
            frames.append(await asyncio.wait_for(incoming.get(), timeout))
    except TimeoutError:
        return frames
    while not incoming.empty():
        frames.append(incoming.get_nowait())
    return frames


async def _raise_status(stream: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
    """The stream ended without a goodbye: as an error, whatever its status says."""
    code, details = await stream.code(), await stream.details()
    if code is grpc.StatusCode.OK:
        code, details = grpc.StatusCode.UNAVAILABLE, "the server closed the stream"
    raise grpc.aio.AioRpcError(
        code, await stream.initial_metadata(), await stream.trailing_metadata(), details=details
    )
