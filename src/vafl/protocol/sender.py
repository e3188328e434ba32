"""Make the messages that carry a client's embeddings: plain ones here, masked ones in secure_sum/sender.py.

A client decides which rows it embeds and may send. Its `Sender` numbers the messages of a connection, and
makes those that carry embeddings.
"""

from abc import ABC, abstractmethod

from vafl.arrays import Matrix, RowIds
from vafl.protocol.messages import ClientMessage, Keys, Refresh, Rekey, Upload, made_here


class Sender(ABC):
    """Numbers a client's messages, and makes the messages with embeddings.

    Args:
        index: the number of the client.

    Attributes:
        summed: whether the server can read only sums over all clients. The client then answers a request for
            all of its rows or for none.
        sequence: the number of the message made last on this connection; 0 if there was none.
    """

    summed: bool

    def __init__(self, index: int) -> None:
        self.index = index
        self.sequence = 0

    def restart(self) -> None:
        """Start a new connection. Sequence numbers begin again."""
        self.sequence = 0

    def number(self) -> int:
        """Return the next sequence number of this connection."""
        self.sequence += 1
        return self.sequence

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Return whether embeddings can be sent now. If not, the client ignores requests."""

    @abstractmethod
    def begin(self) -> list[ClientMessage]:
        """Return what the client sends before the uploads of an activation."""

    @abstractmethod
    def rekey(self, message: Rekey | Keys) -> list[ClientMessage]:
        """Take a message about keys; return the messages to send.

        Raises:
            InvalidMessage: the keys are not valid. The state has not changed.
        """

    @abstractmethod
    def upload(
        self, activation: int, rows: RowIds, embeddings: Matrix, *, answer: bool, in_flight: int
    ) -> list[ClientMessage]:
        """Return the upload of an activation; nothing while the sender is not `ready`.

        `answer` and `in_flight` are as in `Upload`.
        """

    @abstractmethod
    def refresh(
        self, rows: RowIds, embeddings: Matrix, request: int | None, *, in_flight: int = 0
    ) -> list[ClientMessage]:
        """Return embeddings of other rows, or the answer to `request`. The arguments are as in `Refresh`."""


class PlainSender(Sender):
    """Sends embeddings as they are."""

    summed = False
    ready = True

    def begin(self) -> list[ClientMessage]:
        return []

    def rekey(self, message: Rekey | Keys) -> list[ClientMessage]:
        """Ignore keys: a plain client has none."""
        return []

    def upload(
        self, activation: int, rows: RowIds, embeddings: Matrix, *, answer: bool, in_flight: int
    ) -> list[ClientMessage]:
        number = self.number()
        with made_here():
            return [Upload(self.index, number, activation, rows, embeddings, answer, in_flight)]

    def refresh(
        self, rows: RowIds, embeddings: Matrix, request: int | None, *, in_flight: int = 0
    ) -> list[ClientMessage]:
        number = self.number()
        with made_here():
            return [Refresh(self.index, number, rows, embeddings, request, in_flight)]
