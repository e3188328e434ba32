"""What the server has asked of its clients and not yet got."""

import torch
from torch import Tensor

from vafl.errors import InvalidMessage
from vafl.protocol.messages import Decline, Refresh, Request


class Requests:
    """Numbers requests, checks answers against them, and remembers what is open.

    Attributes:
        made: how many there have been.
    """

    def __init__(self) -> None:
        self._open: dict[int, Request] = {}
        self.made = 0

    def make(self, client: int, rows: Tensor, best: int = -1, *, back: bool = False) -> Request:
        """A new open request."""
        request = Request(client, self.made, rows, best, back)
        self._open[request.number] = request
        self.made += 1
        return request

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

    def check(self, message: Refresh | Decline) -> None:
        """Raises InvalidMessage unless the message answers something that client was asked."""
        request = self.find(message.client, message.request)
        if isinstance(message, Refresh) and not torch.equal(request.rows, message.rows):
            raise InvalidMessage(f"the answer to request {request.number} must hold exactly its rows.")

    def close(self, number: int) -> None:
        self._open.pop(number, None)

    def clients(self) -> list[int]:
        """Who has something to answer."""
        return sorted({request.client for request in self._open.values()})
