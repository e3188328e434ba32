"""The server of a secure sum: it learns the sum of all clients' scores of a row, and no single score.

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

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np

from vafl.arrays import Iterations, Matrix, RowIds, Words
from vafl.errors import InvalidMessage
from vafl.protocol.messages import (
    ClientMessage,
    Decline,
    Evaluate,
    Join,
    Leave,
    MaskedRefresh,
    MaskedUpload,
    Offer,
    Query,
    Refresh,
    Rekey,
    ServerMessage,
    Upload,
)
from vafl.protocol.requests import Poll
from vafl.protocol.rows import NO_ROWS
from vafl.protocol.rules import Turn
from vafl.protocol.secure_sum.key_epochs import Epochs
from vafl.protocol.server import Server, listed
from vafl.protocol.table import FOREVER, EmbeddingTable


class SumTable(EmbeddingTable):
    """The last sum over all clients of each row, as a single column. No client has cells here."""

    def __init__(self, rows: int, clients: int, width: int) -> None:
        super().__init__(rows, [width], summed=True)
        self._clients = clients

    @property
    def clients(self) -> int:
        return self._clients

    def lose_since(self, iteration: int, client: int | None = None) -> None:
        """Do nothing: every step sums its rows again, so a crash loses no cells."""

    def lost(self, client: int) -> RowIds:
        """Return no rows: no client has cells here."""
        return NO_ROWS

    def read_filled(self, rows: RowIds) -> tuple[Matrix, dict[int, RowIds]]:
        """Return the sums of these rows, and the rows without a sum for every client.

        Nothing can stand in for one client's part of a sum.
        """
        gap = rows[self.stored_at[rows, 0] == -FOREVER]
        return self.read(rows), dict.fromkeys(range(self._clients), gap) if len(gap) else {}

    def delays(self, rows: RowIds, iteration: int) -> Iterations:
        """Return the delays, [batch, clients]. All parts of a sum have the same delay."""
        return np.repeat(super().delays(rows, iteration), self._clients, axis=1)

    def count_delays(self, rows: RowIds, iteration: int, counts: RowIds, own: int) -> int:
        """Count the delays of the sums for every client, since each one takes part in every sum."""
        of_sums = np.zeros_like(counts[:1])
        longest = super().count_delays(rows, iteration, of_sums, own)
        counts += of_sums
        return longest


class MaskedServer(Server):
    """A server that accepts only masked words.

    Args:
        table: stores the sums.
        decode: converts the sum of the words to the sum of the scores, [rows, width].

    Attributes:
        epochs: the current key epoch and the keys offered for it.
    """

    table: SumTable
    may_stand_in = False

    def __init__(
        self,
        table: SumTable,
        *others: Any,
        decode: Callable[[Words], Matrix],
        **settings: Any,
    ) -> None:
        super().__init__(table, *others, **settings)
        self.epochs = Epochs(table.clients)
        self._decode = decode
        self._words: dict[int, Words] = {}
        self._asked: Evaluate | None = None
        self._poll = Poll([])
        self._sums_asked = 0
        self._asked_words: dict[int, Words] = {}

    @property
    def may_poll(self) -> bool:
        """Return whether all clients have keys. A sum needs all of them."""
        return not self.epochs.missing

    def poll(self, rows: RowIds, best: int = -1, *, restore: bool = False) -> Poll:
        """Ask all clients for one sum; none is ever asked alone."""
        self._asked = Evaluate(0, self._sums_asked, rows, best, restore)
        self._sums_asked += 1
        self._poll = Poll(self._ask_again(), {self._asked.number})
        return self._poll

    @property
    def open_requests(self) -> Set[int]:
        """Return the number of the evaluation that is open, if there is one."""
        return set() if self._asked is None else {self._asked.number}

    def expire(self, numbers: Iterable[int]) -> list[ServerMessage]:
        """Give up the open evaluation. Words that arrive for it later are ignored."""
        if any(True for _ in numbers):
            self._end_poll()
        return []

    def _end_poll(self) -> None:
        """Close the open evaluation: its sum is complete, declined or late."""
        self._asked = None
        self._poll.waiting.clear()

    def waiting_for(self, names: Sequence[str] = ()) -> str:
        missing = self.epochs.missing
        if not missing:
            return super().waiting_for(names)
        who, gone = "" if names else "clients ", listed(self.absent, names)
        return f"keys of {who}{listed(missing, names)} for epoch {self.epochs.number} of masks; gone: {gone}"

    # --- one method per kind of message: all checks come before the first change ---

    def _take(self, message: ClientMessage) -> list[ServerMessage]:
        if isinstance(message, Offer):
            return self._take_offer(message)
        if isinstance(message, MaskedUpload):
            return self._take_masked_upload(message)
        if isinstance(message, MaskedRefresh):
            return self._take_masked_refresh(message)
        if isinstance(message, Upload | Refresh | Query):
            raise InvalidMessage(
                "VFL-4161",
                f"this run has a secure sum, so embeddings must be masked. Found {type(message).__name__} of "
                f"client {message.client}. Set privacy.secure_sum to the same value at all parties.",
            )
        return super()._take(message)

    def _take_offer(self, offer: Offer) -> list[ServerMessage]:
        if self._is_void(offer):
            return []
        keys = self.epochs.take(offer)
        self._sequences[offer.client] = offer.sequence
        return [*keys, *self._ask_again()] if keys else []

    def _take_masked_upload(self, upload: MaskedUpload) -> list[ServerMessage]:
        if self._is_void(upload):
            return []
        client = upload.client
        self.epochs.require_keys(client)
        self._check_words(upload)
        self._check_turn(client, upload.activation, upload.rows)
        self._sequences[client] = upload.sequence
        self.activations[client] += 1
        # Sync: a client uploads the next round only after it has applied the last answer.
        self._answers.kept[client].clear()
        self._words[client] = upload.words
        self._waiting.append(Turn(client, upload.activation, upload.rows, True, True))
        return self._end_older_rounds()

    def _take_masked_refresh(self, refresh: MaskedRefresh) -> list[ServerMessage]:
        if self._is_void(refresh):
            return []
        self.epochs.require_keys(refresh.client)
        asked = self._find_asked(refresh.client, refresh.request)
        if asked is not None and not np.array_equal(asked.rows, refresh.rows):
            raise InvalidMessage(
                "VFL-4162",
                f"the answer to request {asked.number} must have exactly the rows of the request. Found "
                f"other rows from client {refresh.client}.",
            )
        self._check_words(refresh)
        self._sequences[refresh.client] = refresh.sequence
        if asked is not None:
            self._asked_words[refresh.client] = refresh.words
            if len(self._asked_words) == self.table.clients:
                self._store_sum(asked.rows, self._asked_words)
                self._poll.answered |= set(range(self.table.clients))
                self._end_poll()
        return []

    def _take_decline(self, decline: Decline) -> list[ServerMessage]:
        """Close the evaluation: without one client there is no sum."""
        self._check_sequence(decline.client, decline.sequence)
        if self._find_asked(decline.client, decline.request) is not None:
            self._end_poll()
        self._sequences[decline.client] = decline.sequence
        return []

    def _take_leave(self, leave: Leave) -> list[ServerMessage]:
        replies = super()._take_leave(leave)
        return replies + self._end_epoch(leave.client, f"client {leave.client} left")

    def _take_join(self, join: Join) -> list[ServerMessage]:
        # First take back the open round, so that Welcome has the counts that the clients continue from.
        rekeyed = self._end_epoch(join.client, f"client {join.client} joined")
        welcomed = super()._take_join(join)
        return [*welcomed, Rekey(join.client, self.epochs.number, "welcome"), *rekeyed]

    # --- epochs ---

    def _end_epoch(self, client: int, why: str) -> list[ServerMessage]:
        """Begin a new epoch if this client, which left or joined, has offered a key for the current one."""
        rekeyed = self.epochs.end(client, why, self.absent)
        if rekeyed is None:
            return []
        self._abort_round()
        return [*rekeyed]

    def _abort_round(self) -> None:
        """Take back the uploads of the open round. Their clients send them again in the new epoch."""
        for turn in self._waiting:
            self.activations[turn.client] -= 1
        self._waiting, self._group = [], []
        self._words.clear()

    def _ask_again(self) -> list[Evaluate]:
        """Return the open evaluation's requests, and drop the words of earlier epochs and evaluations."""
        self._asked_words.clear()
        if self._asked is None:
            return []
        return [replace(self._asked, client=client) for client in range(self.table.clients)]

    def _is_void(self, message: Offer | MaskedUpload | MaskedRefresh) -> bool:
        """Return whether the client sent this before it knew of the current epoch: useless, but no fault."""
        self._check_sequence(message.client, message.sequence)
        return self.epochs.is_void(message.epoch)

    # --- checks and sums ---

    def _check_words(self, message: MaskedUpload | MaskedRefresh) -> None:
        self.table.check(0, message.rows, message.words)

    def _find_asked(self, client: int, number: int) -> Evaluate | None:
        """Return the open request with this number, or None if it is closed.

        Another client may have declined in the meantime, so an answer to a closed request is no fault.
        """
        asked = self._asked if self._asked is not None and self._asked.number == number else None
        if number >= self._sums_asked or (asked is not None and client in self._asked_words):
            raise InvalidMessage("VFL-4163", f"client {client} was not asked request {number}.")
        return asked

    def _step(self, group: Sequence[Turn]) -> list[ServerMessage]:
        self._store_sum(group[0].rows, self._words)
        return super()._step(group)

    def _store_sum(self, rows: RowIds, words: dict[int, Words]) -> None:
        """Add the words of all clients for these rows, store the sum, and delete the words."""
        total = np.add.reduce(list(words.values()))
        words.clear()
        self.table.store(0, rows, self._decode(total), self.iteration)
