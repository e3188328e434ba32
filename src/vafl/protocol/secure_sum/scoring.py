"""Predictions under a secure sum: the server learns the sum of all clients' scores of a row, and no more.

An inquiry is one round: all clients answer for all of its rows, or the rows have no score. The models do not
change between rounds, so a row that is requested twice has the same sum and reveals nothing new. Key epochs
work as in server.py: a round that is open when an epoch ends is requested again once all clients have keys.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import nn

from vafl.arrays import Matrix, RowIds, Words
from vafl.errors import InvalidMessage
from vafl.protocol.marks import MarkMemory
from vafl.protocol.messages import (
    ClientMessage,
    Decline,
    Leave,
    LedgerMark,
    MaskedRefresh,
    Offer,
    Refresh,
    Rekey,
    Request,
    ServerMessage,
)
from vafl.protocol.prediction_client import PredictionClient
from vafl.protocol.scoring import ANSWERED, DECLINED, Inquiry, Scorer
from vafl.protocol.secure_sum.client import Masking
from vafl.protocol.secure_sum.key_epochs import Epochs


class MaskedRespondent(Masking, PredictionClient):
    """A prediction client that answers under masks, for all requested rows or for none."""

    whole = True


class MaskedScorer(Scorer):
    """Asks for sums and scores them.

    Args:
        decode: converts the sum of the words to the sum of the scores, [rows, width].
    """

    def __init__(
        self,
        rows: int,
        head: nn.Module,
        clients: int,
        width: int,
        decode: Callable[[Words], Matrix],
        marks: MarkMemory | None = None,
    ) -> None:
        super().__init__(rows, head, torch.zeros(clients, width), summed=True, cached=False, marks=marks)
        self._decode = decode
        self._epochs = Epochs(clients)
        self._rounds: dict[int, Inquiry] = {}
        self._words: dict[int, dict[int, Words]] = {}
        self._asked = 0

    def ask(self, rows: RowIds, *, patient: bool = False) -> tuple[Inquiry, list[Request]]:
        """Open an inquiry; return it with its requests, which are delayed until all clients have keys."""
        inquiry, _ = super().ask(rows, patient=True)
        number = self._asked
        self._asked += 1
        self._rounds[number] = inquiry
        return inquiry, [] if self._epochs.missing else self._requests_of(number)

    def give_up(self, inquiry: Inquiry) -> None:
        """Stop waiting for this round. Words that arrive for it later are ignored."""
        super().give_up(inquiry)
        self.overdue.clear()  # A sum needs every client, so the next round asks all of them again.
        self._close(inquiry)

    def receive(self, message: ClientMessage) -> list[ServerMessage]:
        """Handle one message; return the replies, in the order to send them.

        Raises:
            InvalidMessage: the message broke a rule. The state has not changed.
        """
        if isinstance(message, Refresh):
            raise InvalidMessage(
                "VFL-4151",
                f"this model has a secure sum, so answers must be masked. Found a plain answer of client "
                f"{message.client}. Set privacy.secure_sum to the same value at all parties.",
            )
        if isinstance(message, Offer | MaskedRefresh | Decline):
            return self._take_masked(message)
        replies = super().receive(message)
        if isinstance(message, LedgerMark):
            return replies
        if isinstance(message, Leave):
            return [*replies, *self._end_epoch(message.client, "left")]
        rekeyed = self._end_epoch(message.client, "joined")
        return [*replies, Rekey(message.client, self._epochs.number, "welcome"), *rekeyed]

    # --- one method per kind of message: all checks come before the first change ---

    def _take_masked(self, message: Offer | MaskedRefresh | Decline) -> list[ServerMessage]:
        client = message.client
        if not 0 <= client < self.clients or client in self.absent:
            raise InvalidMessage(
                "VFL-4152",
                f"client {client} has not joined. It must send Join first. Found {type(message).__name__}.",
            )
        self._check_sequence(client, message.sequence)
        replies: list[ServerMessage] = []
        if isinstance(message, Decline):
            self._take_decline(message)
        elif self._epochs.is_void(message.epoch):
            return []
        elif isinstance(message, Offer):
            replies = [*self._epochs.take(message)]
            if not self._epochs.missing:
                replies += [request for number in self._rounds for request in self._requests_of(number)]
        else:
            self._take_words(message)
        self._sequences[client] = message.sequence
        return replies

    def _take_decline(self, decline: Decline) -> None:
        """Close the round: without one client there is no sum."""
        inquiry = self._round(decline.request)
        if inquiry is not None:
            for client in range(self.clients):
                inquiry.mark(client, DECLINED)
            self._close(inquiry)

    def _take_words(self, answer: MaskedRefresh) -> None:
        inquiry, client = self._round(answer.request), answer.client
        self._epochs.require_keys(client)
        if inquiry is None:
            return
        words = self._words.setdefault(answer.request, {})
        if client in words or not np.array_equal(answer.rows, inquiry.rows):
            raise InvalidMessage(
                "VFL-4153",
                f"the answer to request {answer.request} must have exactly the rows of the request, and come "
                f"once. Found other rows, or a second answer, from client {client}.",
            )
        if answer.words.shape != (len(inquiry.rows), self._width):
            raise InvalidMessage(
                "VFL-4154",
                f"words of client {client} must have the shape [{len(inquiry.rows)}, {self._width}]. "
                f"Found {list(answer.words.shape)}.",
            )
        words[client] = answer.words
        if len(words) == self.clients:
            inquiry.embeddings[:, 0] = self._decode(np.add.reduce(list(words.values())))
            inquiry.states[:] = ANSWERED
            self._close(inquiry)

    # --- rounds ---

    def _round(self, number: int) -> Inquiry | None:
        """Return the open inquiry with this number; None if it is closed. A late answer is no fault."""
        if number >= self._asked:
            raise InvalidMessage(
                "VFL-4155",
                f"the server has made {self._asked} requests. Found an answer to request {number}.",
            )
        return self._rounds.get(number)

    def _close(self, inquiry: Inquiry) -> None:
        for number in [number for number, other in self._rounds.items() if other is inquiry]:
            del self._rounds[number]
            self._words.pop(number, None)

    def _requests_of(self, number: int) -> list[Request]:
        rows = self._rounds[number].rows
        return [Request(client, number, rows) for client in range(self.clients)]

    def _ask(self, inquiry: Inquiry, client: int) -> Iterable[Request]:
        """Return no requests: only `_requests_of` asks, and it asks all clients together."""
        return ()

    def _end_epoch(self, client: int, how: str) -> list[Rekey]:
        """Begin a new epoch if this client, which left or joined, has offered a key for the current one."""
        rekeyed = self._epochs.end(client, f"client {client} {how}", self.absent)
        if rekeyed is None:
            return []
        self._words.clear()
        return rekeyed
