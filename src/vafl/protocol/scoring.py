"""The server of a federation that makes no steps: it asks clients for embeddings of rows, and scores them.

It keeps no clock: whoever drives it says when a client has had long enough to answer.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

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
from vafl.protocol.rows import Matrix, Rows
from vafl.protocol.table import EmbeddingTable

STATES = ("answered", "absent", "late", "declined", "awaited")  # of a row and a client
ANSWERED, ABSENT, LATE, DECLINED, AWAITED = range(len(STATES))


@dataclass(eq=False)
class Inquiry:
    """Rows that are asked of every client at once, and what has come of it.

    Attributes:
        rows: [rows], distinct and ascending.
        patient: whether clients that are gone are waited for: they may come back.
        embeddings: [rows, clients, width].
        states: [rows, clients], each an index into `STATES`.
    """

    rows: Rows
    patient: bool
    embeddings: npt.NDArray[np.float32]
    states: npt.NDArray[np.uint8]

    @property
    def is_open(self) -> bool:
        """Whether anything may still come."""
        return bool((self.states == AWAITED).any())

    def awaited(self, client: int) -> Rows:
        """The rows this client has yet to answer for."""
        return self.rows.compress(self.states[:, client] == AWAITED)

    def take(self, client: int, rows: Rows, embeddings: Matrix) -> None:
        """Notes embeddings of those of these rows that are asked for."""
        places = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        fits = self.rows[places] == rows
        chosen = places[fits]
        self.embeddings[chosen, client] = embeddings[fits]
        self.states[chosen, client] = ANSWERED

    def mark(self, client: int, state: int, rows: Rows | None = None) -> None:
        """Notes why nothing comes for these rows (None: all) that this client has not answered for."""
        open_ = self.states[:, client] == AWAITED
        if rows is not None:
            open_ &= np.isin(self.rows, rows)
        self.states[open_, client] = state


class Scorer:
    """Asks and scores; knows the clients only by their messages.

    Args:
        rows: how many records there are to ask for.
        head: maps the clients' embeddings, summed or one after the other, to outputs.
        defaults: [clients, width], what stands in for the embedding of a client that does not answer.
        summed: what the head sees.
        cached: whether embeddings are kept and used again, which costs a private client nothing.
        marks: remembers the marks of the clients' ledgers; by default only while this object lives.

    Attributes:
        absent: the clients that are gone.
        overdue: clients that kept an inquiry waiting too long: not asked again before they say something.
        inquiries: what is asked and not scored yet.
        needed, recalled: cells (a row and a client) that inquiries needed, and how many of them were cached.
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

    def ask(self, rows: Rows, *, patient: bool = False) -> tuple[Inquiry, list[Request]]:
        """Asks every client that is here for rows (distinct, ascending) that nobody has asked it for."""
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
        return inquiry, [said for client in range(self.clients) for said in self._ask(inquiry, client)]

    def give_up(self, inquiry: Inquiry) -> None:
        """Waits no longer: what has not come by now stays missing."""
        for client in range(self.clients):
            if len(inquiry.awaited(client)):
                self.overdue.add(client)
                inquiry.mark(client, ABSENT if client in self.absent else LATE)

    def score(self, inquiry: Inquiry) -> Tensor:
        """Closes the inquiry; gives the outputs [rows, outputs], with defaults for what has not come."""
        self.inquiries.remove(inquiry)
        return self.outputs(inquiry)

    @torch.no_grad()
    def outputs(self, inquiry: Inquiry) -> Tensor:
        """Return the head's outputs [rows, outputs], with defaults for what has not come."""
        came = torch.from_numpy(inquiry.states == ANSWERED)[..., None]
        inputs = torch.where(came, torch.from_numpy(inquiry.embeddings), self._defaults)
        outputs: Tensor = self._head(inputs.sum(1) if self._summed else inputs.flatten(1))
        return outputs

    def is_under_way(self, client: int) -> bool:
        """False: a client that only answers has nothing that another process would have to know of."""
        return False

    def receive(self, message: ClientMessage) -> list[ServerMessage]:
        """Takes one message and gives the replies that follow from it.

        Raises:
            InvalidMessage: the message broke a rule; nothing has changed.
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
                f"a client joins, and answers what it is asked. Found {type(message).__name__} of client "
                f"{client}: no steps are made here.",
            )
        if isinstance(message, LedgerMark):
            self._take_mark(message)
        else:
            self._take_answer(message)
        return []

    # --- each kind of message: first every check, then the change ---

    def _take_join(self, client: int) -> list[ServerMessage]:
        self.absent.discard(client)
        self.overdue.discard(client)
        self._sequences[client] = -1
        self._requests.forget(client)
        owed = [said for inquiry in self.inquiries for said in self._ask(inquiry, client)]
        welcome = Welcome(client, 0, (0,) * self.clients, mark=self._marks.recall(client))
        return [welcome, *owed]

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
        for inquiry in self.inquiries:
            inquiry.mark(client, DECLINED, request.rows)

    def _check_sequence(self, client: int, sequence: int) -> None:
        require_growth(client, sequence, self._sequences[client])

    def _check_answer(self, answer: Refresh, request: Asked) -> None:
        rows = answer.rows
        if len(np.unique(rows)) < len(rows) or not np.isin(rows, request.rows).all():
            raise InvalidMessage(
                "VFL-4103", f"the answer to request {request.number} must hold rows of it, each at most once."
            )
        if answer.embeddings.shape[1] != self._width:
            raise InvalidMessage(
                "VFL-4104",
                f"embeddings of client {answer.client} must be {self._width} wide. "
                f"Found {answer.embeddings.shape[1]}.",
            )

    # --- asking ---

    def _ask(self, inquiry: Inquiry, client: int) -> Iterable[Request]:
        if client in self.overdue:
            inquiry.mark(client, ABSENT if client in self.absent else LATE)
        if client in self.absent:
            if not inquiry.patient:
                inquiry.mark(client, ABSENT)
            return
        rows = inquiry.awaited(client)
        for request in self._requests.of(client):
            rows = np.setdiff1d(rows, request.rows, assume_unique=True)
        if len(rows):
            yield self._requests.make(client, rows)


def _recall(inquiry: Inquiry, cache: EmbeddingTable) -> None:
    """Takes what is kept already."""
    for client in range(cache.clients):
        known = inquiry.rows[cache.stored_at[inquiry.rows, client] >= 0]
        if len(known):
            inquiry.take(client, known, cache.column(client)[known])
