"""The prediction server: it asks clients for embeddings of rows, and scores the rows with the head.

It makes no training steps and has no clock. Its caller decides when to stop waiting, and calls `give_up`.

An `Inquiry` asks every client for the same rows. Each cell, a row and a client, has one state:

                 +---------+   Refresh with this row       +----------+
    ask() ------>| AWAITED |------------------------------>| ANSWERED |
                 +---------+                               +----------+
                   |  |  |     Decline, or Refresh without this row
                   |  |  +-------------------------------> DECLINED
                   |  |        Leave, unless the inquiry is patient; give_up() while the client is absent
                   |  +----------------------------------> ABSENT
                   |           give_up() while the client is present; the client is overdue
                   +-------------------------------------> LATE

Invariants:

1. A state other than AWAITED is final, with one exception: until the inquiry is scored, a late answer still
   turns a cell into ANSWERED.
2. A row that one open request to a client covers is not requested from it a second time. Several inquiries
   share the answer, so a private client is charged once.
3. All checks come before the first change: a message that raises InvalidMessage changes nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vafl.arrays import Floats, Matrix, RowIds, States
from vafl.errors import InvalidMessage
from vafl.protocol.marks import MarkMemory, Marks
from vafl.protocol.messages import (
    ClientMessage,
    Decline,
    Join,
    Leave,
    LedgerMark,
    Refresh,
    Request,
    ServerMessage,
    Welcome,
    require_growth,
)
from vafl.protocol.requests import Asked, Requests
from vafl.protocol.table import EmbeddingTable

STATES = ("answered", "absent", "late", "declined", "awaited")  # states of a cell: a row and a client
ANSWERED, ABSENT, LATE, DECLINED, AWAITED = range(len(STATES))


@dataclass(eq=False)
class Inquiry:
    """Rows that every client is asked for, and the answers so far.

    Attributes:
        rows: [rows], distinct and ascending.
        patient: whether to wait for absent clients, which may come back.
        embeddings: [rows, clients, width].
        states: [rows, clients], each an index into `STATES`.
    """

    rows: RowIds
    patient: bool
    embeddings: Floats
    states: States

    @property
    def is_open(self) -> bool:
        """Return whether answers may still arrive."""
        return bool((self.states == AWAITED).any())

    def awaited(self, client: int) -> RowIds:
        """Return the rows that this client has not answered yet."""
        return self.rows.compress(self.states[:, client] == AWAITED)

    def take(self, client: int, rows: RowIds, embeddings: Matrix) -> None:
        """Store embeddings of these rows. Rows outside the inquiry are ignored."""
        places = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        fits = self.rows[places] == rows
        chosen = places[fits]
        self.embeddings[chosen, client] = embeddings[fits]
        self.states[chosen, client] = ANSWERED

    def mark(self, client: int, state: int, rows: RowIds | None = None) -> None:
        """Set the state of the cells of these rows (None: all) that still await this client."""
        awaited = self.states[:, client] == AWAITED
        if rows is not None:
            awaited &= np.isin(self.rows, rows)
        self.states[awaited, client] = state


class Scorer:
    """Asks clients for embeddings and scores them. Knows the clients only by their messages.

    Args:
        rows: the number of records.
        head: maps the clients' embeddings, summed or concatenated, to outputs.
        defaults: [clients, width], the embedding to use for a client that does not answer.
        summed: whether the head takes the sum of the embeddings instead of their concatenation.
        cached: whether to keep embeddings and use them again, which costs a private client no budget.
        marks: remembers the marks of the clients' ledgers. The default keeps them in memory only.

    Attributes:
        absent: the clients that have left.
        overdue: the clients that did not answer in time. They are asked again once they answer or join.
        inquiries: the inquiries that are not scored yet.
        needed, recalled: how many cells inquiries needed, and how many of these came from the cache.
    """

    def __init__(
        self,
        rows: int,
        head: nn.Module,
        defaults: Tensor,
        *,
        summed: bool,
        cached: bool,
        marks: MarkMemory | None = None,
    ) -> None:
        self.clients, self._width = defaults.shape
        self.absent: set[int] = set()
        self.overdue: set[int] = set()
        self.inquiries: list[Inquiry] = []
        self.needed = self.recalled = 0
        self.iteration = 0
        self._rows, self._head, self._defaults, self._summed = rows, head.eval(), defaults, summed
        widths = [self._width] * self.clients
        self._cache = EmbeddingTable(rows, widths, summed=False) if cached else None
        self._requests = Requests()
        self._sequences = [-1] * self.clients
        self._marks = marks or Marks()

    def ask(self, rows: RowIds, *, patient: bool = False) -> tuple[Inquiry, list[Request]]:
        """Open an inquiry for these rows (distinct, ascending); return it with the requests to send."""
        inquiry = Inquiry(
            rows,
            patient,
            np.zeros((len(rows), self.clients, self._width), np.float32),
            np.full((len(rows), self.clients), AWAITED, dtype=np.uint8),
        )
        if self._cache is not None:
            _recall(inquiry, self._cache)
            self.recalled += int((inquiry.states == ANSWERED).sum())
        self.needed += inquiry.states.size
        self.inquiries.append(inquiry)
        return inquiry, [request for client in range(self.clients) for request in self._ask(inquiry, client)]

    def give_up(self, inquiry: Inquiry) -> None:
        """Stop waiting for the cells that are still awaited."""
        for client in range(self.clients):
            if len(inquiry.awaited(client)):
                self.overdue.add(client)
                inquiry.mark(client, ABSENT if client in self.absent else LATE)

    def score(self, inquiry: Inquiry) -> Tensor:
        """Close the inquiry; return the outputs [rows, outputs], with defaults for missing embeddings."""
        self.inquiries.remove(inquiry)
        return self.outputs(inquiry)

    @torch.no_grad()
    def outputs(self, inquiry: Inquiry) -> Tensor:
        """Return the head's outputs [rows, outputs], with defaults for missing embeddings."""
        answered = torch.from_numpy(inquiry.states == ANSWERED)[..., None]
        inputs = torch.where(answered, torch.from_numpy(inquiry.embeddings), self._defaults)
        outputs: Tensor = self._head(inputs.sum(1) if self._summed else inputs.flatten(1))
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
        if not 0 <= client < self.clients:
            raise InvalidMessage("VFL-4101", f"client must be in 0..{self.clients - 1}. Found {client}.")
        if isinstance(message, Join):
            return self._take_join(client)
        if isinstance(message, Leave):
            self._take_leave(client)
            return []
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
        requests = [request for inquiry in self.inquiries for request in self._ask(inquiry, client)]
        welcome = Welcome(client, 0, (0,) * self.clients, mark=self._marks.recall(client))
        return [welcome, *requests]

    def _take_leave(self, client: int) -> None:
        self.absent.add(client)
        self._requests.forget(client)
        for inquiry in self.inquiries:
            if not inquiry.patient:
                inquiry.mark(client, ABSENT)

    def _take_mark(self, message: LedgerMark) -> None:
        self._check_sequence(message.client, message.sequence)
        self._sequences[message.client] = message.sequence
        self._marks.remember(message)

    def _take_answer(self, message: Refresh | Decline) -> None:
        client = message.client
        request = self._requests.find(client, message.request)
        self._check_sequence(client, message.sequence)
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

    def _check_sequence(self, client: int, sequence: int) -> None:
        require_growth(client, sequence, self._sequences[client])

    def _check_answer(self, answer: Refresh, request: Asked) -> None:
        rows = answer.rows
        if len(np.unique(rows)) < len(rows) or not np.isin(rows, request.rows).all():
            raise InvalidMessage(
                "VFL-4103",
                f"the answer to request {request.number} must have distinct rows of the request. Found other "
                f"rows, or a row twice, from client {answer.client}.",
            )
        if answer.embeddings.shape[1] != self._width:
            raise InvalidMessage(
                "VFL-4104",
                f"embeddings of client {answer.client} must be {self._width} wide. "
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
