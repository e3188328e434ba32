"""A client's way to the server: the channel, and whether it makes sense to dial again after a failure."""

import asyncio
import logging
import random
import time

import grpc
import grpc.aio

from vafl.errors import RemoteFault, Stalled
from vafl.transport.grpc.wire import channel_options, printable
from vafl.transport.identity import LOOPBACK_OPTIONS, Credentials, closed_early, refusal, require_loopback
from vafl.transport.settings import NetworkSettings

log = logging.getLogger("vafl.client")

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0
_FATAL = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)
_CERTAIN = 5  # connections closed at once, one after the other, before the first welcome, are a refusal


def open_channel(settings: NetworkSettings, credentials: Credentials | None) -> grpc.aio.Channel:
    """To the address of the settings, by mutual TLS; without credentials, in plain on loopback only."""
    options = channel_options(settings)
    if credentials is None:
        require_loopback(settings.address)
        return grpc.aio.insecure_channel(settings.address, [*options, *LOOPBACK_OPTIONS])
    credentials.require_in_date()
    options += credentials.channel_options()
    return grpc.aio.secure_channel(settings.address, credentials.channel_credentials(), options)


class Reconnect:
    """Whether the server is there, as far as this party can tell.

    Attributes:
        heard: when it last was, on the monotonic clock.
        welcomed: whether it has taken this party's certificate before.
    """

    def __init__(self, party: str, settings: NetworkSettings) -> None:
        self.heard = time.monotonic()
        self.welcomed = False
        self._party, self._settings = party, settings
        self._closings = 0
        self._pause, self._paused_after = FIRST_PAUSE, self.heard

    def judge(self, error: grpc.aio.AioRpcError) -> None:
        """Raises unless it makes sense to try again."""
        details = printable(error.details() or "")
        if error.code() in _FATAL:
            raise RemoteFault("VFL-6111", f"the server refused {self._party}: {details}") from error
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # as it would be again
            raise RemoteFault(
                "VFL-6112",
                "messages must fit into network.largest_message of whoever reads them. Found: "
                f"{details}. Set it alike at every party.",
            ) from error
        fault, closed = refusal(details), closed_early(details)
        self._closings = self._closings + 1 if closed and not self.welcomed else 0
        if fault and (not closed or self._closings >= _CERTAIN):
            raise fault from error
        silent = time.monotonic() - self.heard
        if silent > self._settings.patience:
            raise Stalled(
                "VFL-6113",
                f"{self._settings.address} could not be reached for {silent:.0f} s: {details}. "
                "Is the server running, and do the certificates belong to one authority? "
                "network.patience sets how long to try.",
            ) from error

    async def pause(self) -> None:
        """Waits before the next attempt, longer each time unless the server was there meanwhile."""
        if self.heard > self._paused_after:
            self._pause = FIRST_PAUSE
        log.info("the server is out of reach; trying again in %.1f s", self._pause)
        self._paused_after = self.heard
        await asyncio.sleep(self._pause * random.uniform(0.5, 1.0))  # noqa: S311 - spreads reconnects
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
