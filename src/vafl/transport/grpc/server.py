"""The server's end: streams in, one worker that owns the protocol's server, streams out.

The event loop moves bytes, and has the worker do the rest. What arrives while that is busy is handled
together at its next turn. What a client may have queued, either way, is bounded, so a fast client waits for
the server, not the server's memory for the client.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio
import numpy as np

from vafl.errors import InvalidMessage, RemoteFault
from vafl.names import LOCAL_CLIENT
from vafl.protocol.messages import (
    ClientMessage,
    Join,
    Leave,
    Refresh,
    Refused,
    ServerMessage,
    Stop,
    Upload,
)
from vafl.protocol.rows import Matrix
from vafl.transport.codec import Codec
from vafl.transport.encodings import Frame
from vafl.transport.grpc.connection import Allowance, Connection, arrival, identify, listen, next_message
from vafl.transport.grpc.local import LocalCall, Metadata, ServerStream
from vafl.transport.grpc.wire import MANY_VIOLATIONS, METHOD, SERVICE, Agreement, channel_options
from vafl.transport.grpc.worker import HELD_BACK, Worker
from vafl.transport.identity import Credentials
from vafl.transport.settings import NetworkSettings
from vafl.transport.traffic import Traffic
from vafl.transport.vitals import Alarm, Vitals

log = logging.getLogger("vafl.server")

_TICK = 0.25
_STRANGER = "(unadmitted)"  # whose refusals are counted together, whatever they call themselves
_SILENCE = 15.0  # seconds the server may wait for clients to join without saying so again
_REPLACED = (
    "another process has taken this party's place. A party is one process at a time: end the other, then "
)
_RESUME = (  # of training, which has checkpoints: remedies for a process that was replaced, and for a new one
    "start this one again with --resume.",
    "Add --resume to go on from its last checkpoint, or --replace to take its place without one.",
)
_REPLACE = (  # likewise, where a trained model is used
    "start this one again.",
    "End the other process, or add --replace to take its place.",
)
_LOGGED = 1.0  # refusals of one party that are logged a second, after the first ten

Replies = list[tuple[Connection, ServerMessage]]


class StateMachine(Protocol):
    """What is served: the protocol's server, or its scorer."""

    absent: set[int]
    iteration: int

    def is_under_way(self, client: int) -> bool:
        """Whether this client has uploaded: a process that knows nothing of that must not go on for it."""

    def receive(self, message: ClientMessage) -> list[ServerMessage]:
        """Takes one message and gives the replies that follow from it, in order."""


Served = TypeVar("Served", bound=StateMachine)


