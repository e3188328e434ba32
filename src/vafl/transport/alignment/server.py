"""The server's end of an alignment: wait for every client, find the common records, number the rows.

One `AlignmentServer` goes through these states once:

    WAITING       clients connect and announce their ids; they may leave and come back
       │ every client is here: `_begun`
       v
    EXCHANGING    one exchange with each client, all at the same time
       │ matches of every client
       v
    CHECKING      a client with hardly any match: a second exchange with loosened ids, for advice only
       │ ids look right ──────── ids are written differently, or nothing is common ──────┐
       v                                                                                 │
    NUMBERING     choose the rows, send each client its own, wait for RECEIVED           │
       │ every client has its rows                                                       │
       v                                                                                 │
    KEEPING       write the server's alignment to disk                                   │
       │ written: `_kept`                                                                v
       v                                                                              FAILED
    DONE          send DONE; each client then writes its alignment

Every state before DONE goes to FAILED if a client leaves (WAITING excepted), breaks the protocol or stays
silent for too long, or if the server itself fails. `serve` then sends each client the reason it may read.

Messages of one client's stream, in order. PROGRESS may come at any time after COUNT, and FAILED instead of
any message of the server. A client that is not admitted gets the reason as the status of its call:

    client                                    server
    terms, COUNT (number of ids)  ────────>
                                  <────────   BEGIN (number of ids)
    SALT, POINTS..., TAGS...      <───────>   POINTS...
                                  <────────   AGAIN (number of loosened ids)  ┐
    COUNT (loosened ids)          ────────>                                   │ only for a client with
                                  <────────   BEGIN                           │ hardly any match
    SALT, POINTS..., TAGS...      <───────>   POINTS...                       ┘
                                  <────────   RESULT, ROWS...
    RECEIVED                      ────────>
                                  <────────   DONE

Invariants:

- Each client sends one set of ids. After `_begun` no stream is admitted, so a client cannot try other ids in
  the same alignment.
- Each client has at most one stream. Before `_begun`, a newer stream replaces an older one.
- No party writes its alignment before every party has received its rows.
- The server writes its alignment before any client does. So a client never has an alignment whose token the
  server does not know. A failure between the two leaves clients with their previous alignment: align again.
- A client learns nothing about another client's ids, not even from an error.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from vafl.arrays import Integers
from vafl.data.alignment.ids import loosened
from vafl.data.alignment.matching import common, number
from vafl.data.alignment.rows import Alignment
from vafl.errors import InvalidMessage, RemoteFault, Stalled
from vafl.transport.alignment.compute_pool import ComputePool
from vafl.transport.alignment.exchange import Offer, Progress, find
from vafl.transport.alignment.frames import (
    LARGEST_FRAME,
    METHOD,
    AlignmentTerms,
    Kind,
    pack,
    pack_facts,
    pack_rows,
    unpack,
    unpack_count,
    unpack_loosened,
)
from vafl.transport.alignment.reasons import Unlike, advice, blaming, reason_for
from vafl.transport.alignment.stream import TOLD_EVERY, AlignmentStream, together
from vafl.transport.grpc.admission import agree, first_message, identify, refuse, serve_streams
from vafl.transport.grpc.local import ServerCall
from vafl.transport.identity import Credentials
from vafl.transport.settings import NetworkSettings

log = logging.getLogger("vafl.server")

_WATCHED_EVERY = 1.0  # seconds between two calls of `watch`
_POOR = 0.01  # a smaller share of the smaller set in common suggests that ids are written differently
Matches = dict[str, tuple[Integers, Integers]]


@dataclass(frozen=True)
class _Client:
    """A client that was admitted: its stream, and how many ids it has announced."""

    stream: AlignmentStream
    ids: int


class AlignmentServer:
    """Run one alignment. The module's docstring describes its states.

    Args:
        ids: the server's ids, in canonical form.
        classes: the names of the label's classes; None for regression.
        terms: the settings that must be equal at every party. `terms.parties` are the clients.
        settings: address, limits and timeouts.
        credentials: the server's certificate, or None for plaintext on loopback.
        workers: number of processes that compute.
        progress: shows the progress of the exchanges.
        keep: writes the server's alignment to disk; called before any client writes its own.
        label: the name of the label column. No client may have it among its features.
        with_local: whether the label holder's table has features. Clients need this to count the clients of
            the run.
    """

    def __init__(
        self,
        ids: pl.Series,
        classes: tuple[str, ...] | None,
        terms: AlignmentTerms,
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
        """Wait for the clients, align with them and return the server's alignment.

        Args:
            listening: called with host:port once clients can connect.
            watch: called every second until all clients are here. An exception from it ends the alignment.

        Raises:
            Stalled: a client did not connect, went away or fell silent.
            RemoteFault: a client broke the protocol.
            DataError: too few records are common.
        """
        self._failure: asyncio.Future[Alignment] = asyncio.get_running_loop().create_future()
        # A failure may be set when nothing awaits it any more. Retrieving the exception here keeps asyncio
        # from logging that it was never retrieved.
        self._failure.add_done_callback(asyncio.Future.exception)
        settings = replace(self._settings, largest_message=LARGEST_FRAME)
        async with serve_streams(METHOD, self._stream, settings, self._credentials) as address:
            listening(address)
            reporting = asyncio.create_task(self._report_progress())
            work = asyncio.create_task(self._work(watch))
            try:
                await asyncio.wait((work, self._failure), return_when=asyncio.FIRST_COMPLETED)
                return await (self._failure if self._failure.done() else work)
            except BaseException as error:
                self._reasons = {party: reason_for(party, error) for party in self._terms.parties}
                raise
            finally:
                # End the work before the streams: it still uses them. Then let each stream send its last
                # message and wait for the client to close, within limits.
                reporting.cancel()
                work.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await work
                self._over.set()
                if self._streams:
                    await asyncio.wait(self._streams, timeout=self._settings.answer_timeout)

    # --- one client's stream ---

    async def _stream(self, context: ServerCall) -> None:
        """Admit a client and keep its stream open until the alignment is over. `_work` uses the stream."""
        if (task := asyncio.current_task()) is not None:
            self._streams.add(task)
            task.add_done_callback(self._streams.discard)
        party, count = await self._admit(context)
        stream = AlignmentStream(party, context, self._settings.patience)
        async with stream.exchanging():
            client = self._clients[party] = _Client(stream, count)
            self._arrival.set()
            log.info("%s is here, with %s ids", party, f"{count:,}")
            try:
                await self._over.wait()
            except asyncio.CancelledError:  # gRPC cancels the handler when the client is gone
                self._lose(party, client)
                raise
            if self._reasons:
                await stream.refuse(self._reasons[party], self._settings.answer_timeout)
            else:
                await stream.flush()

    async def _admit(self, context: ServerCall) -> tuple[str, int]:
        """Return the client's name and how many ids it has; abort the call if it may not take part."""
        party = "a client"
        try:
            party = identify(context, self._credentials, self._terms.parties)
            await agree(context, self._terms, self._settings.heartbeat)
            kind, body = unpack(await first_message(context, self._settings.heartbeat))
            if kind is not Kind.COUNT:
                raise InvalidMessage("VFL-6052", f"the terms must be followed by COUNT. Found {kind.name}.")
            count = unpack_count(body)
            if self._begun or self._over.is_set():
                raise InvalidMessage(
                    "VFL-6053",
                    "a client must connect before the alignment begins. Found one that has begun already. "
                    "Start every party again for a new alignment.",
                )
        except (RemoteFault, Stalled) as fault:
            log.warning("refused %s: %s", party, fault)
            await refuse(context, fault)
        return party, count

    async def _report_progress(self) -> None:
        """Send PROGRESS to all clients after each heartbeat in which a message of some client arrived.

        So a client that is done with its own exchange goes on waiting while the others are not.
        """
        before = 0
        while True:
            await asyncio.sleep(self._settings.heartbeat)
            streams = [client.stream for client in self._clients.values()]
            # The 1 stands for a client's COUNT: an admission is progress, too.
            now = sum(1 + stream.received for stream in streams)
            for stream in streams:
                if now != before and not stream.is_full:
                    stream.put(pack(Kind.PROGRESS))
            before = now

    def _lose(self, party: str, client: _Client) -> None:
        """Handle a client that went away. It may come back only before the exchanges have begun."""
        if self._clients.get(party) is not client:
            return  # a newer stream has replaced this one
        if not self._begun:
            del self._clients[party]
            log.info("%s is gone", party)
        elif not self._kept and not self._failure.done():
            self._failure.set_exception(Stalled("VFL-6054", f"{party} went away. Start every party again."))

    # --- the alignment ---

    async def _work(self, watch: Callable[[], None]) -> Alignment:
        """Go through all states of the alignment (see the module's docstring)."""
        with ComputePool(self._workers) as pool:
            pool.expect(len(self._ids))
            offer = Offer(self._ids)  # blind the server's ids while clients are still connecting
            _, matches = await together(offer.compute(pool), self._meet(pool, offer, watch))
            await self._check(pool, matches)
        alignment, numbers = self._number(matches)
        await together(*(self._send_rows(alignment, numbers, party, matches[party]) for party in matches))
        # Every client has its rows. The server's alignment must be on disk before DONE lets clients write
        # theirs: see the invariants.
        await asyncio.to_thread(self._keep, alignment)
        self._kept = True  # from here on, a client that leaves is no failure
        await together(*(client.stream.send(pack(Kind.DONE)) for client in self._clients.values()))
        return alignment

    async def _meet(self, pool: ComputePool, offer: Offer, watch: Callable[[], None]) -> Matches:
        await self._wait_for_clients(watch)
        self._begun = True
        sizes = {party: client.ids for party, client in self._clients.items()}
        pool.expect(max(sizes.values()))
        return await self._exchange(pool, offer, sizes)

    async def _wait_for_clients(self, watch: Callable[[], None]) -> None:
        # Log who is missing whenever that changes, and every `TOLD_EVERY` seconds.
        deadline, logged, again = time.monotonic() + self._settings.patience, "", 0.0
        while missing := [party for party in self._terms.parties if party not in self._clients]:
            watch()
            left, names = deadline - time.monotonic(), ", ".join(missing)
            if left <= 0:
                raise Stalled(
                    "VFL-6055",
                    f"every party must take part. Not connected within {self._settings.patience:.0f} s "
                    f"(network.patience): {names}. Start `vafl align` at every party.",
                )
            if names != logged or left <= again:
                log.info("waiting for %s, %.0f s at most", names, left)
                logged, again = names, left - TOLD_EVERY
            self._arrival.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, _WATCHED_EVERY)):
                    await self._arrival.wait()

    async def _exchange(self, pool: ComputePool, offer: Offer, sizes: Mapping[str, int]) -> Matches:
        """Run the exchange with all these clients at the same time; return each client's matches.

        Args:
            sizes: client -> how many ids it has announced.
        """
        streams, count = {party: self._clients[party].stream for party in sizes}, len(offer.ids)
        self._progress.begin(sum(sizes.values()) + len(sizes) * count)

        async def exchange_with(party: str) -> tuple[Integers, Integers]:
            with blaming(party):
                return await find(streams[party], pool, party, offer, sizes[party], self._progress)

        for stream in streams.values():
            await stream.send(pack_facts(Kind.BEGIN, {"ids": count}))
        matches = await together(*map(exchange_with, sizes))
        return dict(zip(sizes, matches, strict=True))

    async def _check(self, pool: ComputePool, matches: Matches) -> None:
        """If hardly any ids match, find out whether the parties write them differently.

        Raises:
            DataError: they do, or no id matches for another reason.
        """
        poor = [
            party
            for party, (places, _) in matches.items()
            if len(places) < _POOR * min(len(self._ids), self._clients[party].ids)
        ]
        if not poor:
            return
        log.info("hardly any ids match those of %s: trying loosened forms of the ids", ", ".join(poor))
        loose = Offer(loosened(self._ids).unique())
        for party in poor:
            await self._clients[party].stream.send(pack_facts(Kind.AGAIN, {"ids": len(loose.ids)}))
        sizes = dict(zip(poor, await together(*map(self._receive_count, poor)), strict=True))
        _, again = await together(loose.compute(pool), self._exchange(pool, loose, sizes))
        advised = {party: advice(party, len(matches[party][0]), len(again[party][0])) for party in poor}
        if words := {party: text for party, text in advised.items() if text}:
            raise Unlike("VFL-6056", words)

    async def _receive_count(self, party: str) -> int:
        """Receive how many ids a client has in the loosened form."""
        with blaming(party):
            _, body = await self._clients[party].stream.receive(Kind.COUNT)
            return unpack_loosened(body, self._clients[party].ids)

    def _number(self, matches: Matches) -> tuple[Alignment, Integers]:
        """Choose the rows. Return the server's alignment, and each of its ids' row number or -1."""
        count = len(self._ids)
        matched = [places for places, _ in matches.values()]
        chosen = np.arange(count) if self._terms.records == "labelled" else common(count, matched)
        if not len(chosen):
            text = (
                'data.records = "common" needs records that every party has. Found none, though each client '
                'has some of the server\'s. Leave out a party, or set data.records = "labelled".'
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

    async def _send_rows(
        self, alignment: Alignment, numbers: Integers, party: str, match: tuple[Integers, Integers]
    ) -> None:
        """Send a client the row number of each of its matched ids, and wait until it has all of them.

        Args:
            numbers: the row number of each of the server's ids; -1 for an id that is no row.
            match: places of the matched ids at the server, and in the order in which the client sent them.
        """
        rows, places = numbers[match[0]], match[1]
        order = np.argsort(rows)[np.count_nonzero(rows < 0) :]  # by row number, without the -1s
        facts = {
            "token": alignment.token,
            "rows": alignment.rows,
            "label": alignment.label,
            "with_local": alignment.with_local,
            "classes": list(alignment.classes or ()),
            "own": len(order),
        }
        stream = self._clients[party].stream
        await stream.send(pack_facts(Kind.RESULT, facts))
        for content in pack_rows(places[order], rows[order]):
            await stream.send(content)
        with blaming(party):
            await stream.receive(Kind.RECEIVED)
        log.info("%s has %s of %s rows", party, f"{len(order):,}", f"{alignment.rows:,}")
