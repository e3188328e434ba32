"""Serve a federation over gRPC: one stream per client, and one worker that owns the protocol's server.

The event loop moves bytes: this module. The worker decodes messages, runs the protocol and encodes replies:
handler.py. Messages that arrive while the worker is busy are handled together in its next turn. Each client's
queues are bounded, so a client that sends faster than the server works is held back by flow control.

The run, as `FederationServer.serve` goes through it:

    WAITING ──── every client has connected once, or join_timeout ────> RUNNING      (`began` is set)
       │                                                                   │
       └─────────────────────── finish() or fail() ────────────────────────┤
                                                                           v
              every stream closed, or its time is up <── Stop to all ──── OVER       (`is_over`)

One client's stream, as `_converse` goes through it:

      client dials
           │
           v          wrong identity, other terms, place taken; no terms within one heartbeat
       ADMITTING ──────────────────────────────────────────────────────────────> abort with a status
           │ `_take_place`: now in `connections`; an older stream of the client starts to end
           v          no message within answer_timeout, which starts with the run at the earliest
         OPEN ─────────────────────────────────────────────────────────────────────────────> CLOSED
           │ the protocol accepts Join and replies with Welcome                                 ^
           v                                                                                    │
        JOINED ──── the client closes the stream, or the connection is lost ────────────────────┤
           │ replaced by a newer stream, or MANY_VIOLATIONS messages refused (also from OPEN)   │
           v                                                                                    │
        ENDING ──── the outbox is empty, or answer_timeout has passed ──────────────────────────┘

Invariants:

- `connections` holds at most one stream per client, always the newest admitted one. The worker ignores frames
  of any other stream.
- A client's first accepted message on a stream is Join, and no later one is. Before it, the server sends
  nothing but Refused and Stop.
- After admission, the server reads nothing from a stream before the run has started.
- Only the worker calls the protocol's server. Only the event loop changes `connections`, outboxes and credit.
- When the current stream of a client closes, the protocol gets Leave, unless a newer stream has joined.
- A process whose place was taken is never admitted again (`_replaced`), so two processes of one party cannot
  take turns in evicting each other.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, Generic

from vafl.errors import InvalidMessage, RemoteFault, Stalled
from vafl.names import LOCAL_CLIENT
from vafl.protocol.messages import Leave, Refused, ServerMessage, Stop
from vafl.transport.codec import Codec
from vafl.transport.grpc.admission import agree, arrival, identify, refuse, serve_streams
from vafl.transport.grpc.connection import Connection
from vafl.transport.grpc.handler import Handler, Refusals, Served
from vafl.transport.grpc.local import LocalCall, Metadata, ServerCall
from vafl.transport.grpc.terms import RunTerms
from vafl.transport.grpc.wire import METHOD
from vafl.transport.grpc.worker import Worker
from vafl.transport.identity import Credentials
from vafl.transport.settings import NetworkSettings
from vafl.transport.traffic import Traffic
from vafl.transport.vitals import Alarm, Vitals

log = logging.getLogger("vafl.server")

_TICK = 0.25  # seconds between two calls of `after` when no messages arrive
_STRANGER = "(unadmitted)"  # counts refusals of all peers that were not admitted, whatever names they claim
_SILENCE = 15.0  # seconds between two log lines about clients that have not joined
_REPLACED = (
    "another process has taken this party's place. A party is one process at a time: end the other, then "
)
# Remedies for the process that was replaced, and for the new process that finds its place taken. Training has
# checkpoints to resume from; using a trained model has none.
_RESUME = (
    "start this one again with --resume.",
    "Add --resume to continue from its last checkpoint, or --replace to take its place without one.",
)
_REPLACE = (
    "start this one again.",
    "End the other process, or add --replace to take its place.",
)


class FederationServer(Generic[Served]):
    """Serve one run until it is over.

    Args:
        server: the protocol's server, or its scorer.
        parties: the clients' names, in the order of the table's columns.
        terms: what every party must agree on.
        settings: address, limits and timeouts.
        credentials: the server's certificate, or None for plaintext on loopback.
        after: called by the worker after each batch of messages and on every tick. It returns further
            messages to send, and may call `finish`.

    Attributes:
        connections: client -> its current stream.
        seen: clients that have connected at least once.
        missing_at_start: names of the clients that had not connected when the run began.
        began: when the run began, on the monotonic clock; None before.
    """

    def __init__(
        self,
        server: Served,
        parties: Sequence[str],
        terms: RunTerms,
        settings: NetworkSettings,
        credentials: Credentials | None,
        after: Callable[["FederationServer[Served]"], list[ServerMessage]],
    ) -> None:
        self.server, self.parties = server, list(parties)
        for client in range(len(self.parties)):
            server.receive(Leave(client))  # no client is connected yet
        self.traffic = [Traffic() for _ in parties]
        self._refusals = Refusals()
        self.connections: dict[int, Connection] = {}
        self._instances: dict[int, str] = {}  # client -> instance id of the process that connected last
        self._replaced: deque[str] = deque(maxlen=1000)  # instance ids that another process has replaced
        self.seen: set[int] = set()
        self.missing_at_start: list[str] = []
        self.began: float | None = None
        self._earlier = 0.0  # seconds that the run took before it was resumed
        self._terms, self._settings, self._credentials, self._after = terms, settings, credentials, after
        self._codec = Codec(settings.encoding, settings.largest_message)
        self.vitals = Vitals(self.parties, self._report_alarm, time.monotonic)
        self._everybody = asyncio.Event()
        self._over = asyncio.Event()
        self._dismissed: set[int] = set()  # clients that were sent Stop
        self._reason, self._failed = "", False
        self._failure: Exception | None = None
        remedies = _REPLACE if terms.model else _RESUME
        self._replaced_reason, self._taken_remedy = _REPLACED + remedies[0], remedies[1]
        self._away = 3 * settings.heartbeat  # seconds for a disconnected client to come back for its Stop

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return self._earlier + (time.monotonic() - self.began if self.began is not None else 0.0)

    @property
    def updates(self) -> int:
        return self.server.iteration

    @property
    def is_over(self) -> bool:
        """Return whether the run has ended, with or without a result."""
        return self._over.is_set()

    @property
    def violations(self) -> dict[str, int]:
        """Party -> number of refused messages and connections."""
        return self._refusals.counts

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Bytes received from clients, and bytes sent to them, over the network.

        The label holder's own client runs inside this process, so its messages are not counted.
        """
        return (
            sum(traffic.bytes_up for traffic in self.traffic),
            sum(traffic.bytes_down for traffic in self.traffic),
        )

    @property
    def to_come(self) -> str:
        """Names of the clients that the run waits for before it begins; empty once it has begun."""
        missing = (name for index, name in enumerate(self.parties) if index not in self.seen)
        return ", ".join(missing) if self.began is None else ""

    def silence(self, client: int) -> float:
        """Return the seconds for which a connected client has been silent.

        Return 0 for less than a heartbeat, before the run begins and after it is over. gRPC does not report
        an unanswered ping; it only closes the connection after three heartbeats. So this looks at messages of
        the run, and a client that computes for a long time counts as silent. The client inside this process
        is never silent: it deliberately waits for the others.
        """
        connection = self.connections.get(client)
        if connection is None or self.began is None or self.is_over or connection.party == LOCAL_CLIENT:
            return 0.0
        seconds = min(connection.silence, time.monotonic() - self.began)
        return seconds if seconds > self._settings.heartbeat else 0.0

    def account(self) -> dict[str, Any]:
        """Return elapsed seconds, traffic and violations as plain values, for a checkpoint."""
        traffic = [asdict(each) for each in self.traffic]
        return {"seconds": self.now, "traffic": traffic, "violations": dict(self.violations)}

    def resume(self, account: Mapping[str, Any]) -> None:
        """Continue counting from the values of a checkpoint."""
        self._earlier = account["seconds"]
        self.traffic = [Traffic(**each) for each in account["traffic"]]
        self._refusals = Refusals(account["violations"])

    async def serve(self, listening: Callable[[str], None] = lambda address: None) -> None:
        """Serve until `finish` is called or the worker fails, then send Stop to every client.

        Args:
            listening: called with host:port once clients can connect.

        Raises:
            ConfigError: the server cannot listen on network.address.
            Exception: the error that `fail` was called with.
        """
        self._loop = asyncio.get_running_loop()
        async with serve_streams(METHOD, self._converse, self._settings, self._credentials) as address:
            self._worker = Worker(self.fail)
            self._handler = Handler(
                self.server,
                self._worker,
                self.connections,
                self._deliver,
                partial(self._after, self),
                self._codec,
                self._settings,
                self._refusals,
                self.traffic,
                self.vitals,
            )
            listening(address)
            timers = [asyncio.create_task(self._open()), asyncio.create_task(self._tick())]
            try:
                await self._over.wait()
            finally:
                for task in timers:
                    task.cancel()
                await self._send_stop()
                await self._worker.stop()
        if self._failure:
            raise self._failure

    def finish(self, reason: str, *, failed: bool = False) -> None:
        """End the run, with a result or (`failed`) without one. The first reason wins. Thread-safe."""
        if not self._reason:
            self._reason, self._failed = reason, failed
        self._loop.call_soon_threadsafe(self._over.set)

    def fail(self, error: Exception, reason: str = "the server failed; its log says why") -> None:
        """End the run without a result, unless it is over already. Call this on the event loop.

        `serve` raises the error. Clients receive only the reason: the error may name files of the server.
        """
        if self._over.is_set():
            log.error("error after the end of the run: %r", error)
            return
        self._failure, self._reason, self._failed = error, reason, True
        self._over.set()

    def attend(self) -> None:
        """Have the worker call `after` soon, without waiting for a message. Call this on the event loop."""
        self._worker.do(self._handler.attend)

    async def _open(self) -> None:
        """Wait until every client has connected or `join_timeout` has passed, then start the run's clock."""
        deadline = time.monotonic() + self._settings.join_timeout
        while not self._everybody.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                self._start_without(sorted(set(range(len(self.parties))) - self.seen))
                self._everybody.set()
                break
            log.info("waiting for %s, %.0f s at most", self.to_come, left)
            await _wait(self._everybody, min(left, _SILENCE))
        self.began = time.monotonic()

    def _start_without(self, clients: Sequence[int]) -> None:
        self.missing_at_start = [self.parties[client] for client in clients]
        log.warning(
            "starting without %s: no connection within %g s (network.join_timeout). The model learns nothing "
            "from the data of a missing party. A party that connects later still joins: start it now, or "
            "stop this run and raise network.join_timeout",
            ", ".join(self.missing_at_start),
            self._settings.join_timeout,
        )

    async def _tick(self) -> None:
        """Call `after` regularly, so that its deadlines expire even if no messages arrive."""
        while True:
            await asyncio.sleep(_TICK)
            self.attend()

    async def _send_stop(self) -> None:
        """Send Stop to every client and wait until it closes its stream.

        A connected client has `answer_timeout` seconds to do so. A client that has lost its connection has
        three heartbeats to reconnect and receive its Stop.
        """
        for connection in list(self.connections.values()):
            self._dismiss(connection)
        if late := [self.parties[client] for client in sorted(self.seen - self._dismissed)]:
            log.info("the run is over; waiting %.0f s for %s to reconnect", self._away, ", ".join(late))
        over = time.monotonic()
        while (self.connections and time.monotonic() < over + self._settings.answer_timeout) or (
            self.seen - self._dismissed and time.monotonic() < over + self._away
        ):
            await asyncio.sleep(0.02)

    def _dismiss(self, connection: Connection) -> None:
        self._dismissed.add(connection.client)
        stop = Stop(connection.client, self._reason, failed=self._failed)
        connection.put(self._codec.encode(stop))

    # --- one client's stream ---

    def connect(self, metadata: Metadata) -> LocalCall:
        """Connect the client that runs inside this process; called on the event loop that serves."""
        return LocalCall(self._converse, metadata)

    async def _converse(self, context: ServerCall) -> None:
        connection = await self._admit(context)
        client = connection.client
        self._take_place(connection)
        log.info("%s is here", connection.party)
        if self._over.is_set():
            self._dismiss(connection)
        try:
            # Whatever ends first closes the stream: the reader when the client closes it, the writer after
            # the last queued message, the timer when an ending client does not read.
            await connection.run(self._read(connection), connection.expire(self._settings.answer_timeout))
        finally:
            # A stream that was replaced is no longer its client's: then the newer stream speaks for the
            # client, and the protocol must not receive a Leave.
            if self.connections.get(client) is connection:
                del self.connections[client]
                log.info("%s is gone", connection.party)
                self._worker.do(partial(self._handler.leave, connection))

    def _take_place(self, connection: Connection) -> None:
        """Make this the client's current stream and end an older one.

        The older stream is dead, or belongs to another process of the same party. That process receives
        Refused and does not dial again.
        """
        previous = self._instances.get(connection.client, connection.instance)
        if previous != connection.instance:
            self._replaced.append(previous)
        self._instances[connection.client] = connection.instance
        if older := self.connections.get(connection.client):
            log.warning("%s is here again: closing its older stream", connection.party)
            older.clear_outbox()  # free the memory: the protocol resends what the client still needs
            older.put(self._codec.encode(Refused(connection.client, self._replaced_reason)))
            older.end()
        self.connections[connection.client] = connection

    async def _admit(self, context: ServerCall) -> Connection:
        """Identify the peer and check its terms; abort the call if it may not join this run."""
        # Refusals are counted by party. A name outside the run is counted as a stranger, so that a peer that
        # claims ever new names cannot make `violations` grow.
        party = _STRANGER
        try:
            party = identify(context, self._credentials, self.parties)
            await agree(context, self._terms, self._settings.heartbeat)
            instance, takes_over = arrival(context)
            if instance in self._replaced:
                raise InvalidMessage("VFL-6123", self._replaced_reason)
            if not takes_over and not self._over.is_set():
                self._require_free_place(party, instance)
        except (RemoteFault, Stalled) as fault:
            self._refusals.count(party, fault)
            await refuse(context, fault)
        return Connection(context, self.parties.index(party), party, instance)

    def _require_free_place(self, party: str, instance: str) -> None:
        """Raise InvalidMessage if a new process would evict another process of its party from the run."""
        client = self.parties.index(party)
        is_connected = client in self.connections
        if self._instances.get(client) == instance or not (is_connected or self.server.is_under_way(client)):
            return
        found = "another process that is connected" if is_connected else "uploads of an earlier process"
        raise InvalidMessage(
            "VFL-6124",
            f"a party is one process at a time. Found {found} in the place of {party}. {self._taken_remedy}",
        )

    async def _read(self, connection: Connection) -> None:
        """Pass messages to the worker, as many at a time as the client has credit.

        Further messages stay unread, so HTTP/2 flow control makes the client wait. The Join must arrive
        within `answer_timeout`, since evaluations wait for clients that are about to join.
        """
        handler = self._handler
        self.seen.add(connection.client)
        if len(self.seen) == len(self.parties):
            self._everybody.set()
        await self._everybody.wait()
        try:
            async with asyncio.timeout(self._settings.answer_timeout):
                content = await connection.read()
        except TimeoutError:
            log.warning("%s opened a stream and did not join: closing the stream", connection.party)
            return
        while content is not None:
            connection.note_heard()
            # The worker may empty the inbox in its own thread at any time. Its first message schedules a
            # turn; a message behind others is taken in the turn that those have scheduled. So an inbox with
            # messages always has a turn to come, and at worst a turn finds the inbox empty.
            handler.inbox.append((connection, content))
            if len(handler.inbox) == 1:
                self._worker.do(handler.handle)
            # The client in this process needs no network, so it may well send far more than the others.
            if connection.party != LOCAL_CLIENT and (pause := self.vitals.heard(connection.client)):
                await asyncio.sleep(pause)
            content = await connection.read()

    def _deliver(
        self,
        contents: Sequence[tuple[Connection, bytes]],
        handled: Sequence[Connection],
        ends: Sequence[Connection],
    ) -> None:
        """Queue the worker's replies and return credit; runs on the event loop.

        Args:
            contents: what to send, and on which stream.
            handled: the stream of each message that the worker has handled.
            ends: streams to end once their outbox is empty.
        """
        for connection, content in contents:
            connection.send(content)
        for connection in handled:
            connection.note_handled()
        for connection in ends:
            connection.end()

    def _report_alarm(self, party: str, alarm: Alarm) -> None:
        """Log a new alarm. Refusals and expired requests are logged where they happen."""
        if alarm.kind not in ("refused", "silent"):
            log.warning("alarm: %s: %s (%s)", party, alarm.text, alarm.kind)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