class FederationServer(Generic[Served]):
    """Serves one run until it is over.

    Args:
        server: the protocol's server, or its scorer.
        parties: the clients' names, in the order of the table's columns.
        terms: what every party must agree on.
        settings: address, limits, patience.
        credentials: the server's certificate, or None for plaintext on loopback.
        after: called by the worker after each batch of messages; gives more to send, and may
            call `finish`.
    """

    def __init__(
        self,
        server: Served,
        parties: Sequence[str],
        terms: Agreement,
        settings: NetworkSettings,
        credentials: Credentials | None,
        after: Callable[["FederationServer[Served]"], list[ServerMessage]],
    ) -> None:
        self.server, self.parties = server, list(parties)
        server.absent = set(range(len(self.parties)))  # until they join
        self.traffic = [Traffic() for _ in parties]
        self.violations: dict[str, int] = {}
        self._logged: dict[str, Allowance] = {}
        self.connections: dict[int, Connection] = {}
        self._instances: dict[int, str] = {}  # the process that each client was last
        self._replaced: deque[str] = deque(maxlen=1000)  # processes whose place another one has taken
        self.seen: set[int] = set()
        self.missing_at_start: list[str] = []  # clients that had not connected when the run began
        self.began: float | None = None
        self._earlier = 0.0
        self._terms, self._settings, self._credentials, self._after = terms, settings, credentials, after
        self._codec = Codec(settings.encoding, settings.largest_message)
        self.vitals = Vitals(self.parties, self._report_alarm, time.monotonic)
        self._allowances = [Allowance(settings.messages_per_second) for _ in parties]
        self._inbox: deque[tuple[Connection, bytes]] = deque()
        self._everybody = asyncio.Event()
        self._over = asyncio.Event()
        self._dismissed: set[int] = set()
        self._reason, self._failed = "", False
        self._failure: Exception | None = None
        remedies = _REPLACE if terms.model else _RESUME
        self._replaced_reason, self._taken_remedy = _REPLACED + remedies[0], remedies[1]
        self._away = 3 * settings.heartbeat  # seconds in which a client without a stream may hear the end

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return self._earlier + (time.monotonic() - self.began if self.began is not None else 0.0)

    @property
    def updates(self) -> int:
        return self.server.iteration

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, with a result or without."""
        return self._over.is_set()

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Bytes that clients have sent, and that were sent to them, over the network.

        The label holder's own client runs inside this process, so its messages are not counted.
        """
        return (
            sum(traffic.bytes_up for traffic in self.traffic),
            sum(traffic.bytes_down for traffic in self.traffic),
        )

    @property
    def to_come(self) -> str:
        """The clients that the run has yet to begin with, in words; nobody once it has."""
        missing = (name for index, name in enumerate(self.parties) if index not in self.seen)
        return ", ".join(missing) if self.began is None else ""

    def silence(self, client: int) -> float:
        """Seconds for which a connected client has been silent; 0 up to a heartbeat, and outside the run.

        gRPC does not tell when a ping goes unanswered: it ends the connection after three heartbeats. So this
        counts messages of the run. A client that computes for long is silent, too. The client inside this
        process is never silent: it only keeps the pace of the others.
        """
        connection = self.connections.get(client)
        if connection is None or self.began is None or self.is_over or connection.party == LOCAL_CLIENT:
            return 0.0
        seconds = min(connection.silence, time.monotonic() - self.began)
        return seconds if seconds > self._settings.heartbeat else 0.0

    def account(self) -> dict[str, Any]:
        """What the run has taken so far, in plain values, for a checkpoint."""
        traffic = [asdict(each) for each in self.traffic]
        return {"seconds": self.now, "traffic": traffic, "violations": dict(self.violations)}

    def resume(self, account: Mapping[str, Any]) -> None:
        """Goes on counting from a checkpoint."""
        self._earlier = account["seconds"]
        self.traffic = [Traffic(**each) for each in account["traffic"]]
        self.violations = dict(account["violations"])

    async def serve(self, listening: Callable[[str], None] = lambda address: None) -> None:
        """Listens, serves until `finish` is called or the protocol fails, then says goodbye."""
        server = grpc.aio.server(options=channel_options(self._settings))
        handler = grpc.stream_stream_rpc_method_handler(self._stream)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        self._loop = asyncio.get_running_loop()
        address = listen(server, self._settings, self._credentials)
        await server.start()
        self._worker = Worker(self.fail)
        listening(address)
        others = [asyncio.create_task(self._open()), asyncio.create_task(self._tick())]
        try:
            await self._over.wait()
        finally:
            for task in others:
                task.cancel()
            await self._goodbye()
            await self._worker.stop()
            await server.stop(grace=1.0)
        if self._failure:
            raise self._failure

    def finish(self, reason: str, *, failed: bool = False) -> None:
        """Ends the run, with a result or (`failed`) without; may be called from any thread."""
        if not self._reason:
            self._reason, self._failed = reason, failed
        self._loop.call_soon_threadsafe(self._over.set)

    def fail(self, error: Exception, reason: str = "the server failed; its log says why") -> None:
        """Ends the run without a result, unless it is over: `serve` raises the error, whose words may be of
        the server's own files; clients are told the reason. Called on the event loop."""
        if self._over.is_set():
            log.error("the run was over already when this came: %r", error)
            return
        self._failure, self._reason, self._failed = error, reason, True
        self._over.set()

    def attend(self) -> None:
        """Has `after` called soon, though no message has come; called on the event loop."""
        self._worker.do(self._attend)

    async def _open(self) -> None:
        """Waits for every client to join once, but not for ever, and starts the run's clock."""
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
            "starting without %s: no connection within %g s (network.join_timeout). Nothing is learnt from a "
            "missing party's data. It is taken in if it connects later: start it now, or stop this run and "
            "raise network.join_timeout",
            ", ".join(self.missing_at_start),
            self._settings.join_timeout,
        )

    async def _tick(self) -> None:
        """Lets the worker look at the clock now and then, whether messages come or not."""
        while True:
            await asyncio.sleep(_TICK)
            self.attend()

    async def _goodbye(self) -> None:
        """Tell every client that the run is over, and let it close its stream.

        A connected client has `answer_timeout` seconds for that. A client that has lost its connection may
        come back within three heartbeats.
        """
        for connection in list(self.connections.values()):
            self._dismiss(connection)
        if late := [self.parties[client] for client in sorted(self.seen - self._dismissed)]:
            log.info("the run is over; %s may come back to hear it for %.0f s", ", ".join(late), self._away)
        over = time.monotonic()
        while (self.connections and time.monotonic() < over + self._settings.answer_timeout) or (
            self.seen - self._dismissed and time.monotonic() < over + self._away
        ):
            await asyncio.sleep(0.02)

    def _dismiss(self, connection: Connection) -> None:
        self._dismissed.add(connection.client)
        stop = Stop(connection.client, self._reason, failed=self._failed)
        connection.outbox.put(self._codec.encode(stop))

    # --- one client's stream ---

    async def _stream(self, _: object, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        await self._converse(context)

    def connect(self, metadata: Metadata) -> LocalCall:
        """Connect the client that runs inside this process; called on the event loop that serves."""
        return LocalCall(self._converse, metadata)

    async def _converse(self, context: ServerStream) -> None:
        connection = await self._admit(context)
        client = connection.client
        self._take_place(connection)
        log.info("%s is here", connection.party)
        if self._over.is_set():
            self._dismiss(connection)
        end = connection.expire(self._settings.answer_timeout)
        parts = self._write(connection, context), self._read(connection, context), end
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            if self.connections.get(client) is connection:
                del self.connections[client]
                log.info("%s is gone", connection.party)
                self._worker.do(partial(self._forget, connection))

    def _take_place(self, connection: Connection) -> None:
        """Make this its client's stream. An older one is dead, or belongs to another process of the same
        party, which is told not to dial again."""
        known = self._instances.get(connection.client, connection.instance)
        if known != connection.instance:
            self._replaced.append(known)
        self._instances[connection.client] = connection.instance
        if older := self.connections.get(connection.client):
            log.warning("%s is here again: its older stream ends, and whoever is on it", connection.party)
            older.outbox.clear()  # nothing in it is worth its memory any more
            older.outbox.put(self._codec.encode(Refused(connection.client, self._replaced_reason)))
            older.end()
        self.connections[connection.client] = connection

    async def _admit(self, context: ServerStream) -> Connection:
        """Who is it, and do we agree on the run?"""
        party = _STRANGER
        try:
            named = identify(context, self._credentials)
            if named not in self.parties:
                raise InvalidMessage(
                    "VFL-6121", f'"{named}" is no client of this run. Its clients: {", ".join(self.parties)}.'
                )
            party = named
            terms = Agreement.from_bytes(
                await asyncio.wait_for(next_message(context), self._settings.heartbeat)
            )
            if difference := self._terms.difference(terms):
                raise InvalidMessage(
                    "VFL-6122", f"the parties must agree on the run's terms. Different: {difference}."
                )
            instance, takes_over = arrival(context)
            if instance in self._replaced:
                raise InvalidMessage("VFL-6123", self._replaced_reason)
            if not takes_over and not self._over.is_set():
                self._require_free_place(party, instance)
        except RemoteFault as fault:
            self._count(party, fault)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(fault))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the terms did not come in time")
        return Connection(self.parties.index(party), party, instance)

    def _require_free_place(self, party: str, instance: str) -> None:
        """Raise InvalidMessage if a new process would push another one of its party out of the run."""
        client = self.parties.index(party)
        here, known = client in self.connections, self._instances.get(client)
        if known == instance or not (here or self.server.is_under_way(client)):
            return
        found = "another process that is connected" if here else "uploads of an earlier process"
        raise InvalidMessage(
            "VFL-6124",
            f"a party is one process at a time. Found {found} in the place of {party}. {self._taken_remedy}",
        )

    async def _read(self, connection: Connection, context: ServerStream) -> None:
        """Hand frames on, as many at a time as the client has credit: the rest waits on its own side.

        The join must come within `answer_timeout`, since evaluations wait for clients about to join.
        """
        self.seen.add(connection.client)
        if len(self.seen) == len(self.parties):
            self._everybody.set()
        await self._everybody.wait()
        try:
            content = await asyncio.wait_for(next_message(context), self._settings.answer_timeout)
        except TimeoutError:
            log.warning("%s opened a stream and did not join: the stream is closed", connection.party)
            return
        while content:
            await connection.credit.take()  # given back when the worker has handled it
            connection.note_heard()
            self._inbox.append((connection, content))
            if len(self._inbox) == 1:  # else the worker has yet to take the others, and takes this with them
                self._worker.do(self._handle)
            # The client in this process may be faster than any network lets the others be.
            if connection.party != LOCAL_CLIENT and (pause := self.vitals.heard(connection.client)):
                await asyncio.sleep(pause)
            content = await next_message(context)

    async def _write(self, connection: Connection, context: ServerStream) -> None:
        while (content := await connection.outbox.take()) is not None:
            await context.write(content)
            connection.give_credit()

    def _deliver(
        self,
        contents: Sequence[tuple[Connection, bytes]],
        handled: Sequence[Connection],
        ends: Sequence[Connection],
    ) -> None:
        for connection, content in contents:
            connection.note_sent()
            connection.outbox.put(content)
        for connection in handled:
            connection.handled += 1
            connection.unhandled -= 1
            connection.give_credit()
        for connection in ends:
            connection.end()

    # --- the worker's part ---

    def _handle(self) -> int:
        """Takes all that has arrived; gives how much. What follows is said together, which spares both ends
        much of the work; but little is held back for others to be handled, and nothing if there is one client
        only."""
        batch = []
        while self._inbox:
            batch.append(self._inbox.popleft())
        if not batch:
            return 0  # the turn before took what this one was meant for
        replies: Replies = []
        handled: list[Connection] = []
        begin = self._worker.worked()
        for connection, content in batch:
            if handled and self._worker.worked() > begin + HELD_BACK:
                self._say(replies, handled)
                replies, handled, begin = [], [], self._worker.worked()
            try:
                frames = self._codec.frames(content)
            except InvalidMessage as fault:
                replies.append(self._refuse(connection, fault))
                frames = []
            for frame in frames:
                if replies and len(self.connections) == 1:
                    self._say(replies)
                    replies = []
                replies += self._receive(connection, frame)
            handled.append(connection)
        self._say(replies + self._addressed(self._after(self)), handled)
        return len(batch)

    def _attend(self) -> int:
        """Says what is due, whether messages come or not."""
        self._say(self._addressed(self._after(self)))
        return 0

    def _forget(self, connection: Connection) -> None:
        newer = self.connections.get(connection.client)
        if newer is not None and newer.joined:  # it was heard with what had come before this stream ended
            return
        left = self.server.receive(Leave(connection.client))
        self._say(self._addressed([*left, *self._after(self)]))  # somebody may have waited for that client

    def _say(self, replies: Replies, handled: Sequence[Connection] = ()) -> None:
        """Hands replies to the streams: all that go to one client as one message."""
        together: dict[Connection, list[ServerMessage]] = {}
        for connection, reply in replies:
            together.setdefault(connection, []).append(reply)
        contents = [
            (connection, content)
            for connection, own in together.items()
            for content in self._codec.contents(own)
        ]
        for connection, content in contents:
            if connection.party != LOCAL_CLIENT:
                self.traffic[connection.client].bytes_down += len(content)
        ends = [each for each in set(handled) if each.violations >= MANY_VIOLATIONS]
        if contents or handled:
            self._worker.tell(self._deliver, contents, handled, ends)

    def _addressed(self, replies: Sequence[ServerMessage]) -> Replies:
        """Each reply with the stream it goes to. Who has not joined on its stream is sent nothing yet:
        what it is owed follows its welcome."""
        found: Replies = []
        for reply in replies:
            stream = self.connections.get(reply.client)
            if stream is not None and stream.joined:
                found.append((stream, reply))
        return found

    def _receive(self, connection: Connection, frame: Frame) -> Replies:
        client = connection.client
        if self.connections.get(client) is not connection:
            return []  # left over from a stream that a newer one has replaced
        if connection.party != LOCAL_CLIENT:
            self.traffic[client].bytes_up += len(frame)
            self.traffic[client].messages_up += 1
        try:
            if self._settings.messages_per_second:
                self._check_rate(connection)
            message = self._codec.from_client(frame, client)
            if isinstance(message, Join) is connection.joined:
                raise InvalidMessage("VFL-6125", "a stream's first message is a join, and no other is.")
            if isinstance(message, (Upload, Refresh)):
                self._check_size(client, message.embeddings)
            replies = self.server.receive(message)
        except InvalidMessage as fault:
            return [self._refuse(connection, fault)]
        connection.joined = True
        return self._addressed(replies)

    def _refuse(self, connection: Connection, fault: InvalidMessage) -> tuple[Connection, Refused]:
        self._count(connection.party, fault)
        self.vitals.refused(connection.client, str(fault))
        connection.violations += 1
        return connection, Refused(connection.client, str(fault))

    def _check_rate(self, connection: Connection) -> None:
        if not self._allowances[connection.client].take():
            limit = self._settings.messages_per_second
            raise InvalidMessage(
                "VFL-6126", f"at most {limit:g} messages a second. Found more from {connection.party}."
            )

    def _check_size(self, client: int, embeddings: Matrix) -> None:
        """Raise InvalidMessage if embeddings are beyond the limit: the one set, or the run's own."""
        limit = self._settings.largest_norm
        if not limit:
            self.vitals.check(client, embeddings)
        elif len(embeddings):
            with np.errstate(over="ignore"):
                largest = float(np.linalg.norm(embeddings, axis=1).max())
            if largest > limit:
                raise InvalidMessage(
                    "VFL-6127", f"an embedding's norm must be at most {limit:g}. Found {largest:g}."
                )

    def _report_alarm(self, party: str, alarm: Alarm) -> None:
        """Log an alarm that goes on. Refusals and deadlines have log lines of their own."""
        if alarm.kind not in ("refused", "silent"):
            log.warning("alarm: %s: %s (%s)", party, alarm.text, alarm.kind)

    def _count(self, party: str, fault: Exception) -> None:
        """Every refusal is counted; not every one is logged, or a hostile party could fill the disk."""
        count = self.violations[party] = self.violations.get(party, 0) + 1
        if self._logged.setdefault(party, Allowance(_LOGGED)).take():
            log.warning("refused from %s (%d so far): %s", party, count, fault)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
