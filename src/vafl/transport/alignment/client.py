"""A client's end of an alignment: dials out, takes part in the exchange, learns which of its ids are rows."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import numpy as np
import polars as pl

from vafl.data.alignment.ids import loosened
from vafl.data.alignment.matching import Places
from vafl.data.alignment.rows import Alignment
from vafl.errors import DataError, InvalidMessage, RemoteFault, RunError, Stalled
from vafl.transport.alignment.compute_pool import ComputePool
from vafl.transport.alignment.exchange import Progress, answer
from vafl.transport.alignment.frames import (
    LARGEST_FRAME,
    PATH,
    ROW,
    Kind,
    Terms,
    pack,
    pack_facts,
    pack_hello,
    unpack_count,
    unpack_facts,
    unpack_loosened,
    unpack_rows,
)
from vafl.transport.alignment.reasons import blaming
from vafl.transport.alignment.stream import SILENT_BEATS, AlignmentStream
from vafl.transport.grpc.reconnect import Reconnect, open_channel
from vafl.transport.grpc.session import status_of
from vafl.transport.grpc.wire import CLAIM, printable
from vafl.transport.identity import SERVER, Credentials
from vafl.transport.settings import NetworkSettings

log = logging.getLogger("vafl.client")


class Ended(RunError):
    """The server has said why it goes no further."""


class AlignmentClient:
    """Takes part in one alignment.

    Args:
        party: this party's name.
        ids: its own, canonical.
        terms: what it thinks every party has set.
        workers: processes that compute.
        keep: makes its alignment durable; called once all parties have what they need.
    """

    def __init__(
        self,
        party: str,
        ids: pl.Series,
        terms: Terms,
        settings: NetworkSettings,
        credentials: Credentials | None,
        workers: int,
        progress: Progress,
        keep: Callable[[Alignment], None],
    ) -> None:
        self._party, self._ids, self._terms = party, ids, terms
        # A little more patience than the server has, who tells for whom everybody waits.
        patience = settings.patience + SILENT_BEATS * settings.heartbeat
        self._settings = replace(settings, largest_message=LARGEST_FRAME, patience=patience)
        self._credentials, self._workers, self._progress = credentials, workers, progress
        self._keep = keep
        self._reach = Reconnect(party, settings)
        self._begun = False

    async def run(self) -> Alignment:
        """Dials until the server begins, and goes through with it.

        Raises:
            RemoteFault: the server refused this party, or broke the protocol.
            Stalled: the server could not be reached for `patience` seconds, or fell silent.
            RunError: the server ended the alignment, and why.
        """
        with ComputePool(self._workers) as crew:
            crew.expect(len(self._ids))
            while True:
                try:
                    return await self._session(crew)
                except Ended as ended:
                    if self._begun:
                        raise RunError("VFL-6001", f"the server ended the alignment: {ended}") from ended
                    raise RemoteFault("VFL-6002", f"the server refused {self._party}: {ended}") from ended
                except grpc.aio.AioRpcError as raw:
                    error = _plain(raw)
                    if self._begun:
                        raise Stalled(
                            "VFL-6003",
                            f"the connection to the server was lost: {error.details()}. Start every party "
                            "again.",
                        ) from error
                    self._reach.judge(error)
                await self._reach.pause()

    async def _session(self, crew: ComputePool) -> Alignment:
        async with open_channel(self._settings, self._credentials) as channel:
            call = channel.stream_stream(PATH)(metadata=((CLAIM, self._party),))

            async def read() -> Any:
                content = await call.read()
                if content is grpc.aio.EOF:
                    raise await status_of(call)
                self._reach.heard = time.monotonic()
                if content[:1] == pack(Kind.FAILED):
                    raise Ended("VFL-6004", printable(content[1:].decode("utf-8", "replace")))
                if content == pack(Kind.BUSY):
                    line.excuse()
                    return pack(Kind.BEAT)
                return content

            line = AlignmentStream(f"the {SERVER}", read, call.write, self._settings)
            try:
                async with line:
                    with blaming(line.other):
                        return await self._align(line, crew)
            finally:
                call.cancel()

    async def _align(self, line: AlignmentStream, crew: ComputePool) -> Alignment:
        await line.say(pack_hello(self._terms, len(self._ids)))
        _, body = await line.hear(Kind.BEGIN)
        self._begun = True
        theirs = unpack_count(body)
        log.info("the server has %s ids", f"{theirs:,}")
        crew.expect(theirs)
        order = await self._answer(line, crew, self._ids, theirs)
        kind, body = await line.hear(Kind.RESULT, Kind.AGAIN)
        if kind is Kind.AGAIN:
            await self._answer_loosely(line, crew, unpack_loosened(body, theirs))
            _, body = await line.hear(Kind.RESULT)
        alignment = await self._receive(line, body, order, theirs)
        await line.say(pack(Kind.RECEIVED))
        await line.hear(Kind.DONE)
        await asyncio.to_thread(self._keep, alignment)
        return alignment

    async def _answer(self, line: AlignmentStream, crew: ComputePool, ids: pl.Series, theirs: int) -> Places:
        self._progress.begin(len(ids) + theirs)
        return await answer(line, crew, self._party, ids, theirs, self._progress)

    async def _answer_loosely(self, line: AlignmentStream, crew: ComputePool, theirs: int) -> None:
        """Once more with ids in a form that forgets how they are written, for the server's advice."""
        log.info("the server asks once more: it has %s ids when forms are loosened", f"{theirs:,}")
        loose = loosened(self._ids).unique()
        await line.say(pack_facts(Kind.COUNT, {"ids": len(loose)}))
        await line.hear(Kind.BEGIN)
        await self._answer(line, crew, loose, theirs)

    async def _receive(self, line: AlignmentStream, body: bytes, order: Places, theirs: int) -> Alignment:
        """The rows that are this party's, checked as if anybody had sent them."""
        kinds: dict[str, type] = {"token": str, "rows": int, "label": str, "with_local": bool}
        facts = unpack_facts(body, **kinds, classes=list, own=int)
        rows, own = facts["rows"], facts["own"]
        if rows > theirs:
            raise InvalidMessage(
                "VFL-6005", f"all rows are among the {SERVER}'s {theirs:,} ids. Found {rows:,} rows."
            )
        if not 0 <= own <= len(order) or (self._terms.records == "common" and own != rows):
            raise InvalidMessage(
                "VFL-6006", f"of {rows:,} rows, {own:,} cannot be those of {len(order):,} ids."
            )
        content = bytearray()
        while len(content) < own * ROW:
            content += (await line.hear(Kind.ROWS))[1]
        places, numbers = unpack_rows(content)
        if len(places) != own or len(np.unique(places)) != own or (own and places.max() >= len(order)):
            raise InvalidMessage("VFL-6007", "rows must be of places that this party sent, each once.")
        by_number = np.argsort(numbers)
        ids = self._ids.gather(order[places[by_number]])
        try:
            names = tuple(map(str, facts["classes"])) or None
            told = {name: facts[name] for name in ("label", "with_local")}
            return Alignment(facts["token"], rows, names, ids, numbers[by_number], **told)
        except DataError as error:
            raise InvalidMessage("VFL-6008", str(error)) from error


def _plain(error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
    """The same, with details that may have come from the other end fit for a terminal."""
    metadata = error.initial_metadata(), error.trailing_metadata()
    return grpc.aio.AioRpcError(error.code(), *metadata, details=printable(error.details() or ""))
