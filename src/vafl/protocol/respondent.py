"""What a client does whether it trains or not: it answers requests for embeddings of its rows.

Features and model never leave this object; what leaves are embeddings, perturbed if the client is private.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vafl import kernels
from vafl.errors import InvalidMessage
from vafl.protocol.messages import (
    EVERYTHING,
    ClientMessage,
    Decline,
    Join,
    LedgerMark,
    Refresh,
    Request,
    ServerMessage,
    Welcome,
    made_here,
)
from vafl.protocol.rows import Matrix, Rows, check_rows, in_parts

Perturb = Callable[[Tensor], Tensor]
UploadKind = Literal["batch", "refresh", "request", "evaluation", "prediction"]
_EMBED_ROWS = 4096  # rows embedded at once when no gradient is needed: bounds memory


class Budget(Protocol):
    """Decides what may still be uploaded: the accounts of a private client's records, in its ledger."""

    def spend(self, rows: Rows, kind: UploadKind, *, whole: bool = False) -> Rows:
        """Charges an upload and gives the rows that may be uploaded; `whole`: all of them or none."""

    def recognise(self, mark: bytes) -> None:
        """Raise LedgerError unless the ledger knows this mark, the last one that the server received."""

    def due_mark(self) -> bytes:
        """Return a fresh mark for the server, if one is due; else return nothing."""

    def close(self) -> None:
        """Close the ledger."""


@torch.no_grad()
def embed(model: nn.Module, features: Tensor, rows: Rows | None = None) -> Tensor:
    """Embeddings [rows, width] of these rows (None: all) without a graph, in bounded memory."""
    if rows is None:
        parts = iter(torch.split(features, _EMBED_ROWS))
    else:
        held = features.numpy()
        parts = (torch.from_numpy(kernels.gather(held, part)) for part in in_parts(rows, _EMBED_ROWS))
    first: Tensor = model(next(parts))
    count = len(features) if rows is None else len(rows)
    if len(first) == count:
        return first
    # Filled part by part: to join a list of parts would need the memory twice.
    embeddings = first.new_empty(count, *first.shape[1:])
    embeddings[: len(first)] = first
    start = len(first)
    for part in parts:
        embeddings[start : start + len(part)] = model(part)
        start += len(part)
    return embeddings


@dataclass(frozen=True)
class Permutations:
    """The features that the server may ask a client to permute, to measure their importance.

    Attributes:
        generator: draws the permutations. No other party knows its state.
        groups: name -> numbers of the features that are permuted together. The names are sent to the server.
    """

    generator: np.random.Generator
    groups: Mapping[str, Rows]


