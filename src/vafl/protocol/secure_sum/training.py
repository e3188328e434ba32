"""The server's part of a secure sum: it learns the sum of all clients' scores of a row, and no single score.

Clients send masked words. The masks cancel when the server adds the words of all clients modulo 2^64 (see
masks.py). So the server needs the words of every client, masked with keys of the same epoch. The states of a
key epoch:

    +-------------------+   the last client's Offer(e):    +------------------+
    |   COLLECTING(e)   |   send Keys(e) to all clients,   |    AGREED(e)     |
    | some clients have |--------------------------------->| every client has |
    |    no key yet     |   repeat the open Request        |    the keys      |
    +-------------------+                                  +------------------+
          ^       |  a client that offered a key for e               |
          |       |  leaves or joins again                           |
          |       v                                                  v
        e = e + 1: drop the words of the open round, send Rekey(e) to the other clients that are present

    Join                 always answered with Rekey(e), so that the client offers a key
    MaskedUpload(e)      in AGREED: keep the words; with the last client's words, sum them and step
    MaskedRefresh(e)     in AGREED: keep the words; with the last client's words, store the sum
    message of epoch < e ignored: the client sent it before it received Rekey(e)
    message of epoch > e InvalidMessage

Example with two clients:

    client 0             server              client 1
       | -- Offer(0) ------> |                   |
       |                     | <---- Offer(0) -- |
       | <------ Keys(0) --- | --- Keys(0) ----> |
       | -- MaskedUpload --> |                   |
       |                     | <------ Leave --- |     the words of client 0 are useless now
       | <----- Rekey(1) --- |                   |
       | -- Offer(1) ------> |                   |
       |                     | <------- Join --- |
       |                     | -- Welcome,       |
       |                     |    Rekey(1) ----> |
       |                     | <---- Offer(1) -- |
       | <------ Keys(1) --- | --- Keys(1) ----> |
       | -- MaskedUpload --> |                   |     the same scores under other masks

Invariants:

1. The server adds words only if all clients sent them for the same rows in the same epoch. Any other sum is
   random.
2. A round counts for all clients or for none. When an epoch ends, the server takes back the uploads of the
   open round: `activations` goes back, and the clients send them again.
3. The server asks all clients for a sum, never one alone, and has one evaluation open at a time.
4. The open evaluation survives the end of an epoch. The server asks for it again once all keys are there.
5. Words are deleted once they are summed.
"""

from collections.abc import Callable, Iterable, Set
from dataclasses import replace

import numpy as np

from vafl.arrays import Matrix, RowIds, Words
from vafl.errors import InvalidMessage
from vafl.protocol.messages import Decline, Evaluate, MaskedRefresh, MaskedUpload, Offer, Rekey, ServerMessage
from vafl.protocol.requests import Poll
from vafl.protocol.secure_sum.key_epochs import KeyEpochs


class TrainingSums:
    """Key epochs, the words of the open round, and the open evaluation. `Server` holds it under a secure sum.

    The server checks the sequence number, the rows and the shape of each message before it passes it on, and
    ignores messages of earlier epochs.

    Args:
        clients: the number of clients.
        decode: converts the sum of the words to the sum of the scores, [rows, width].

    Attributes:
        key_epochs: the current key epoch and the keys offered for it.
    """

    def __init__(self, clients: int, decode: Callable[[Words], Matrix]) -> None:
        self.key_epochs = KeyEpochs(clients)
        self._clients, self._decode = clients, decode
        self._words: dict[int, Words] = {}
        self._asked: Evaluate | None = None
        self._poll = Poll([])
        self._polls = 0
        self._asked_words: dict[int, Words] = {}

    # --- epochs ---

    def take_offer(self, offer: Offer) -> list[ServerMessage]:
        """Store a key. With the last one, return all keys for every client, and the open evaluation."""
        keys = self.key_epochs.take(offer)
        return [*keys, *self._ask_again()] if keys else []

    def end_epoch(self, client: int, why: str, absent: Set[int]) -> list[Rekey] | None:
        """Begin a new epoch if this client, which left or joined, has offered a key for the current one.

        A new epoch drops the words of the open round.

        Returns:
            What to send to the other clients; None if the epoch goes on.
        """
        rekeyed = self.key_epochs.end(client, why, absent)
        if rekeyed is not None:
            self._words.clear()
        return rekeyed

    # --- rounds ---

    @property
    def unsummed(self) -> Set[int]:
        """Return the clients whose words of the open round the server holds."""
        return self._words.keys()

    def keep(self, upload: MaskedUpload) -> None:
        """Keep a client's words of the open round."""
        self._words[upload.client] = upload.words

    def sum_round(self) -> Matrix:
        """Return the sum of the scores of the open round, and delete its words."""
        return self._sum(self._words)

    def _sum(self, words: dict[int, Words]) -> Matrix:
        total = np.add.reduce(list(words.values()))
        words.clear()
        return self._decode(total)

    # --- the evaluation ---

    @property
    def open_requests(self) -> Set[int]:
        """Return the number of the evaluation that is open, if there is one."""
        return set() if self._asked is None else {self._asked.number}

    def poll(self, rows: RowIds, best: int, *, restore: bool) -> Poll:
        """Ask all clients for one sum; none is ever asked alone."""
        self._asked = Evaluate(0, self._polls, rows, best, restore)
        self._polls += 1
        self._poll = Poll(self._ask_again(), {self._asked.number})
        return self._poll

    def expire(self, numbers: Iterable[int]) -> None:
        """Give up the open evaluation. Words that arrive for it later are ignored."""
        if any(True for _ in numbers):
            self._end_poll()

    def take_answer(self, answer: MaskedRefresh) -> Matrix | None:
        """Keep a client's words of the evaluation; with the last client's, return the sum of the scores.

        Raises:
            InvalidMessage: the client was not asked, or the answer has other rows. Nothing has changed.
        """
        asked = self._find_asked(answer.client, answer.request)
        if asked is None:
            return None
        if not np.array_equal(asked.rows, answer.rows):
            raise InvalidMessage(
                "VFL-4162",
                f"the answer to request {asked.number} must have exactly the rows of the request. Found "
                f"other rows from client {answer.client}.",
            )
        self._asked_words[answer.client] = answer.words
        if len(self._asked_words) < self._clients:
            return None
        self._poll.answered |= set(range(self._clients))
        self._end_poll()
        return self._sum(self._asked_words)

    def take_decline(self, decline: Decline) -> None:
        """Close the evaluation: without one client there is no sum."""
        if self._find_asked(decline.client, decline.request) is not None:
            self._end_poll()

    def _find_asked(self, client: int, number: int) -> Evaluate | None:
        """Return the open request with this number, or None if it is closed.

        Another client may have declined in the meantime, so an answer to a closed request is no fault.
        """
        asked = self._asked if self._asked is not None and self._asked.number == number else None
        if number >= self._polls or (asked is not None and client in self._asked_words):
            raise InvalidMessage("VFL-4163", f"client {client} was not asked request {number}.")
        return asked

    def _ask_again(self) -> list[Evaluate]:
        """Return the open evaluation's requests, and drop the words of earlier epochs and evaluations."""
        self._asked_words.clear()
        if self._asked is None:
            return []
        return [replace(self._asked, client=client) for client in range(self._clients)]

    def _end_poll(self) -> None:
        """Close the open evaluation: its sum is complete, declined or late."""
        self._asked = None
        self._poll.waiting.clear()
