"""The client's part of a secure sum: it sends scores only under masks that cancel in the sum of all clients.

Masks belong to a key epoch. In each epoch every client offers one public key, and the server relays all keys.
An epoch ends when a client that has offered a key leaves or joins again. The states of a `MaskedSender`:

                     restart(): epoch = -1, no masks
    +---------------------------------------------------------------+
    v                                                               |
    +--------+  begin(): send Offer(0)  +------------+  Keys(e):    +-----------+
    | NO KEY |------------------------->| OFFERED(e) |------------->| MASKED(e) |
    +--------+  Rekey(e): send Offer(e) +------------+  the client  +-----------+
                                         ^    |    ^    sends the        |
                                         |    |    |    uploads in       |
                                         |    |    |    flight           |
                                         +----+    +---------------------+
                                    Rekey(e'), e' != e: send Offer(e')

restart() leads to NO KEY from OFFERED, too. What the client sends in each state:

    message or event     NO KEY, OFFERED                       MASKED
    upload               kept in flight; sent after Keys       MaskedUpload
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
from typing import Protocol

from vafl.arrays import Matrix, RowIds, Words
from vafl.errors import InvalidMessage
from vafl.protocol.messages import ClientMessage, Keys, MaskedRefresh, MaskedUpload, Offer, Rekey
from vafl.protocol.sender import Sender


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


class MaskedSender(Sender):
    """Sends scores only under masks.

    Args:
        index: the number of the client.
        keys: makes and checks keys.
    """

    summed = True

    def __init__(self, index: int, keys: KeyAgreement) -> None:
        super().__init__(index)
        self._keys = keys
        self._epoch = -1  # the epoch of the last key offered on this connection; -1 if none
        self._masks: Masks | None = None

    @property
    def ready(self) -> bool:
        """Return whether there are masks. The server repeats its requests once all clients have keys."""
        return self._masks is not None

    def restart(self) -> None:
        """Start a new connection. The keys of the last connection are void."""
        super().restart()
        self._epoch, self._masks = -1, None

    def begin(self) -> list[ClientMessage]:
        """Offer the first key of a connection without waiting for a `Rekey`."""
        return self._offer(0) if self._epoch < 0 else []

    def rekey(self, message: Rekey | Keys) -> list[ClientMessage]:
        if isinstance(message, Rekey):
            return self._offer(message.epoch)
        if message.epoch != self._epoch:
            raise InvalidMessage(
                "VFL-4111",
                f"keys must be of epoch {self._epoch}. Found keys of epoch {message.epoch}. This client has "
                "no key for that epoch.",
            )
        self._masks = self._keys.agree(message.epoch, message.offers)
        return []

    def _offer(self, epoch: int) -> list[ClientMessage]:
        """Drop the masks and offer a key for the epoch, unless this client has offered one for it."""
        if epoch == self._epoch:
            return []
        self._epoch, self._masks = epoch, None
        return [Offer(self.index, self.number(), epoch, self._keys.offer(epoch))]

    def upload(
        self, activation: int, rows: RowIds, embeddings: Matrix, *, answer: bool, in_flight: int
    ) -> list[ClientMessage]:
        if self._masks is None:
            return []
        words = self._masks.hide("batch", activation, rows, embeddings)
        return [MaskedUpload(self.index, self.number(), self._epoch, activation, rows, words)]

    def refresh(
        self, rows: RowIds, embeddings: Matrix, request: int | None, *, in_flight: int = 0
    ) -> list[ClientMessage]:
        """Return the answer to a request; nothing without one: only rows asked of all clients have a sum."""
        if self._masks is None or request is None:
            return []
        words = self._masks.hide("evaluation", request, rows, embeddings)
        return [MaskedRefresh(self.index, self.number(), self._epoch, request, rows, words)]
