"""A discrete-event simulator that runs the protocol's server and clients on a virtual clock.

Simulated seconds take no real time. The seed determines the whole history, byte for byte, except for the
noise that protects records or labels, which is never seeded. The simulator only decides when messages arrive.
The algorithm is in vafl.protocol.

Events are in a heap, ordered by time and then by creation:

    _wake          a client's sleep ends: it begins an activation
    _at_server     a client's message arrives: the replies travel back
    _at_client     a reply arrives: the client handles it, and sleeps unless it waits for an answer
    _answer        a client answers a request, after a pause like that between activations
    _vanish        a client drops out: messages in transit, and its sleep, are lost
    _return        a client comes back and sends Join

A client has a new life each time it vanishes or returns. Events carry the life they belong to, and are
ignored when the client is in a later one. So nothing has to be removed from the heap.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from functools import partial

from vafl.errors import Stalled
from vafl.protocol.client import Client
from vafl.protocol.losslog import LossLog
from vafl.protocol.messages import ClientMessage, Gradient, Join, Leave, Request, ServerMessage
from vafl.protocol.server import Server
from vafl.simulation.delays import DelaySettings
from vafl.transport.codec import Codec
from vafl.transport.traffic import Traffic

Event = partial[None]
_REMEDY = (
    'Let the client come back, lower rule.t, or set rule.when_unanswered to "skip", or to "use" if that '
    "does not help."
)


class Link:
    """One direction of a client's link: messages queue for the bandwidth, then take the latency."""

    def __init__(self, latency: float, bandwidth: float) -> None:
        self._latency, self._bandwidth = latency, bandwidth
        self._free_at = 0.0

    def arrival(self, now: float, nbytes: int) -> float:
        """Return when a message of this size, sent now, arrives."""
        sending = nbytes / self._bandwidth if self._bandwidth else 0.0
        self._free_at = max(now, self._free_at) + sending
        return self._free_at + self._latency

    def cut(self) -> None:
        """Break the connection and drop the queue."""
        self._free_at = 0.0


