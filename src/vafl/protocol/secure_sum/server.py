"""The server of a secure sum: it learns the sum of all clients' scores of a row, and nothing of any one.

Uploads come under masks that cancel when all clients' words are added modulo 2^64 (privacy/secure_sum.py).
So a round is taken whole or not at all. When a client leaves or comes, the words of the round under way
are thrown away and a new epoch begins: every client offers a fresh key, the server relays them all, and
what was under way is said again under new masks.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np

from vafl.errors import InvalidMessage
from vafl.protocol.marks import MarkMemory
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
    Words,
)
from vafl.protocol.requests import Poll
from vafl.protocol.rows import NO_ROWS, Matrix, Rows
from vafl.protocol.rules import Turn
from vafl.protocol.secure_sum.key_epochs import Epochs
from vafl.protocol.server import Server, listed
from vafl.protocol.table import FOREVER, Delays, EmbeddingTable


class SumTable(EmbeddingTable):
    """The last sum of each row over all clients, as one column; there is no cell of any client."""

    def __init__(self, rows: int, clients: int, width: int) -> None:
        super().__init__(rows, [width], summed=True)
        self._clients = clients

    @property
    def clients(self) -> int:
        return self._clients

    def lose_since(self, iteration: int, client: int | None = None) -> None:
        """Nothing is lost in a crash: every step sums its rows anew."""

    def lost(self, client: int) -> Rows:
        """No rows: no client has cells to say again."""
        return NO_ROWS

    def read_filled(self, rows: Rows) -> tuple[Matrix, dict[int, Rows]]:
        """As for any table, but nothing can stand in for a part of a sum: without one there is no sum."""
        gap = rows[self.stored_at[rows, 0] == -FOREVER]
        return self.read(rows), dict.fromkeys(range(self._clients), gap) if len(gap) else {}

    def delays(self, rows: Rows, iteration: int) -> Delays:
        """[batch, clients]: all clients' parts of a sum are of one age."""
        return np.repeat(super().delays(rows, iteration), self._clients, axis=1)

    def count_delays(self, rows: Rows, iteration: int, counts: Rows, own: int) -> int:
        """As above; a round is everybody's, so nobody is left out."""
        of_sums = np.zeros_like(counts[:1])
        longest = super().count_delays(rows, iteration, of_sums, own)
        counts += of_sums
        return longest


class MaskedServer(Server):
    """A server that takes masked words only.

    Args:
        table: for the sums.
        decode: the sum [rows, width] that added words stand for.

    Attributes:
        epochs: which keys are in use, or being agreed on.
    """

    table: SumTable
    may_stand_in = False

    def __init__(
        self,
        table: SumTable,
        *others: Any,
        decode: Callable[[Words], Matrix],
        marks: MarkMemory | None = None,
    ) -> None:
        super().__init__(table, *others, marks=marks)
        self.epochs = Epochs(table.clients)
        self._decode = decode
        self._words: dict[int, Words] = {}
        self._asked: Evaluate | None = None
        self._poll = Poll([])
        self._sums_asked = 0
        self._asked_words: dict[int, Words] = {}

    @property
    def may_poll(self) -> bool:
        """Whether all clients have keys: a sum needs all of them."""
        return not self.epochs.missing

    def poll(self, rows: Rows, best: int = -1, *, restore: bool = False) -> Poll:
        """Ask all clients for one sum; none is ever asked alone."""
        self._asked = Evaluate(0, self._sums_asked, rows, best, restore)
        self._sums_asked += 1
        self._poll = Poll(self._ask_again(), {self._asked.number})
        return self._poll

    @property
    def open_requests(self) -> Set[int]:
        """The number of the sum asked for, if its parts are still coming."""
        return set() if self._asked is None else {self._asked.number}

    def expire(self, numbers: Iterable[int]) -> list[ServerMessage]:
        """Give up the sum asked for; parts of it that come later are void."""
        if any(True for _ in numbers):
            self._end_poll()
        return []

    def _end_poll(self) -> None:
        """No more parts are waited for: the sum is complete, declined or late."""
        self._asked = None
        self._poll.waiting.clear()

    def waiting_for(self, names: Sequence[str] = ()) -> str:
        missing = self.epochs.missing
        if not missing:
            return super().waiting_for(names)
        who, gone = "" if names else "clients ", listed(self.absent, names)
        return f"keys of {who}{listed(missing, names)} for epoch {self.epochs.number} of masks; gone: {gone}"

    # --- each kind of message ---

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
                f"this run sums under masks. Found {type(message).__name__} of client {message.client}: all "
                "parties must agree on privacy.secure_sum.",
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
        self._answers.kept[client].clear()  # the client has them all, or it would not be here
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
                "VFL-4162", f"the answer to request {asked.number} must hold exactly its rows."
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
        """Without one client there is no sum."""
        self._check_sequence(decline.client, decline.sequence)
        if self._find_asked(decline.client, decline.request) is not None:
            self._end_poll()
        self._sequences[decline.client] = decline.sequence
        return []

    def _take_leave(self, leave: Leave) -> list[ServerMessage]:
        replies = super()._take_leave(leave)
        return replies + self._change(leave.client, f"client {leave.client} left")

    def _take_join(self, join: Join) -> list[ServerMessage]:
        rekeyed = self._change(join.client, f"client {join.client} came")
        welcomed = super()._take_join(join)
        return [*welcomed, Rekey(join.client, self.epochs.number, "welcome"), *rekeyed]

    # --- epochs ---

    def _change(self, client: int, why: str) -> list[ServerMessage]:
        rekeyed = self.epochs.end(client, why, self.absent)
        if rekeyed is None:
            return []
        self._abort_round()
        return [*rekeyed]

    def _abort_round(self) -> None:
        """Words of the epoch before can never be summed; their clients say them again."""
        for turn in self._waiting:
            self.activations[turn.client] -= 1
        self._waiting, self._group = [], []
        self._words.clear()

    def _ask_again(self) -> list[Evaluate]:
        """What is asked for, in this epoch's masks; what was said in others', or to what is over, is void."""
        self._asked_words.clear()
        if self._asked is None:
            return []
        return [replace(self._asked, client=client) for client in range(self.table.clients)]

    def _is_void(self, message: Offer | MaskedUpload | MaskedRefresh) -> bool:
        """Whether it was said before its client knew of this epoch: no fault, and of no use."""
        self._check_sequence(message.client, message.sequence)
        return self.epochs.is_void(message.epoch)

    # --- checks and sums ---

    def _check_words(self, message: MaskedUpload | MaskedRefresh) -> None:
        self.table.check(0, message.rows, message.words)

    def _find_asked(self, client: int, number: int) -> Evaluate | None:
        """What was asked; None if that is over: others may have declined while this client answered."""
        asked = self._asked if self._asked is not None and self._asked.number == number else None
        if number >= self._sums_asked or (asked is not None and client in self._asked_words):
            raise InvalidMessage("VFL-4163", f"client {client} was not asked request {number}.")
        return asked

    def _step(self, group: Sequence[Turn]) -> list[ServerMessage]:
        self._store_sum(group[0].rows, self._words)
        return super()._step(group)

    def _store_sum(self, rows: Rows, words: dict[int, Words]) -> None:
        """Adds what all clients said of these rows, and forgets it."""
        total = np.add.reduce(list(words.values()))
        words.clear()
        self.table.store(0, rows, self._decode(total), self.iteration)
