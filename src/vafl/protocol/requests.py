"""What the server has asked of its clients and not yet got."""

from collections.abc import Sequence

import numpy as np

from vafl.errors import InvalidMessage
from vafl.protocol.messages import Decline, Refresh, Request
from vafl.protocol.rows import Rows


class Requests:
    """Numbers requests, checks answers against them, and remembers what is open.

    Attributes:
        made: how many there have been.
    """

    def __init__(self) -> None:
        self._open: dict[int, Request] = {}
        self._later: dict[int, Sequence[Rows]] = {}  # by request: rows to ask for once it is answered
        self.made = 0

    def make(self, client: int, rows: Rows, best: int = -1, *, back: bool = False) -> Request:
        """A new open request."""
        request = Request(client, self.made, rows, best, back)
        self._open[request.number] = request
        self.made += 1
        return request

    def make_in_turn(self, client: int, parts: Sequence[Rows]) -> list[Request]:
        """Asks for the first of these; for the next once that is `answered`. Asked for all at once, a client
        could wait for the server to take its answers, and the server for it to take the questions."""
        if not parts:
            return []
        request = self.make(client, parts[0])
        self._later[request.number] = parts[1:]
        return [request]

    def answered(self, request: Request) -> list[Request]:
        """Closes it; gives what is to be asked next."""
        self._open.pop(request.number)
        return self.make_in_turn(request.client, self._later.pop(request.number, ()))

    def forget(self, client: int) -> None:
        """Whatever this client was asked, or was to be asked, it will not answer."""
        for request in self.of(client):
            self._open.pop(request.number)
            self._later.pop(request.number, None)

    def is_open(self, number: int) -> bool:
        return number in self._open

    def find(self, client: int, number: int | None) -> Request:
        """What this client was asked and has not answered; raises InvalidMessage if it was not asked that."""
        request = self._open.get(-1 if number is None else number)
        if request is None or request.client != client:
            raise InvalidMessage(f"client {client} was not asked request {number}.")
        return request

    def of(self, client: int) -> list[Request]:
        """What this client was asked and has not answered, oldest first."""
        return [request for request in self._open.values() if request.client == client]

    def check(self, message: Refresh | Decline) -> Request:
        """What the message answers; raises InvalidMessage unless it does, with exactly the rows asked for."""
        request = self.find(message.client, message.request)
        if isinstance(message, Refresh) and not np.array_equal(request.rows, message.rows):
            raise InvalidMessage(f"the answer to request {request.number} must hold exactly its rows.")
        return request
