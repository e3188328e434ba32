"""The requests of the server that its clients have not answered yet.

A request is a `Request` or an `Evaluate`. It is open until it is answered, declined, expired, or forgotten
because its client left or joined again:

    make ──> open ──answered──> closed
              │ │
              │ └──forget────> closed
              └──expire──> late ──answered or forget──> closed

No evaluation waits for a late request. Its answer is still valid when it comes: the server stores it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vafl.arrays import RowIds
from vafl.errors import InvalidMessage
from vafl.protocol.messages import Decline, Evaluate, Refresh, Request

Asked = Request | Evaluate


@dataclass(eq=False)
class Poll:
    """One evaluation, or one part of it: a request for the same rows to several clients.

    Attributes:
        requests: the messages to send, one per client.
        waiting: numbers of the requests that may still be answered in time.
        answered: the clients that have sent the rows.
    """

    requests: list[Evaluate]
    waiting: set[int] = field(default_factory=set)
    answered: set[int] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        """Return whether an answer may still come in time."""
        return bool(self.waiting)


@dataclass(frozen=True)
class Part:
    """Rows that one message asks for: training rows, or held-out rows."""

    rows: RowIds
    held_out: bool = False


class Requests:
    """Numbers requests, checks answers against them, and remembers which are open.

    Attributes:
        made: how many requests were made so far.
    """

    def __init__(self) -> None:
        self._open: dict[int, Asked] = {}
        self._late: dict[int, Asked] = {}
        self._polls: dict[int, Poll] = {}  # by the number of an open request
        self._later: dict[int, Sequence[Part]] = {}  # by request: the parts to ask for once it is answered
        self.made = 0

    @property
    def open(self) -> Mapping[int, Asked]:
        """The open requests by number, oldest first."""
        return self._open

    def make(self, client: int, rows: RowIds, *, permute: str = "") -> Request:
        """Open a new request for training rows, or for records to predict."""
        request = Request(client, self.made, rows, permute)
        self._add(request)
        return request

    def evaluate(self, client: int, rows: RowIds, best: int = -1, *, restore: bool = False) -> Evaluate:
        """Open a new request for held-out rows; `best` and `restore` are as in `Evaluate`."""
        request = Evaluate(client, self.made, rows, best, restore)
        self._add(request)
        return request

    def _add(self, request: Asked) -> None:
        self._open[request.number] = request
        self.made += 1

    def poll(self, clients: Iterable[int], rows: RowIds, best: int = -1, *, restore: bool = False) -> Poll:
        """Ask several clients for the same held-out rows."""
        poll = Poll([self.evaluate(client, rows, best, restore=restore) for client in clients])
        poll.waiting |= {request.number for request in poll.requests}
        self._polls |= dict.fromkeys(poll.waiting, poll)
        return poll

    def make_in_turn(self, client: int, parts: Sequence[Part]) -> list[Asked]:
        """Ask for the first part, and for each next one when the part before is `answered`.

        If all parts were asked for at once, the client could wait for the server to take its answers while
        the server waits for the client to take its questions.
        """
        if not parts:
            return []
        first = parts[0]
        request = (self.evaluate if first.held_out else self.make)(client, first.rows)
        self._later[request.number] = parts[1:]
        return [request]

    def answered(self, request: Asked, *, declined: bool = False) -> list[Asked]:
        """Close a request; return the requests to send next."""
        self._close(request, fulfilled=not declined)
        return self.make_in_turn(request.client, self._later.pop(request.number, ()))

    def expire(self, request: Asked) -> None:
        """Stop waiting for an open request. Its answer stays valid."""
        self._close(request, fulfilled=False)
        self._late[request.number] = request

    def forget(self, client: int) -> None:
        """Close every request to this client, and drop those that were to follow."""
        for request in [*self.of(client), *(late for late in self._late.values() if late.client == client)]:
            self._close(request, fulfilled=False)
            self._later.pop(request.number, None)

    def find(self, client: int, number: int | None) -> Asked:
        """Return the open or late request of that number; raise InvalidMessage if it is not this client's."""
        place = -1 if number is None else number
        request = self._open.get(place) or self._late.get(place)
        if request is None or request.client != client:
            raise InvalidMessage("VFL-4071", f"client {client} was not asked request {number}.")
        return request

    def of(self, client: int) -> list[Asked]:
        """Return this client's open requests, oldest first."""
        return [request for request in self._open.values() if request.client == client]

    def check(self, message: Refresh | Decline) -> Asked:
        """Return what the message answers; raise InvalidMessage unless it has exactly the rows asked for."""
        request = self.find(message.client, message.request)
        if isinstance(message, Refresh) and not np.array_equal(request.rows, message.rows):
            raise InvalidMessage(
                "VFL-4072", f"the answer to request {request.number} must hold exactly its rows."
            )
        return request

    def _close(self, request: Asked, *, fulfilled: bool) -> None:
        self._open.pop(request.number, None)
        self._late.pop(request.number, None)
        if poll := self._polls.pop(request.number, None):
            poll.waiting.discard(request.number)
            if fulfilled:
                poll.answered.add(request.client)
