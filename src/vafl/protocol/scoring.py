"""The prediction server: it asks clients for embeddings of rows, and scores the rows with the head.

It makes no training steps and has no clock. Its caller decides when to stop waiting, and calls `give_up`.

An `Inquiry` asks every client for the same rows. Its cells have the states of inquiry.py. Under a secure sum,
the scorer holds a `ScoringSums` (secure_sum/scoring.py). It asks all clients together and needs every answer.

Invariants:

1. A row that one open request to a client covers is not requested from it a second time. Several inquiries
   share the answer, so a private client is charged once.
2. All checks come before the first change: a message that raises InvalidMessage changes nothing.
"""

from collections.abc import Iterable, Sequence, Set

import numpy as np
import torch
from torch import Tensor, nn

from vafl.arrays import RowIds
from vafl.errors import InvalidMessage
from vafl.protocol.inquiry import ABSENT, ANSWERED, AWAITED, DECLINED, LATE, Inquiry
from vafl.protocol.marks import MarkMemory, Marks
from vafl.protocol.messages import (
    ClientMessage,
    Decline,
    Join,
    Leave,
    LedgerMark,
    MaskedRefresh,
    Offer,
    Refresh,
    Rekey,
    Request,
    ServerMessage,
    Welcome,
    require_growth,
)
from vafl.protocol.requests import Asked, Requests
from vafl.protocol.rows import slices_of
from vafl.protocol.secure_sum.scoring import ScoringSums
from vafl.protocol.table import EmbeddingTable


