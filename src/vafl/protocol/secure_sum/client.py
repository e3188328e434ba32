"""The client of a secure sum: all that leaves it is under masks that cancel only in the sum over all.

Masks come with an epoch's keys. An upload made while there are none waits for them; one that was under
way when an epoch ended is said again, the same scores under new masks.
"""

from collections.abc import Sequence
from typing import Any, Protocol

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
    Words,
)
from vafl.protocol.prediction_client import PredictionClient
from vafl.protocol.rows import Matrix, Rows


class Masks(Protocol):
    """One client's masks of one epoch."""

    def hide(self, purpose: str, number: int, rows: Rows, scores: Matrix) -> Words:
        """Scores under the masks of a round; those of one purpose and number serve once."""


class KeyAgreement(Protocol):
    """One client's keys."""

    def offer(self, epoch: int) -> bytes:
        """A fresh public key, with the proof whose it is."""

    def agree(self, epoch: int, offers: Sequence[bytes]) -> Masks:
        """The masks that follow from everybody's offers; checks whose they are."""


class Masking(PredictionClient):
    """A client that answers no request but under masks.

    Args:
        keys: makes and checks keys.
    """

    def __init__(self, *others: Any, keys: KeyAgreement, **settings: Any) -> None:
        super().__init__(*others, **settings)
        self._keys = keys
        self._epoch = -1  # of the key offered last on this connection
        self._masks: Masks | None = None

    def join(self) -> Join:
        """Another connection: what was agreed on the last one is void."""
        self._epoch, self._masks = -1, None
        return super().join()

    def _take(self, message: ServerMessage) -> list[ClientMessage]:
        if isinstance(message, Rekey):
            return self._offer(message.epoch)
        if isinstance(message, Keys):
            return self._agree(message)
        if isinstance(message, Request | Evaluate) and self._masks is None:
            return []  # said again once there are keys
        return super()._take(message)

    def _offer(self, epoch: int) -> list[ClientMessage]:
        if epoch == self._epoch:
            return []
        self._epoch, self._masks = epoch, None
        return [Offer(self.index, self._next(), epoch, self._keys.offer(epoch))]

    def _agree(self, keys: Keys) -> list[ClientMessage]:
        if keys.epoch != self._epoch:
            raise InvalidMessage(
                "VFL-4111", f"keys must be of epoch {self._epoch}. Found keys of epoch {keys.epoch}."
            )
        self._masks = self._keys.agree(keys.epoch, keys.offers)
        return []

    def _say_rows(self, rows: Rows, embeddings: Matrix, request: int | None) -> list[ClientMessage]:
        if self._masks is None or request is None:
            return []
        words = self._masks.hide("evaluation", request, rows, embeddings)
        return [MaskedRefresh(self.index, self._next(), self._epoch, request, rows, words)]


class MaskedClient(Masking, Client):
    """A client that says no score but under masks."""

    def wake(self) -> list[ClientMessage]:
        """Nobody has to ask for the first key."""
        first = self._offer(0) if self._epoch < 0 else []
        return [*first, *super().wake()]

    def _agree(self, keys: Keys) -> list[ClientMessage]:
        super()._agree(keys)
        return [said for number, flight in self._flights.items() for said in self._say(number, flight)]

    def _answer(self, request: Request) -> list[ClientMessage]:
        """Refuse: training rows are summed in rounds only."""
        raise InvalidMessage(
            "VFL-4112",
            f"only held-out rows, from {self._schedule.rows} on, are summed outside rounds, when the server "
            f"evaluates. Found request {request.number}, which is for training rows.",
        )

    def _say(self, activation: int, flight: Flight) -> list[ClientMessage]:
        if self._masks is None:
            return []
        words = self._masks.hide("batch", activation, flight.rows, flight.embeddings)
        return [MaskedUpload(self.index, self._next(), self._epoch, activation, flight.rows, words)]
