"""The simulator: the protocol's own objects, moved by discrete events on a virtual clock.

Simulated seconds cost nothing, and the seed fixes the whole history, byte for byte, but for noise that
protects records or labels, which is never seeded. Nothing of the algorithm is here: the simulator decides
only when a message arrives.
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
    """A client's way to the server or back: messages queue for the bandwidth, then take the latency."""

    def __init__(self, latency: float, bandwidth: float) -> None:
        self._latency, self._bandwidth = latency, bandwidth
        self._free_at = 0.0

    def arrival(self, now: float, nbytes: int) -> float:
        """When a message of that size, handed over now, arrives."""
        sending = nbytes / self._bandwidth if self._bandwidth else 0.0
        self._free_at = max(now, self._free_at) + sending
        return self._free_at + self._latency

    def cut(self) -> None:
        """The connection is broken: nothing waits to be sent any more."""
        self._free_at = 0.0


class Simulator:
    """Runs one server and its clients.

    Args:
        server, clients: the protocol's objects.
        delays: sleep times, links and drop-outs.
        seed: of the sleep times.
        codec: how messages travel; with other encodings than float32 they lose what they would lose on
            the wire, and are as short.
        local: the client that runs inside the server's process. Its messages use no network, so they are not
            counted as traffic.
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
        """Steps of the server so far: the global iteration."""
        return self.server.iteration

    @property
    def over(self) -> bool:
        """Whether no update can be made any more: too many clients have finished."""
        return self.server.over

    @property
    def losses(self) -> LossLog:
        return self.server.losses

    def advance(self) -> None:
        """Lets the next event happen.

        Raises:
            Stalled: no event is left, so nobody will ever act again.
        """
        if not self._events:
            raise Stalled(
                "VFL-6821",
                f"nothing can happen any more at {self.now:.2f} s: the server waits for "
                f"{self.server.waiting_for()}. {_REMEDY}",
            )
        self.now, _, event = heapq.heappop(self._events)
        event()

    @property
    def stalled(self) -> str:
        """Why no step will be made any more, although clients go on uploading; empty while one may be."""
        server = self.server
        if server.over or not server.fruitless:
            return ""
        if any(event.func == self._return or isinstance(event.args[0], Join) for _, _, event in self._events):
            return ""  # somebody comes back
        return f"the server waits for {server.waiting_for()}. {_REMEDY}"

    def settle(self) -> None:
        """The run is over: answers that are under way still arrive, and nobody acts on anything else."""
        answers = [entry for entry in self._events if entry[2].func == self._at_client]
        for _, _, answer in sorted(answers):
            message, life = answer.args
            if isinstance(message, Gradient) and life == self._lives[message.client]:
                self.clients[message.client].receive(message)
        self._events = [entry for entry in self._events if entry not in answers]

    def _at(self, time: float, event: Event) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _sleep(self, index: int) -> None:
        self._asleep[index] = True
        self._at(self._sleepers[index].wakes_at(self.now), partial(self._wake, index, self._lives[index]))

    def _wake(self, index: int, life: int) -> None:
        if life == self._lives[index]:
            self._asleep[index] = False
            self._say(index, self.clients[index].wake())

    def _say(self, index: int, messages: Sequence[ClientMessage]) -> None:
        """Sends what a client says; if it waits for no answer then, it goes to sleep."""
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
            return  # lost with the connection it was sent on
        for reply in self.server.receive(message):
            if reply.client in self.server.absent:
                continue  # nobody to send it to: the server keeps it for when the client is back
            index, nbytes = reply.client, self._codec.size(reply)
            if index != self._local:
                self.traffic[index].bytes_down += nbytes
            received = self._codec.as_received_by_client(reply)
            arrival = self._down[index].arrival(self.now, nbytes)
            self._at(arrival, partial(self._at_client, received, self._lives[index]))

    def _at_client(self, message: ServerMessage, life: int) -> None:
        if life != self._lives[message.client]:
            return
        if isinstance(message, Request):  # a slow client is slow to answer, too
            self._at(self._sleepers[message.client].wakes_at(self.now), partial(self._answer, message, life))
        else:
            self._say(message.client, self.clients[message.client].receive(message))

    def _answer(self, request: Request, life: int) -> None:
        if life == self._lives[request.client]:
            self._send(request.client, self.clients[request.client].receive(request))

    def _vanish(self, index: int) -> None:
        """What is under way to or from a client that vanishes is lost."""
        self._cut(index)
        self._at_server(Leave(index), self._lives[index])

    def _return(self, index: int) -> None:
        self._cut(index)
        self._asleep[index] = False
        self._send(index, [self.clients[index].join()])

    def _cut(self, index: int) -> None:
        self._lives[index] += 1
        self._up[index].cut()
        self._down[index].cut()