class Scorer:
    """Asks clients for embeddings and scores them. Knows the clients only by their messages.

    Args:
        rows: the number of records.
        head: maps the clients' embeddings, summed or concatenated, to outputs.
        defaults: for each client, the embedding [width of the client] to use if it does not answer.
        summed: whether the head takes the sum of the embeddings instead of their concatenation.
        cached: whether to keep embeddings and use them again, which costs a private client no budget.
        marks: remembers the marks of the clients' ledgers. The default keeps them in memory only.
        sums: the keys and words of a secure sum, for a head on the sum and without a cache. None takes plain
            embeddings only.

    Attributes:
        absent: the clients that have left.
        widths: the embedding width of each client.
        overdue: the clients that did not answer in time. They are asked again once they answer or join.
        inquiries: the inquiries that are not scored yet.
        needed, recalled: how many cells inquiries needed, and how many of these came from the cache.
    """

    def __init__(
        self,
        rows: int,
        head: nn.Module,
        defaults: Sequence[Tensor],
        *,
        summed: bool,
        cached: bool,
        marks: MarkMemory | None = None,
        sums: ScoringSums | None = None,
    ) -> None:
        self.clients, self.widths = len(defaults), tuple(len(default) for default in defaults)
        self.absent: set[int] = set()
        self.overdue: set[int] = set()
        self.inquiries: list[Inquiry] = []
        self.needed = self.recalled = 0
        self.iteration = 0
        self._rows, self._head, self._summed = rows, head.eval(), summed
        self._defaults = [default.numpy() for default in defaults]
        self._columns = slices_of(self.widths)
        self._cache = EmbeddingTable(rows, self.widths, summed=False) if cached else None
        self._requests = Requests()
        self._sequences = [-1] * self.clients
        self._marks = marks or Marks()
        self._sums = sums

    def ask(self, rows: RowIds, *, patient: bool = False) -> tuple[Inquiry, list[Request]]:
        """Open an inquiry for these rows (distinct, ascending); return it with the requests to send.

        A secure sum always waits for absent clients, and sends its requests once all clients have keys.
        """
        inquiry = Inquiry(
            rows,
            patient or self._sums is not None,
            np.zeros((len(rows), sum(self.widths)), np.float32),
            np.full((len(rows), self.clients), AWAITED, dtype=np.uint8),
            self._columns,
        )
        if self._cache is not None:
            _recall(inquiry, self._cache)
            self.recalled += int((inquiry.states == ANSWERED).sum())
        self.needed += inquiry.states.size
        self.inquiries.append(inquiry)
        if self._sums is not None:
            return inquiry, self._sums.ask(inquiry)
        return inquiry, [request for client in range(self.clients) for request in self._ask(inquiry, client)]

    def give_up(self, inquiry: Inquiry) -> None:
        """Stop waiting for the cells that are still awaited."""
        for client in range(self.clients):
            if len(inquiry.awaited(client)):
                self.overdue.add(client)
                inquiry.mark(client, ABSENT if client in self.absent else LATE)
        if self._sums is not None:
            self.overdue.clear()  # A sum needs every client, so the next round asks all of them again.
            self._sums.close(inquiry)

    def start_without(self, seen: Set[int]) -> None:
        """Do not wait for clients that missed the start: those that are absent and were never `seen`.

        Clients that were seen may be about to join.
        """
        self.overdue |= self.absent - seen

    def score(self, inquiry: Inquiry) -> Tensor:
        """Close the inquiry; return the outputs [rows, outputs], with defaults for missing embeddings."""
        self.inquiries.remove(inquiry)
        return self.outputs(inquiry)

    @torch.no_grad()
    def outputs(self, inquiry: Inquiry) -> Tensor:
        """Return the head's outputs [rows, outputs], with defaults for missing embeddings."""
        embeddings = inquiry.embeddings.copy()
        for client, columns in enumerate(self._columns):
            embeddings[inquiry.states[:, client] != ANSWERED, columns] = self._defaults[client]
        inputs = torch.from_numpy(embeddings)
        if self._summed:
            inputs = inputs.reshape(-1, self.clients, self.widths[0]).sum(1)
        outputs: Tensor = self._head(inputs)
        return outputs

    def is_under_way(self, client: int) -> bool:
        """Return False: a prediction client has no progress that a restart could lose."""
        return False

    def receive(self, message: ClientMessage) -> list[ServerMessage]:
        """Handle one message; return the replies, in the order to send them.

        Raises:
            InvalidMessage: the message broke a rule. The state has not changed.
        """
        client = message.client
        if self._sums is not None and isinstance(message, Refresh):
            raise InvalidMessage(
                "VFL-4151",
                f"this model has a secure sum, so answers must be masked. Found a plain answer of client "
                f"{client}. Set privacy.secure_sum to the same value at all parties.",
            )
        if not 0 <= client < self.clients:
            raise InvalidMessage("VFL-4101", f"client must be in 0..{self.clients - 1}. Found {client}.")
        if isinstance(message, Join):
            return self._take_join(client)
        if isinstance(message, Leave):
            return self._take_leave(client)
        if self._sums is not None and isinstance(message, Offer | MaskedRefresh | Decline):
            return self._take_masked(message, self._sums)
        if client in self.absent or not isinstance(message, Refresh | Decline | LedgerMark):
            raise InvalidMessage(
                "VFL-4102",
                f"a prediction server accepts Join, and then Refresh, Decline or LedgerMark. Found "
                f"{type(message).__name__} of client {client}.",
            )
        if isinstance(message, LedgerMark):
            self._take_mark(message)
        else:
            self._take_answer(message)
        return []

    # --- one method per kind of message: all checks come before the first change ---

    def _take_join(self, client: int) -> list[ServerMessage]:
        self.absent.discard(client)
        self.overdue.discard(client)
        self._sequences[client] = -1
        self._requests.forget(client)
        welcome = Welcome(client, 0, (0,) * self.clients, mark=self._marks.recall(client))
        if self._sums is not None:
            rekeyed = self._sums.end_epoch(client, f"client {client} joined", self.absent)
            return [welcome, Rekey(client, self._sums.key_epochs.number, "welcome"), *rekeyed]
        requests = [request for inquiry in self.inquiries for request in self._ask(inquiry, client)]
        return [welcome, *requests]

    def _take_leave(self, client: int) -> list[ServerMessage]:
        self.absent.add(client)
        self._requests.forget(client)
        for inquiry in self.inquiries:
            if not inquiry.patient:
                inquiry.mark(client, ABSENT)
        if self._sums is None:
            return []
        return [*self._sums.end_epoch(client, f"client {client} left", self.absent)]

    def _take_masked(
        self, message: Offer | MaskedRefresh | Decline, sums: ScoringSums
    ) -> list[ServerMessage]:
        client = message.client
        if client in self.absent:
            raise InvalidMessage(
                "VFL-4152",
                f"client {client} has not joined. It must send Join first. Found {type(message).__name__}.",
            )
        require_growth(client, message.sequence, self._sequences)
        replies: list[ServerMessage] = []
        if isinstance(message, Decline):
            sums.take_decline(message)
        elif sums.key_epochs.is_void(message.epoch):
            return []  # The client sent this before it knew of the current epoch.
        elif isinstance(message, Offer):
            replies = sums.take_offer(message)
        else:
            sums.take_answer(message)
        self._sequences[client] = message.sequence
        return replies

    def _take_mark(self, message: LedgerMark) -> None:
        require_growth(message.client, message.sequence, self._sequences)
        self._sequences[message.client] = message.sequence
        self._marks.remember(message)

    def _take_answer(self, message: Refresh | Decline) -> None:
        client = message.client
        request = self._requests.find(client, message.request)
        require_growth(client, message.sequence, self._sequences)
        if isinstance(message, Refresh):
            self._check_answer(message, request)
        self._sequences[client] = message.sequence
        self.overdue.discard(client)
        self._requests.answered(request)
        if isinstance(message, Refresh):
            if self._cache is not None:
                self._cache.store(client, message.rows, message.embeddings, 0)
            for inquiry in self.inquiries:
                inquiry.take(client, message.rows, message.embeddings)
        # A Refresh may leave out rows whose budget is spent. They count as declined.
        for inquiry in self.inquiries:
            inquiry.mark(client, DECLINED, request.rows)

    def _check_answer(self, answer: Refresh, request: Asked) -> None:
        rows = answer.rows
        if len(np.unique(rows)) < len(rows) or not np.isin(rows, request.rows).all():
            raise InvalidMessage(
                "VFL-4103",
                f"the answer to request {request.number} must have distinct rows of the request. Found other "
                f"rows, or a row twice, from client {answer.client}.",
            )
        if answer.embeddings.shape[1] != self.widths[answer.client]:
            raise InvalidMessage(
                "VFL-4104",
                f"embeddings of client {answer.client} must be {self.widths[answer.client]} wide. "
                f"Found {answer.embeddings.shape[1]}.",
            )

    # --- asking ---

    def _ask(self, inquiry: Inquiry, client: int) -> Iterable[Request]:
        """Yield the request to this client, if it has to be asked, or mark why it is not asked."""
        if client in self.overdue:
            inquiry.mark(client, ABSENT if client in self.absent else LATE)
        if client in self.absent:
            if not inquiry.patient:
                inquiry.mark(client, ABSENT)
            return
        rows = inquiry.awaited(client)
        # Other inquiries may have asked for some of the rows. Their answers count for this inquiry, too.
        for request in self._requests.of(client):
            rows = np.setdiff1d(rows, request.rows, assume_unique=True)
        if len(rows):
            yield self._requests.make(client, rows)


def _recall(inquiry: Inquiry, cache: EmbeddingTable) -> None:
    """Answer the cells that the cache holds."""
    for client in range(cache.clients):
        known = inquiry.rows[cache.stored_at[inquiry.rows, client] >= 0]
        if len(known):
            inquiry.take(client, known, cache.column(client)[known])
