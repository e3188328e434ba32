"""Open a client's stream to the server, and decide after a failure whether and when to dial again."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from vafl.errors import RemoteFault, Stalled
from vafl.transport.grpc.local import Metadata
from vafl.transport.grpc.wire import channel_options
from vafl.transport.identity import LOOPBACK_OPTIONS, Credentials, closed_early, refusal, require_loopback
from vafl.transport.settings import NetworkSettings

log = logging.getLogger("vafl.client")

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0  # seconds between two attempts
_FATAL = (  # a new attempt would be refused as well
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)
# The server closes a connection early if it refuses the certificate, but also if it is killed at that moment.
# This many early closings in a row, before the first Welcome, count as a refusal.
_CERTAIN = 5


@asynccontextmanager
async def dial(
    path: str, metadata: Metadata, settings: NetworkSettings, credentials: Credentials | None
) -> AsyncIterator["grpc.aio.StreamStreamCall[bytes, bytes]"]:
    """Open a stream to `settings.address` for the block: with mutual TLS, or in plaintext on loopback.

    Raises:
        ConfigError: the certificate has expired, or plaintext would leave this machine.
    """
    options = channel_options(settings)
    if credentials is None:
        require_loopback(settings.address)
        channel = grpc.aio.insecure_channel(settings.address, [*options, *LOOPBACK_OPTIONS])
    else:
        credentials.require_in_date()
        options += credentials.channel_options()
        channel = grpc.aio.secure_channel(settings.address, credentials.channel_credentials(), options)
    async with channel:
        yield channel.stream_stream(path)(metadata=metadata)


class Reconnect:
    """Decides whether to dial again after a failure, and how long to wait before that.

    Attributes:
        heard: when the server was last known to be alive, on the monotonic clock.
        welcomed: whether the server has accepted this party on an earlier connection.
    """

    def __init__(self, party: str, settings: NetworkSettings) -> None:
        self.heard = time.monotonic()
        self.welcomed = False
        self._party, self._settings = party, settings
        self._closings = 0
        self._pause, self._paused_after = FIRST_PAUSE, self.heard

    def judge(self, error: grpc.aio.AioRpcError) -> None:
        """Return if another attempt may succeed; raise otherwise.

        Args:
            error: the status of the stream, from `status_of`.

        Raises:
            RemoteFault: the server refused this party, or a message was too large.
            Unauthenticated: the TLS handshake was refused.
            Stalled: the server could not be reached for `patience` seconds.
        """
        details = error.details() or ""
        if error.code() in _FATAL:
            raise RemoteFault("VFL-6111", f"the server refused {self._party}: {details}") from error
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # the same message would be too large again
            raise RemoteFault(
                "VFL-6112",
                "a message must not be larger than network.largest_message of the party that receives it. "
                f"Found: {details}. Set the same limit at every party.",
            ) from error
        fault, closed = refusal(details), closed_early(details)
        self._closings = self._closings + 1 if closed and not self.welcomed else 0
        if fault and (not closed or self._closings >= _CERTAIN):
            raise fault from error
        silent = time.monotonic() - self.heard
        if silent > self._settings.patience:
            raise Stalled(
                "VFL-6113",
                f"{self._settings.address} could not be reached for {silent:.0f} s: {details}. Check that "
                "the server is running and that all certificates are from one authority. network.patience "
                "sets how long a client tries.",
            ) from error

    async def pause(self) -> None:
        """Wait before the next attempt: twice as long each time, unless the server was heard in between."""
        if self.heard > self._paused_after:
            self._pause = FIRST_PAUSE
        log.info("the server is out of reach; trying again in %.1f s", self._pause)
        self._paused_after = self.heard
        await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))  # noqa: S311 - spreads reconnects
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
