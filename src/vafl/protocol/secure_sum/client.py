"""The client of a secure sum: it sends scores only under masks, which cancel in the sum over all clients.

Masks belong to a key epoch. In each epoch every client offers one public key, and the server relays all keys.
An epoch ends when a client that has offered a key leaves or joins again. The states of one client:

                       join(): epoch = -1, no masks
    +---------------------------------------------------------------+
    v                                                               |
    +--------+  wake(): send Offer(0)   +------------+  Keys(e):    +-----------+
    | NO KEY |------------------------->| OFFERED(e) |------------->| MASKED(e) |
    +--------+  Rekey(e): send Offer(e) +------------+  send the    +-----------+
                                         ^    |    ^    uploads in       |
                                         |    |    |    flight           |
                                         +----+    +---------------------+
                                    Rekey(e'), e' != e: send Offer(e')

join() leads to NO KEY from OFFERED, too. What the client does in each state:

    message or event     NO KEY, OFFERED                       MASKED
    upload (wake())      kept in flight; sent after Keys       MaskedUpload
    Request              ignored; the server repeats it        MaskedRefresh or Decline
                         once all keys are there
    Rekey of epoch e     Offer, unless e is already offered    the same

Invariants:

1. No score leaves the client without masks.
2. A key pair serves one agreement. Each Offer has a fresh key, and `KeyAgreement.agree` deletes the private
   key. So a server that repeats an epoch number cannot make a client use the same masks twice.
3. Within an epoch, masks of one purpose ("batch" or "evaluation") and number are used once. Two different
   scores under one mask would reveal their difference.
4. An upload that was in flight when an epoch ended is sent again in the next one: the same scores under other
   masks. The privacy budget is not charged again.
5. Keys of any other epoch than the one offered last are refused.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from vafl.arrays import Matrix, RowIds, Words
from vafl.errors import InvalidMessage
from vafl.protocol.client import Client, Flight
from vafl.protocol.messages import (
    ClientMessage,
    Evaluate,
    Join,
    Keys,
    MaskedRefresh,
    MaskedUpload,
    Offer,
    Rekey,
    Request,
    ServerMessage,
)
from vafl.protocol.prediction_client import PredictionClient


class Masks(Protocol):
    """The masks of one client in one epoch."""

    def hide(self, purpose: str, number: int, rows: RowIds, scores: Matrix) -> Words:
        """Return masked scores. Each purpose and number can be used once."""


class KeyAgreement(Protocol):
    """Makes the keys of one client and checks those of the others."""

    def offer(self, epoch: int) -> bytes:
        """Return a fresh public key and the proof that it belongs to this client."""

    def agree(self, epoch: int, offers: Sequence[bytes]) -> Masks:
        """Check that each offer comes from its client; return the masks that follow from all offers."""


class Masking(PredictionClient):
    """A client that answers requests only under masks.

    Args:
        keys: makes and checks keys.
    """

    def __init__(self, *others: Any, keys: KeyAgreement, **settings: Any) -> None:
        super().__init__(*others, **settings)
        self._keys = keys
        self._epoch = -1  # the epoch of the last key offered on this connection; -1 if none
        self._masks: Masks | None = None

    def join(self) -> Join:
        """Start a new connection. The keys of the last connection are void."""
        self._epoch, self._masks = -1, None
        return super().join()

    def _take(self, message: ServerMessage) -> list[ClientMessage]:
        if isinstance(message, Rekey):
            return self._offer(message.epoch)
        if isinstance(message, Keys):
            return self._agree(message)
        if isinstance(message, Request | Evaluate) and self._masks is None:
            return []  # The server repeats the request once all clients have keys.
        return super()._take(message)

    def _offer(self, epoch: int) -> list[ClientMessage]:
        """Drop the masks and offer a key for the epoch, unless this client has offered one for it."""
        if epoch == self._epoch:
            return []
        self._epoch, self._masks = epoch, None
        return [Offer(self.index, self._next(), epoch, self._keys.offer(epoch))]

    def _agree(self, keys: Keys) -> list[ClientMessage]:
        if keys.epoch != self._epoch:
            raise InvalidMessage(
                "VFL-4111",
                f"keys must be of epoch {self._epoch}. Found keys of epoch {keys.epoch}. This client has no "
                "key for that epoch.",
            )
        self._masks = self._keys.agree(keys.epoch, keys.offers)
        return []

    def _say_rows(self, rows: RowIds, embeddings: Matrix, request: int | None) -> list[ClientMessage]:
        if self._masks is None or request is None:
            return []
        words = self._masks.hide("evaluation", request, rows, embeddings)
        return [MaskedRefresh(self.index, self._next(), self._epoch, request, rows, words)]


class MaskedClient(Masking, Client):
    """A training client that sends scores only under masks."""

    def wake(self) -> list[ClientMessage]:
        """Begin an activation. The client offers its first key without a `Rekey`."""
        offer = self._offer(0) if self._epoch < 0 else []
        return [*offer, *super().wake()]

    def _agree(self, keys: Keys) -> list[ClientMessage]:
        super()._agree(keys)
        # Everything in flight was masked in an earlier epoch, or waits for its first masks.
        return [
            message
            for activation, flight in self._flights.items()
            for message in self._upload_of(activation, flight)
        ]

    def _answer(self, request: Request) -> list[ClientMessage]:
        """Refuse: training rows are summed in rounds only."""
        raise InvalidMessage(
            "VFL-4112",
            f"only held-out rows, from {self._schedule.rows} on, are summed outside rounds, when the server "
            f"evaluates. Found request {request.number}, which is for training rows.",
        )

    def _upload_of(self, activation: int, flight: Flight) -> list[ClientMessage]:
        """Return the masked upload, or nothing while there are no masks: `_agree` sends it then."""
        if self._masks is None:
            return []
        words = self._masks.hide("batch", activation, flight.rows, flight.embeddings)
        return [MaskedUpload(self.index, self._next(), self._epoch, activation, flight.rows, words)]
