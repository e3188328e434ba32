"""The server's end of an alignment: waits for every client, finds what is common, numbers the rows."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
import numpy as np
import polars as pl

from vafl.data.alignment.ids import loosened
from vafl.data.alignment.matching import Places, common, number
from vafl.data.alignment.rows import Alignment
from vafl.errors import InvalidMessage, RemoteFault, Stalled
from vafl.transport.alignment.compute_pool import ComputePool
from vafl.transport.alignment.exchange import Offer, Progress, find
from vafl.transport.alignment.frames import (
    LARGEST_FRAME,
    METHOD,
    Kind,
    Terms,
    pack,
    pack_facts,
    pack_rows,
    unpack_hello,
    unpack_loosened,
)
from vafl.transport.alignment.reasons import Unlike, advice, blaming, reason_for
from vafl.transport.alignment.stream import TOLD_EVERY, AlignmentStream, together
from vafl.transport.grpc.connection import identify, listen
from vafl.transport.grpc.wire import SERVICE, channel_options
from vafl.transport.identity import Credentials
from vafl.transport.settings import NetworkSettings

log = logging.getLogger("vafl.server")

_WATCHED_EVERY = 1.0
_POOR = 0.01  # of the smaller set in common: less, and ids may be written in different ways
Matches = dict[str, tuple[Places, Places]]


@dataclass(frozen=True)
class _Client:
    line: AlignmentStream
    ids: int


class AlignmentServer:
    """Aligns once.

    Args:
        ids: the server's own, canonical.
        classes: the names of the label's classes; None for regression.
        terms: what every party must have set alike; its parties are the clients.
        workers: processes that compute.
        keep: makes the server's own alignment durable, before any client does so with its.
        label: the name of the label column, which no client may have among its features.
        with_local: whether the label holder's table has features, which the clients must know to count all
            clients of the run.
    """

    def __init__(
        self,
        ids: pl.Series,
        classes: tuple[str, ...] | None,
        terms: Terms,
        settings: NetworkSettings,
        credentials: Credentials | None,
        workers: int,
        progress: Progress,
        keep: Callable[[Alignment], None],
        label: str = "",
        *,
        with_local: bool = False,
    ) -> None:
        self._ids, self._classes, self._label, self._terms = ids, classes, label, terms
        self._with_local = with_local
        self._settings, self._credentials = settings, credentials
        self._workers, self._progress, self._keep = workers, progress, keep
        self._clients: dict[str, _Client] = {}
        self._streams: set[asyncio.Task[Any]] = set()
        self._arrival = asyncio.Event()
        self._begun = self._kept = False
        self._over = asyncio.Event()
        self._reasons: dict[str, str] = {}

    async def serve(
        self,
        listening: Callable[[str], None] = lambda address: None,
        watch: Callable[[], None] = lambda: None,
    ) -> Alignment:
        """Waits for the clients and aligns with them.

        Args:
            listening: told the address once it can be dialled.
            watch: called every second until all are here; what it raises ends the alignment.

        Raises:
            Stalled: a client did not come, or went away.
            RemoteFault: a client broke the protocol.
            DataError: too few records are common.
        """
        self._failure: asyncio.Future[Alignment] = asyncio.get_running_loop().create_future()
        # It may come when all is over: then it is read, and nobody complains that it never was.
        self._failure.add_done_callback(asyncio.Future.exception)
        settings = replace(self._settings, largest_message=LARGEST_FRAME)
        server = grpc.aio.server(options=channel_options(settings))
        handler = grpc.stream_stream_rpc_method_handler(self._stream)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        address = listen(server, settings, self._credentials)
        await server.start()
        listening(address)
        work = asyncio.create_task(self._work(watch))
        try:
            await asyncio.wait((work, self._failure), return_when=asyncio.FIRST_COMPLETED)
            return await (self._failure if self._failure.done() else work)
        except BaseException as error:
            self._reasons = {party: reason_for(party, error) for party in self._terms.parties}
            raise
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await work
            self._over.set()
            if self._streams:
                await asyncio.wait(self._streams, timeout=self._settings.answer_timeout)
            await server.stop(grace=1.0)

    # --- one client's stream ---

    async def _stream(self, _: object, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        if (task := asyncio.current_task()) is not None:
            self._streams.add(task)
            task.add_done_callback(self._streams.discard)
        async with AlignmentStream(
            "a client", context.read, context.write, self._settings, self._heard
        ) as line:
            try:
                line.other = party = self._identify(context)
                count = await self._agree(line)
            except (RemoteFault, Stalled) as fault:
                log.warning("refused %s: %s", line.other, fault)
                await line.refuse(str(fault), self._settings.answer_timeout)
                return
            mine = self._clients[party] = _Client(line, count)
            self._arrival.set()
            log.info("%s is here, with %s ids", party, f"{count:,}")
            try:
                await self._over.wait()
            except asyncio.CancelledError:
                self._lose(party, mine)
                raise
            if self._reasons:
                await line.refuse(self._reasons[party], self._settings.answer_timeout)
            await line.flush()

    def _heard(self) -> int:
        """How many messages of clients, so that each knows whether the server gets on with the others."""
        return sum(client.line.heard for client in self._clients.values())

    def _identify(self, context: "grpc.aio.ServicerContext[bytes, bytes]") -> str:
        party = identify(context, self._credentials)
        if party not in self._terms.parties:
            known = ", ".join(self._terms.parties)
            raise InvalidMessage("VFL-6051", f'"{party}" is no client of this run. Its clients: {known}.')
        return party

    async def _agree(self, line: AlignmentStream) -> int:
        """Checks what a client says first; gives how many ids it has."""
        terms, count = unpack_hello((await line.hear(Kind.HELLO))[1])
        if difference := self._terms.difference(terms):
            raise InvalidMessage(
                "VFL-6052", f"the parties must agree on the alignment. Different: {difference}."
            )
        if self._begun or self._over.is_set():
            raise InvalidMessage(
                "VFL-6053", "the alignment has begun. Start every party again for another one."
            )
        return count

    def _lose(self, party: str, client: _Client) -> None:
        """A client went away: it may come again as long as nothing has begun."""
        if self._clients.get(party) is not client:
            return  # another stream has taken its place
        if not self._begun:
            del self._clients[party]
            log.info("%s is gone", party)
        elif not self._kept and not self._failure.done():
            self._failure.set_exception(Stalled("VFL-6054", f"{party} went away. Start every party again."))

    # --- the alignment ---

    async def _work(self, watch: Callable[[], None]) -> Alignment:
        with ComputePool(self._workers) as crew:
            crew.expect(len(self._ids))
            offer = Offer(self._ids)  # computed while clients are waited for, too
            _, matches = await together(offer.compute(crew), self._meet(crew, offer, watch))
            await self._check(crew, matches)
        alignment, numbers = self._number(matches)
        await together(*(self._tell(alignment, numbers, party, matches[party]) for party in matches))
        await asyncio.to_thread(self._keep, alignment)
        self._kept = True  # from here on, clients may leave
        await together(*(client.line.say(pack(Kind.DONE)) for client in self._clients.values()))
        return alignment

    async def _meet(self, crew: ComputePool, offer: Offer, watch: Callable[[], None]) -> Matches:
        await self._wait_for_clients(watch)
        self._begun = True
        sizes = {party: client.ids for party, client in self._clients.items()}
        crew.expect(max(sizes.values()))
        return await self._exchange(crew, offer, sizes)

    async def _wait_for_clients(self, watch: Callable[[], None]) -> None:
        deadline, told, again = time.monotonic() + self._settings.patience, "", 0.0
        while missing := [party for party in self._terms.parties if party not in self._clients]:
            watch()
            left, names = deadline - time.monotonic(), ", ".join(missing)
            if left <= 0:
                raise Stalled(
                    "VFL-6055",
                    f"every party must take part. Not here within {self._settings.patience:.0f} s "
                    f"(network.patience): {names}. Start `vafl align` at every party.",
                )
            if names != told or left <= again:
                log.info("waiting for %s, %.0f s at most", names, left)
                told, again = names, left - TOLD_EVERY
            self._arrival.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, _WATCHED_EVERY)):
                    await self._arrival.wait()

    async def _exchange(self, crew: ComputePool, offer: Offer, sizes: Mapping[str, int]) -> Matches:
        """With all these clients at once; gives what each has in common with what is offered."""
        lines, count = {party: self._clients[party].line for party in sizes}, len(offer.ids)
        self._progress.begin(sum(sizes.values()) + len(sizes) * count)

        async def with_one(party: str) -> tuple[Places, Places]:
            with blaming(party):
                return await find(lines[party], crew, party, offer, sizes[party], self._progress)

        for line in lines.values():
            await line.say(pack_facts(Kind.BEGIN, {"ids": count}))
        found = await together(*map(with_one, sizes))
        return dict(zip(sizes, found, strict=True))

    async def _check(self, crew: ComputePool, matches: Matches) -> None:
        """Where hardly anything is common, finds out whether ids are written in different ways.

        Raises:
            DataError: they are, or nothing is common for another reason.
        """
        poor = [
            party
            for party, (places, _) in matches.items()
            if len(places) < _POOR * min(len(self._ids), self._clients[party].ids)
        ]
        if not poor:
            return
        log.info("hardly an id is common with %s: looking for other ways of writing them", ", ".join(poor))
        loose = Offer(loosened(self._ids).unique())
        for party in poor:
            await self._clients[party].line.say(pack_facts(Kind.AGAIN, {"ids": len(loose.ids)}))
        sizes = dict(zip(poor, await together(*map(self._count, poor)), strict=True))
        _, again = await together(loose.compute(crew), self._exchange(crew, loose, sizes))
        advised = {party: advice(party, len(matches[party][0]), len(again[party][0])) for party in poor}
        if words := {party: text for party, text in advised.items() if text}:
            raise Unlike("VFL-6056", words)

    async def _count(self, party: str) -> int:
        """How many ids a client has in the loosened form."""
        with blaming(party):
            _, body = await self._clients[party].line.hear(Kind.COUNT)
            return unpack_loosened(body, self._clients[party].ids)

    def _number(self, matches: Matches) -> tuple[Alignment, Places]:
        """Chooses the rows; gives the server's own alignment and the row number of each of its ids."""
        count = len(self._ids)
        own = [places for places, _ in matches.values()]
        chosen = np.arange(count) if self._terms.records == "labelled" else common(count, own)
        if not len(chosen):
            text = (
                'data.records = "common" needs records that every party has. There are none, though each '
                'client has some of the server\'s. Leave out a party, or set data.records = "labelled".'
            )
            raise Unlike("VFL-6057", dict.fromkeys(self._terms.parties, text))
        numbers = number(count, chosen)
        order = chosen[np.argsort(numbers[chosen])]
        token = secrets.token_hex(16)
        rows = len(chosen)
        holders = {party: pl.Series(np.isin(order, places)) for party, (places, _) in matches.items()}
        ids = self._ids.gather(order)
        facts = (token, rows, self._classes, ids, np.arange(rows), holders, self._label, self._with_local)
        return Alignment(*facts), numbers

    async def _tell(
        self, alignment: Alignment, numbers: Places, party: str, match: tuple[Places, Places]
    ) -> None:
        """Tells a client which of its places are which rows, and waits until it has all of them."""
        rows, places = numbers[match[0]], match[1]
        order = np.argsort(rows)[np.count_nonzero(rows < 0) :]
        facts = {
            "token": alignment.token,
            "rows": alignment.rows,
            "label": alignment.label,
            "with_local": alignment.with_local,
            "classes": list(alignment.classes or ()),
            "own": len(order),
        }
        line = self._clients[party].line
        await line.say(pack_facts(Kind.RESULT, facts))
        for content in pack_rows(places[order], rows[order]):
            await line.say(content)
        with blaming(party):
            await line.hear(Kind.RECEIVED)
        log.info("%s has %s of %s rows", party, f"{len(order):,}", f"{alignment.rows:,}")
