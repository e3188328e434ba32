"""A client's end of an alignment: dial the server, take part in the exchange, receive the row numbers.

server.py describes the states of an alignment and the order of its messages. A client dials again only until
the server has sent BEGIN. After that, a lost connection ends the alignment for every party.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

import grpc.aio
import numpy as np
import polars as pl

from vafl.arrays import Integers
from vafl.data.alignment.ids import loosened
from vafl.data.alignment.rows import Alignment
from vafl.errors import DataError, InvalidMessage, RunError, Stalled
from vafl.transport.alignment.compute_pool import ComputePool
from vafl.transport.alignment.exchange import Progress, answer
from vafl.transport.alignment.frames import (
    LARGEST_FRAME,
    PATH,
    ROW,
    AlignmentTerms,
    Kind,
    pack,
    pack_facts,
    unpack_count,
    unpack_facts,
    unpack_loosened,
    unpack_rows,
)
from vafl.transport.alignment.reasons import blaming
from vafl.transport.alignment.stream import AlignmentStream
from vafl.transport.grpc.reconnect import Reconnect, dial
from vafl.transport.grpc.stream import status_of
from vafl.transport.grpc.wire import CLAIM, printable
from vafl.transport.identity import SERVER, Credentials
from vafl.transport.settings import NetworkSettings

log = logging.getLogger("vafl.client")


class _ServerStream(AlignmentStream):
    """The client's end of a stream."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]", patience: float) -> None:
        super().__init__(f"the {SERVER}", call, patience)
        self._client_call = call

    async def _receive_any(self) -> tuple[Kind, bytes]:
        while True:
            kind, body = await super()._receive_any()
            if kind is Kind.FAILED:
                reason = printable(body.decode("utf-8", "replace"))
                raise RunError("VFL-6001", f"the server ended the alignment: {reason}")
            # PROGRESS restarts the patience: the server waits for another client, which makes progress.
            if kind is not Kind.PROGRESS:
                return kind, body

    async def _ended(self) -> grpc.aio.AioRpcError:
        return await status_of(self._client_call)


class AlignmentClient:
    """Take part in one alignment.

    Args:
        party: this party's name.
        ids: this party's ids, in canonical form.
        terms: this party's settings, which must be equal at every party.
        settings: address, limits and timeouts.
        credentials: this party's certificate, or None for plaintext on loopback.
        workers: number of processes that compute.
        progress: shows the progress of the exchange.
        keep: writes this party's alignment to disk; called once every party has received its rows.
    """

    def __init__(
        self,
        party: str,
        ids: pl.Series,
        terms: AlignmentTerms,
        settings: NetworkSettings,
        credentials: Credentials | None,
        workers: int,
        progress: Progress,
        keep: Callable[[Alignment], None],
    ) -> None:
        self._party, self._ids, self._terms = party, ids, terms
        self._settings = replace(settings, largest_message=LARGEST_FRAME)
        self._credentials, self._workers, self._progress = credentials, workers, progress
        self._keep = keep
        self._reconnect = Reconnect(party, settings)
        self._begun = False  # whether the server has sent BEGIN

    async def run(self) -> Alignment:
        """Dial until the server begins, then align and return this party's alignment.

        Raises:
            RemoteFault: the server refused this party, or broke the protocol.
            Stalled: the server could not be reached for `patience` seconds, or sent nothing.
            RunError: the server ended the alignment.
        """
        with ComputePool(self._workers) as pool:
            pool.expect(len(self._ids))
            while True:
                try:
                    return await self._session(pool)
                except grpc.aio.AioRpcError as error:
                    self._reconnect.judge(error)
                    if self._begun:
                        raise Stalled(
                            "VFL-6003",
                            "the connection must last for the whole alignment. It was lost: "
                            f"{error.details()}. Start every party again.",
                        ) from error
                await self._reconnect.pause()

    async def _session(self, pool: ComputePool) -> Alignment:
        # Wait a little longer than the server does: it knows which client is missing, and its reason should
        # arrive before this client gives up.
        patience = self._settings.patience + 3 * self._settings.heartbeat
        async with dial(PATH, ((CLAIM, self._party),), self._settings, self._credentials) as call:
            stream = _ServerStream(call, patience)
            async with stream.exchanging():
                try:
                    with blaming(stream.other):
                        return await self._align(stream, pool)
                except grpc.aio.AioRpcError:
                    if stream.received:  # the connection was alive until now
                        self._reconnect.heard = time.monotonic()
                    raise

    async def _align(self, stream: AlignmentStream, pool: ComputePool) -> Alignment:
        await stream.send(self._terms.to_bytes())
        await stream.send(pack_facts(Kind.COUNT, {"ids": len(self._ids)}))
        _, body = await stream.receive(Kind.BEGIN)
        self._begun = True
        server_count = unpack_count(body)
        log.info("the server has %s ids", f"{server_count:,}")
        pool.expect(server_count)
        order = await self._answer(stream, pool, self._ids, server_count)
        kind, body = await stream.receive(Kind.RESULT, Kind.AGAIN)
        if kind is Kind.AGAIN:
            await self._answer_loosely(stream, pool, unpack_loosened(body, server_count))
            _, body = await stream.receive(Kind.RESULT)
        alignment = await self._receive(stream, body, order, server_count)
        # Write the alignment only after DONE: then every party has its rows, and the server's alignment is on
        # disk. Otherwise a failure elsewhere would leave this party with an alignment that no other has.
        await stream.send(pack(Kind.RECEIVED))
        await stream.receive(Kind.DONE)
        await asyncio.to_thread(self._keep, alignment)
        return alignment

    async def _answer(
        self, stream: AlignmentStream, pool: ComputePool, ids: pl.Series, server_count: int
    ) -> Integers:
        self._progress.begin(len(ids) + server_count)
        return await answer(stream, pool, self._party, ids, server_count, self._progress)

    async def _answer_loosely(self, stream: AlignmentStream, pool: ComputePool, server_count: int) -> None:
        """Repeat the exchange with loosened ids, from which the server derives its advice."""
        log.info("the server asks once more: it has %s ids when forms are loosened", f"{server_count:,}")
        loose = loosened(self._ids).unique()
        await stream.send(pack_facts(Kind.COUNT, {"ids": len(loose)}))
        await stream.receive(Kind.BEGIN)
        await self._answer(stream, pool, loose, server_count)

    async def _receive(
        self, stream: AlignmentStream, body: bytes, order: Integers, server_count: int
    ) -> Alignment:
        """Receive this party's rows. Check everything: the server may be wrong or hostile.

        Args:
            body: of RESULT.
            order: the order in which this party has sent its ids.
            server_count: how many ids the server has announced.
        """
        kinds: dict[str, type] = {"token": str, "rows": int, "label": str, "with_local": bool}
        facts = unpack_facts(body, **kinds, classes=list, own=int)
        rows, count = facts["rows"], facts["own"]
        if rows > server_count:
            raise InvalidMessage(
                "VFL-6005",
                f"there must not be more rows than the {SERVER}'s {server_count:,} ids. Found {rows:,} rows.",
            )
        if not 0 <= count <= len(order) or (self._terms.records == "common" and count != rows):
            raise InvalidMessage(
                "VFL-6006",
                f"a party's rows must be among its ids, and with common records it has all rows. Found "
                f"{count:,} of {rows:,} rows for {len(order):,} ids.",
            )
        content = bytearray()
        while len(content) < count * ROW:
            content += (await stream.receive(Kind.ROWS))[1]
        places, numbers = unpack_rows(content)
        if len(places) != count or len(np.unique(places)) != count or (count and places.max() >= len(order)):
            raise InvalidMessage(
                "VFL-6007",
                f"the {count:,} rows must be different ids that this party has sent. Found {len(places):,} "
                "rows, some repeated, unknown or too many.",
            )
        by_number = np.argsort(numbers)
        ids = self._ids.gather(order[places[by_number]])
        try:
            names = tuple(map(str, facts["classes"])) or None
            options = {name: facts[name] for name in ("label", "with_local")}
            return Alignment(facts["token"], rows, names, ids, numbers[by_number], **options)
        except DataError as error:
            raise InvalidMessage("VFL-6008", str(error)) from error