class Simulator:
    """Runs one server and its clients.

    Args:
        server, clients: the protocol's objects.
        delays: sleep times, links and drop-outs.
        seed: the seed of the sleep times.
        codec: the encoding of messages, which determines their sizes. Encodings with less precision than
            float32 round the values as they do on a network.
        local: the client that runs in the server's process. Its messages do not count as traffic, because
            they use no network.

    Attributes:
        now: the virtual time in seconds.
        traffic: bytes and messages of each client.
    """

    def __init__(
        self,
        server: Server,
        clients: Sequence[Client],
        delays: DelaySettings,
        seed: int,
        codec: Codec | None = None,
        local: int | None = None,
    ) -> None:
        self._codec, self._local = codec or Codec(), local
        self.server, self.clients = server, list(clients)
        self.now = 0.0
        self.traffic = [Traffic() for _ in clients]
        self._sleepers = delays.clock(len(self.clients), seed)
        self._up = [Link(delays.latency, delays.bandwidth) for _ in clients]
        self._down = [Link(delays.latency, delays.bandwidth) for _ in clients]
        self._lives = [0] * len(self.clients)
        self._asleep = [False] * len(self.clients)
        self._events: list[tuple[float, int, Event]] = []
        self._order = itertools.count()
        for client in self.clients:
            self._sleep(client.index)
        for dropout in delays.dropouts:
            self._at(dropout.start, partial(self._vanish, dropout.client - 1))
            if dropout.end < math.inf:
                self._at(dropout.end, partial(self._return, dropout.client - 1))

    @property
    def updates(self) -> int:
        """Return the number of server steps so far, which is the global iteration."""
        return self.server.iteration

    @property
    def over(self) -> bool:
        """Return whether no further step is possible, because clients have finished or declined."""
        return self.server.over

    @property
    def losses(self) -> LossLog:
        """Return the losses of the server's steps."""
        return self.server.losses

    def advance(self) -> None:
        """Process the next event.

        Raises:
            Stalled: no event is left, so the run cannot continue.
        """
        if not self._events:
            raise Stalled(
                "VFL-6821",
                f"the run is stalled at {self.now:.2f} s, because every party waits for another. The server "
                f"waits for {self.server.waiting_for()}. {_REMEDY}",
            )
        self.now, _, event = heapq.heappop(self._events)
        event()

    @property
    def stalled(self) -> str:
        """Return why no step will follow, although clients go on uploading; empty while one is possible."""
        server = self.server
        if server.over or not server.fruitless:
            return ""
        if any(event.func == self._return or isinstance(event.args[0], Join) for _, _, event in self._events):
            return ""  # A client will come back, and its embeddings may allow a step.
        return f"the server waits for {server.waiting_for()}. {_REMEDY}"

    def settle(self) -> None:
        """End the run: deliver the gradients in transit, and drop all other messages to clients."""
        answers = [entry for entry in self._events if entry[2].func == self._at_client]
        for _, _, answer in sorted(answers):
            message, life = answer.args
            if isinstance(message, Gradient) and life == self._lives[message.client]:
                self.clients[message.client].receive(message)
        self._events = [entry for entry in self._events if entry not in answers]

    def _at(self, time: float, event: Event) -> None:
        # The counter orders events of the same time by their creation. It also keeps the heap from comparing
        # the events themselves, which have no order.
        heapq.heappush(self._events, (time, next(self._order), event))

    def _sleep(self, index: int) -> None:
        """Let a client sleep until its next activation."""
        self._asleep[index] = True
        self._at(self._sleepers[index].wakes_at(self.now), partial(self._wake, index, self._lives[index]))

    def _wake(self, index: int, life: int) -> None:
        if life == self._lives[index]:
            self._asleep[index] = False
            self._send_and_sleep(index, self.clients[index].wake())

    def _send_and_sleep(self, index: int, messages: Sequence[ClientMessage]) -> None:
        """Send a client's messages; let it sleep unless it waits for an answer."""
        self._send(index, messages)
        if not (self.clients[index].waiting or self._asleep[index]):
            self._sleep(index)

    def _send(self, index: int, messages: Sequence[ClientMessage]) -> None:
        traffic, link = self.traffic[index], self._up[index]
        for message in messages:
            nbytes = self._codec.size(message)
            if index != self._local:
                traffic.bytes_up += nbytes
                traffic.messages_up += 1
            received = self._codec.as_received_by_server(message)
            arrival = link.arrival(self.now, nbytes)
            self._at(arrival, partial(self._at_server, received, self._lives[index]))

    def _at_server(self, message: ClientMessage, life: int) -> None:
        if life != self._lives[message.client]:
            return  # The connection broke while the message was in transit.
        for reply in self.server.receive(message):
            if reply.client in self.server.absent:
                continue  # The server keeps answers for absent clients, and repeats them at Join.
            index, nbytes = reply.client, self._codec.size(reply)
            if index != self._local:
                self.traffic[index].bytes_down += nbytes
            received = self._codec.as_received_by_client(reply)
            arrival = self._down[index].arrival(self.now, nbytes)
            self._at(arrival, partial(self._at_client, received, self._lives[index]))

    def _at_client(self, message: ServerMessage, life: int) -> None:
        if life != self._lives[message.client]:
            return
        if isinstance(message, Request):  # A client that is slow to activate is slow to answer, too.
            self._at(self._sleepers[message.client].wakes_at(self.now), partial(self._answer, message, life))
        else:
            self._send_and_sleep(message.client, self.clients[message.client].receive(message))

    def _answer(self, request: Request, life: int) -> None:
        if life == self._lives[request.client]:
            self._send(request.client, self.clients[request.client].receive(request))

    def _vanish(self, index: int) -> None:
        """Drop a client out, and tell the server. All messages in transit to and from the client are lost."""
        self._cut(index)
        self._at_server(Leave(index), self._lives[index])

    def _return(self, index: int) -> None:
        self._cut(index)
        self._asleep[index] = False
        self._send(index, [self.clients[index].join()])

    def _cut(self, index: int) -> None:
        # Events of the old life stay in the heap, and are ignored when their time comes.
        self._lives[index] += 1
        self._up[index].cut()
        self._down[index].cut()