class Respondent:
    """Holds the features and the trained model of one party, for predictions.

    Args:
        index: which column of the server's table is this client's.
        features: [rows, ...], the party's own features, one line a record.
        model: maps features to embeddings [batch, width].
        perturb: makes embeddings of what the model gives before they leave, or None.
        budget: limits what may be uploaded, or None.
        permutations: what the server may ask to be permuted; None refuses all of it.

    Attributes:
        finished: why the client makes no more uploads; empty while it does.
        whole: whether it answers for all rows asked for, or for none.
    """

    whole = False

    def __init__(
        self,
        index: int,
        features: Tensor,
        model: nn.Module,
        *,
        perturb: Perturb | None = None,
        budget: Budget | None = None,
        permutations: Permutations | None = None,
    ) -> None:
        self.index, self.model = index, model
        self.finished = ""
        self._features = features.contiguous()  # or a gather copies all of it
        self._perturb, self._budget, self._permutations = perturb, budget, permutations
        self._sequence = 0

    @property
    def rows(self) -> int:
        """How many records it can be asked for."""
        return len(self._features)

    @property
    def noisy(self) -> bool:
        """Whether every upload gets fresh noise."""
        return self._perturb is not None

    @property
    def owed(self) -> int:
        """How many answers the server owes."""
        return 0

    @property
    def waiting(self) -> bool:
        """Whether the client cannot begin anything by itself now."""
        return True

    @property
    def server_fault(self) -> str:
        """What the server has sent that no honest server sends; empty if nothing."""
        return ""

    def close(self) -> None:
        """Let go of the files that the client holds open."""
        if self._budget is not None:
            self._budget.close()

    def wake(self) -> list[ClientMessage]:
        """Begins an activation. Call it only when not `waiting`."""
        return []

    def join(self) -> Join:
        """What the client says first on a connection: where it stands."""
        self._sequence = 0
        groups = () if self._permutations is None else tuple(self._permutations.groups)
        return Join(self.index, groups=tuple(name.encode() for name in groups))

    @np.errstate(all="ignore")  # what is not finite any more is noticed where it is used
    def receive(self, message: ServerMessage) -> list[ClientMessage]:
        """Takes one message of the server and gives what the client says next.

        Raises:
            InvalidMessage: the message broke a rule; nothing has changed.
            Diverged: the model's embeddings are not finite any more.
        """
        if message.client != self.index:
            raise InvalidMessage(f"client {self.index} was sent a message for client {message.client}.")
        return self._with_mark(self._take(message))

    def _with_mark(self, said: list[ClientMessage]) -> list[ClientMessage]:
        """Add a mark of the ledger to what is sent, if one is due."""
        if self._budget is not None and (mark := self._budget.due_mark()):
            said.append(LedgerMark(self.index, self._next(), mark))
        return said

    def _take(self, message: ServerMessage) -> list[ClientMessage]:
        if isinstance(message, Welcome) and self._budget is not None:
            self._budget.recognise(message.mark)
        if not isinstance(message, Request):
            return []
        self._check_rows(message.rows)
        return self._answer_permuted(message) if message.permute else self._answer(message)

    def _answer(self, request: Request) -> list[ClientMessage]:
        """Embeddings of the rows that may be uploaded; the others are left out."""
        rows = request.rows
        if self._budget is not None:
            rows = self._budget.spend(rows, "prediction", whole=self.whole)
            if not len(rows):
                return [self._decline(request.number)]
        embeddings = self._embedded(self.model, self._features, rows, evaluating=True)
        return self._say_rows(rows, embeddings, request.number)

    def _answer_permuted(self, request: Request) -> list[ClientMessage]:
        """Answer with embeddings of rows among which this client has permuted some of its features.

        Charge first: the permutation must not move values of records that may not be uploaded any more.
        """
        allowed, group, rows = self._permutations, request.permute, request.rows
        if allowed is None or not (group == EVERYTHING or group in allowed.groups):
            return [self._decline(request.number, f"{group} is not permuted here: prediction.importance")]
        # If some features move and others stay, two of the answers depend on each record: two charges.
        for _ in range(1 if group == EVERYTHING else 2):
            if self._budget is not None and len(rows):
                rows = self._budget.spend(rows, "prediction", whole=self.whole)
        if not len(rows):
            return [self._decline(request.number)]
        sources = rows[allowed.generator.permutation(len(rows))]
        if group == EVERYTHING:
            embeddings = self._embedded(self.model, self._features, sources, evaluating=True)
        else:
            features, moved = self._features[rows], torch.from_numpy(allowed.groups[group])
            features[:, moved] = self._features[sources][:, moved]
            embeddings = self._embedded(self.model, features, None, evaluating=True)
        return self._say_rows(rows, embeddings, request.number)

    def _check_rows(self, rows: Rows) -> None:
        """One charge buys one embedding of a record, never several copies with noise of their own."""
        check_rows(rows, len(self._features))

    def _embedded(self, model: nn.Module, features: Tensor, rows: Rows | None, *, evaluating: bool) -> Matrix:
        if evaluating:
            model.eval()
        embeddings = embed(model, features, rows)
        if evaluating:
            model.train()
        if self._perturb is not None:
            with torch.no_grad():
                embeddings = self._perturb(embeddings)
        return embeddings.float().contiguous().numpy()

    def _decline(
        self, request: int, reason: str = "the privacy budget of rows asked for is spent"
    ) -> Decline:
        return Decline(self.index, self._next(), request, reason)

    def _say_rows(self, rows: Rows, embeddings: Matrix, request: int | None) -> list[ClientMessage]:
        with made_here():
            return [Refresh(self.index, self._next(), rows, embeddings, request)]

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence
