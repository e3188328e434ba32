"""Predictions under a secure sum: the server learns the sum of all clients' scores of a row, and no more.

An inquiry is one round: all clients answer for all of its rows, or the rows have no score. The models do not
change between rounds, so a row that is requested twice has the same sum and reveals nothing new. Key epochs
work as in training.py: a round that is open when an epoch ends is requested again once all clients have keys.
"""

from collections.abc import Callable, Set

import numpy as np

from vafl.arrays import Matrix, Words
from vafl.errors import InvalidMessage
from vafl.protocol.inquiry import ANSWERED, DECLINED, Inquiry
from vafl.protocol.messages import Decline, MaskedRefresh, Offer, Rekey, Request, ServerMessage
from vafl.protocol.secure_sum.key_epochs import KeyEpochs


class ScoringSums:
    """Key epochs, the open rounds and their words. `Scorer` holds one under a secure sum.

    The scorer checks the sequence number of each message before it passes it on, and ignores messages of
    earlier epochs.

    Args:
        clients: the number of clients.
        width: the number of scores of a row.
        decode: converts the sum of the words to the sum of the scores, [rows, width].

    Attributes:
        key_epochs: the current key epoch and the keys offered for it.
    """

    def __init__(self, clients: int, width: int, decode: Callable[[Words], Matrix]) -> None:
        self.key_epochs = KeyEpochs(clients)
        self._clients, self._width, self._decode = clients, width, decode
        self._rounds: dict[int, Inquiry] = {}
        self._words: dict[int, dict[int, Words]] = {}
        self._asked = 0

    def ask(self, inquiry: Inquiry) -> list[Request]:
        """Open a round; return its requests, or nothing until all clients have keys."""
        number = self._asked
        self._asked += 1
        self._rounds[number] = inquiry
        return [] if self.key_epochs.missing else self._requests_of(number)

    def close(self, inquiry: Inquiry) -> None:
        """Stop waiting for this round. Words that arrive for it later are ignored."""
        for number in [number for number, other in self._rounds.items() if other is inquiry]:
            del self._rounds[number]
            self._words.pop(number, None)

    def end_epoch(self, client: int, why: str, absent: Set[int]) -> list[Rekey]:
        """Begin a new epoch if this client, which left or joined, has offered a key for the current one.

        Returns:
            What to send to the other clients.
        """
        rekeyed = self.key_epochs.end(client, why, absent)
        if rekeyed is None:
            return []
        self._words.clear()
        return rekeyed

    # --- one method per kind of message: all checks come before the first change ---

    def take_offer(self, offer: Offer) -> list[ServerMessage]:
        """Store a key. With the last one, return all keys for every client, and the open rounds' requests."""
        replies: list[ServerMessage] = [*self.key_epochs.take(offer)]
        if not self.key_epochs.missing:
            replies += [request for number in self._rounds for request in self._requests_of(number)]
        return replies

    def take_decline(self, decline: Decline) -> None:
        """Close the round: without one client there is no sum."""
        inquiry = self._round(decline.request)
        if inquiry is not None:
            for client in range(self._clients):
                inquiry.mark(client, DECLINED)
            self.close(inquiry)

    def take_answer(self, answer: MaskedRefresh) -> None:
        """Keep a client's words; with the last client's, put the sum of the scores into the inquiry."""
        inquiry, client = self._round(answer.request), answer.client
        self.key_epochs.require_keys(client)
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
        if len(words) == self._clients:
            inquiry.take(0, inquiry.rows, self._decode(np.add.reduce(list(words.values()))))
            inquiry.states[:] = ANSWERED
            self.close(inquiry)

    def _round(self, number: int) -> Inquiry | None:
        """Return the open inquiry with this number; None if it is closed. A late answer is no fault."""
        if number >= self._asked:
            raise InvalidMessage(
                "VFL-4155",
                f"the server has made {self._asked} requests. Found an answer to request {number}.",
            )
        return self._rounds.get(number)

    def _requests_of(self, number: int) -> list[Request]:
        rows = self._rounds[number].rows
        return [Request(client, number, rows) for client in range(self._clients)]
