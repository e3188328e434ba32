"""The worker's part of a run's server: decode messages, run the protocol, encode its replies.

    stream ──> inbox ──> Worker: handle() ──> the protocol's server ──> replies ──> `deliver` ──> streams
                             │                                            ^
                             └── after(): evaluations, checkpoints ───────┘

`Handler` runs in the server's `Worker`, one function at a time. The event loop fills the inbox and delivers
the replies. The handler reads `connections` and never changes it.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from vafl.arrays import Matrix
from vafl.errors import InvalidMessage
from vafl.names import LOCAL_CLIENT
from vafl.protocol.messages import ClientMessage, Join, Leave, Refresh, Refused, ServerMessage, Upload
from vafl.transport.codec import Codec
from vafl.transport.encodings import Frame
from vafl.transport.grpc.connection import Allowance, Connection
from vafl.transport.grpc.wire import MANY_VIOLATIONS
from vafl.transport.grpc.worker import HELD_BACK, Worker
from vafl.transport.settings import NetworkSettings
from vafl.transport.traffic import Traffic
from vafl.transport.vitals import Vitals

log = logging.getLogger("vafl.server")

_LOGGED = 1.0  # refusals of one party logged per second, after the first ten

Replies = list[tuple[Connection, ServerMessage]]
Deliver = Callable[[Sequence[tuple[Connection, bytes]], Sequence[Connection], Sequence[Connection]], None]


class StateMachine(Protocol):
    """The part of the protocol that the worker drives: its server, or its scorer."""

    iteration: int

    def is_under_way(self, client: int) -> bool:
        """Return whether this client has uploaded, so that only a process with its state may continue."""

    def receive(self, message: ClientMessage) -> list[ServerMessage]:
        """Process one message and return the replies to send, in order."""


Served = TypeVar("Served", bound=StateMachine)


class Refusals:
    """Counts refused messages and connections by party, and logs some of them.

    Args:
        counts: party -> the number of refusals so far.
    """

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self.counts = dict(counts or {})
        self._logged: dict[str, Allowance] = {}

    def count(self, party: str, fault: Exception) -> None:
        """Count a refusal. Limit how many are logged, so that a hostile party cannot fill the disk."""
        count = self.counts[party] = self.counts.get(party, 0) + 1
        if self._logged.setdefault(party, Allowance(_LOGGED)).take():
            log.warning("refused from %s (%d so far): %s", party, count, fault)


class Handler(Generic[Served]):
    """Pass the messages of all streams to the protocol's server, and its replies to the streams.

    Args:
        server: the protocol's server, or its scorer.
        worker: runs the methods of this object.
        connections: client -> its current stream. The event loop changes it.
        deliver: sends replies; called on the event loop with what to send and on which stream, the stream of
            each message that was handled, and streams to end once their outbox is empty.
        after: called after each batch of messages and on every tick; returns further messages to send.
        codec, settings: of the run.
        refusals, traffic, vitals: count what clients send.

    Attributes:
        inbox: messages that wait for `handle`, each with its stream. The event loop appends to it.
    """

    def __init__(
        self,
        server: Served,
        worker: Worker,
        connections: Mapping[int, Connection],
        deliver: Deliver,
        after: Callable[[], list[ServerMessage]],
        codec: Codec,
        settings: NetworkSettings,
        refusals: Refusals,
        traffic: Sequence[Traffic],
        vitals: Vitals,
    ) -> None:
        self.inbox: deque[tuple[Connection, bytes]] = deque()
        self._server, self._worker, self._connections = server, worker, connections
        self._deliver, self._after, self._codec, self._settings = deliver, after, codec, settings
        self._refusals, self._traffic, self._vitals = refusals, traffic, vitals
        self._allowances = [Allowance(settings.messages_per_second) for _ in traffic]

    def handle(self) -> int:
        """Handle all messages that have arrived and return their number.

        Replies of one turn to one client are sent as one message, which saves both ends most of the cost of a
        message. But replies wait at most `HELD_BACK` seconds of work for others. With a single client they
        do not wait at all, because the client would only idle until they arrive.
        """
        batch = []
        while self.inbox:
            batch.append(self.inbox.popleft())
        if not batch:
            return 0  # the previous turn has handled these messages
        replies: Replies = []
        handled: list[Connection] = []
        begin = self._worker.worked()
        for connection, content in batch:
            if handled and self._worker.worked() > begin + HELD_BACK:
                self._send(replies, handled)
                replies, handled, begin = [], [], self._worker.worked()
            try:
                frames = self._codec.frames(content)
            except InvalidMessage as fault:
                replies.append(self._refuse(connection, fault))
                frames = []
            for frame in frames:
                if replies and len(self._connections) == 1:
                    self._send(replies)
                    replies = []
                replies += self._receive(connection, frame)
            handled.append(connection)
        self._send(replies + self._addressed(self._after()), handled)
        return len(batch)

    def attend(self) -> int:
        """Send what `after` returns. Return 0, so that this does not count as a brief turn (see `Worker`)."""
        self._send(self._addressed(self._after()))
        return 0

    def leave(self, connection: Connection) -> None:
        """Tell the protocol that a client's stream has closed."""
        # The turn before this one may already have handled the Join of a newer stream, because a turn takes
        # everything in the inbox. A Leave now would then remove a client that is connected.
        newer = self._connections.get(connection.client)
        if newer is not None and newer.joined:
            return
        replies = self._server.receive(Leave(connection.client))
        # Call `after` at once: an evaluation may have been waiting for this client.
        self._send(self._addressed([*replies, *self._after()]))

    def _send(self, replies: Replies, handled: Sequence[Connection] = ()) -> None:
        """Encode replies, all for one client together, and pass them to the event loop."""
        by_connection: dict[Connection, list[ServerMessage]] = {}
        for connection, reply in replies:
            by_connection.setdefault(connection, []).append(reply)
        contents = [
            (connection, content)
            for connection, messages in by_connection.items()
            for content in self._codec.contents(messages)
        ]
        for connection, content in contents:
            if connection.party != LOCAL_CLIENT:
                self._traffic[connection.client].bytes_down += len(content)
        ends = [each for each in set(handled) if each.violations >= MANY_VIOLATIONS]
        if contents or handled:
            self._worker.tell(self._deliver, contents, handled, ends)

    def _addressed(self, replies: Sequence[ServerMessage]) -> Replies:
        """Pair each reply with its client's stream.

        Drop replies to clients that have not joined on their current stream. The protocol repeats what it
        owes a client after that client's Welcome.
        """
        addressed: Replies = []
        for reply in replies:
            connection = self._connections.get(reply.client)
            if connection is not None and connection.joined:
                addressed.append((connection, reply))
        return addressed

    def _receive(self, connection: Connection, frame: Frame) -> Replies:
        client = connection.client
        if self._connections.get(client) is not connection:
            return []  # a newer stream has replaced the one this frame came from
        if connection.party != LOCAL_CLIENT:
            self._traffic[client].bytes_up += len(frame)
            self._traffic[client].messages_up += 1
        try:
            if self._settings.messages_per_second:
                self._check_rate(connection)
            message = self._codec.from_client(frame, client)
            if isinstance(message, Join) is connection.joined:
                state = "after the join" if connection.joined else "before the join"
                raise InvalidMessage(
                    "VFL-6125",
                    "the first message of a stream must be Join, and no later one. Found "
                    f"{type(message).__name__} {state}.",
                )
            if isinstance(message, (Upload, Refresh)):
                self._check_size(client, message.embeddings)
            replies = self._server.receive(message)
        except InvalidMessage as fault:
            return [self._refuse(connection, fault)]
        connection.joined = True
        return self._addressed(replies)

    def _refuse(self, connection: Connection, fault: InvalidMessage) -> tuple[Connection, Refused]:
        self._refusals.count(connection.party, fault)
        self._vitals.refused(connection.client, str(fault))
        connection.violations += 1
        return connection, Refused(connection.client, str(fault))

    def _check_rate(self, connection: Connection) -> None:
        if not self._allowances[connection.client].take():
            limit = self._settings.messages_per_second
            raise InvalidMessage(
                "VFL-6126",
                f"a client may send at most {limit:g} messages a second (network.messages_per_second). Found "
                f"more from {connection.party}.",
            )

    def _check_size(self, client: int, embeddings: Matrix) -> None:
        """Raise InvalidMessage if embeddings exceed `largest_norm`, or the limit that the run has derived."""
        limit = self._settings.largest_norm
        if not limit:
            self._vitals.check(client, embeddings)
        elif len(embeddings):
            with np.errstate(over="ignore"):
                largest = float(np.linalg.norm(embeddings, axis=1).max())
            if largest > limit:
                raise InvalidMessage(
                    "VFL-6127",
                    f"an embedding's norm must be at most {limit:g} (network.largest_norm). Found "
                    f"{largest:g}. Check the features and the step size of this client.",
                )
