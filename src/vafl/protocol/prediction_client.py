"""A client that answers requests for embeddings of its rows. The training client builds on it.

Features and model parameters never leave this object. Only embeddings leave it, perturbed if the client is
private.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vafl import kernels
from vafl.arrays import Matrix, RowIds
from vafl.errors import InvalidMessage
from vafl.protocol.messages import (
    EVERYTHING,
    ClientMessage,
    Decline,
    Join,
    Keys,
    LedgerMark,
    Rekey,
    Request,
    ServerMessage,
    Welcome,
)
from vafl.protocol.rows import check_rows, in_parts
from vafl.protocol.sender import PlainSender, Sender

Perturb = Callable[[Tensor], Tensor]
UploadKind = Literal["batch", "refresh", "request", "evaluation", "prediction"]
# Rows and bytes of features embedded at once when no gradient is needed. Both bound memory: 4096 images of
# 200 x 200 pixels have 2 GB, and the layers of a network need several times as much.
_EMBED_ROWS, _EMBED_BYTES = 4096, 64 << 20


class Budget(Protocol):
    """The privacy budgets of a client's records, which its ledger keeps."""

    def spend(self, rows: RowIds, kind: UploadKind, *, whole: bool = False) -> RowIds:
        """Charge an upload of these rows; return the rows that may be uploaded: all or none if `whole`."""

    def recognise(self, mark: bytes) -> None:
        """Raise LedgerError unless the ledger contains this mark, the last one that the server received."""

    def due_mark(self) -> bytes:
        """Return a fresh mark for the server if one is due, otherwise b""."""

    def close(self) -> None:
        """Close the ledger."""


def rows_at_once(features: Tensor) -> int:
    """Return how many rows of these features to embed at once."""
    row_bytes = features.element_size() * math.prod(features.shape[1:])
    return max(1, min(_EMBED_ROWS, _EMBED_BYTES // max(1, row_bytes)))


@torch.no_grad()
def embed(model: nn.Module, features: Tensor, rows: RowIds | None = None) -> Tensor:
    """Return embeddings [rows, width] of these rows (None: all), without a graph and in bounded memory."""
    size = rows_at_once(features)
    if rows is None:
        parts = iter(torch.split(features, size))
    else:
        array = features.numpy()
        parts = (torch.from_numpy(kernels.gather(array, part)) for part in in_parts(rows, size))
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
        groups: name -> numbers of the features that are permuted together. The server receives the names.
    """

    generator: np.random.Generator
    groups: Mapping[str, RowIds]


class PredictionClient:
    """Holds the features and the trained model of one party, for predictions.

    Args:
        index: the number of this client, which is its column in the server's table.
        features: [rows, ...], the party's features, one row per record.
        model: maps features to embeddings [batch, width].
        perturb: turns the model's outputs into the embeddings that are sent, for example by clipping and
            noise. None sends the outputs.
        budget: limits the uploads of each record. None sets no limit.
        permutations: the features that the server may ask to permute. None declines all such requests.
        sender: makes the messages with embeddings. None sends them without masks.

    Attributes:
        finished: the reason why the client makes no more uploads; empty while it makes them.
    """

    def __init__(
        self,
        index: int,
        features: Tensor,
        model: nn.Module,
        *,
        perturb: Perturb | None = None,
        budget: Budget | None = None,
        permutations: Permutations | None = None,
        sender: Sender | None = None,
    ) -> None:
        self.index, self.model = index, model
        self.finished = ""
        self._features = features.contiguous()  # otherwise each gather would copy all features
        self._perturb, self._budget, self._permutations = perturb, budget, permutations
        self.sender = sender or PlainSender(index)

    @property
    def rows(self) -> int:
        """Return how many records the server can ask for."""
        return len(self._features)

    @property
    def noisy(self) -> bool:
        """Return whether uploads are perturbed."""
        return self._perturb is not None

    @property
    def owed(self) -> int:
        """Return how many answers the server owes."""
        return 0

    @property
    def waiting(self) -> bool:
        """Return whether the client cannot begin an activation now. A prediction client never does."""
        return True

    @property
    def server_fault(self) -> str:
        """Describe what the server sent that an honest server does not send; empty if there was nothing."""
        return ""

    def close(self) -> None:
        """Close the files that the client holds open."""
        if self._budget is not None:
            self._budget.close()

    def wake(self) -> list[ClientMessage]:
        """Begin an activation; return the messages to send. Call it only while not `waiting`."""
        return []

    def join(self) -> Join:
        """Start a new connection; return the `Join` to send first."""
        self.sender.restart()
        groups = () if self._permutations is None else tuple(self._permutations.groups)
        return Join(self.index, groups=tuple(name.encode() for name in groups))

    # numpy would warn about overflows. The checks of the messages detect them.
    @np.errstate(all="ignore")
    def receive(self, message: ServerMessage) -> list[ClientMessage]:
        """Handle one message from the server; return the messages to send, in order.

        Raises:
            InvalidMessage: the message broke a rule. The state of the client has not changed.
            Diverged: the model's embeddings are not finite.
        """
        if message.client != self.index:
            raise InvalidMessage(
                "VFL-4061",
                f"client {self.index} must receive only its own messages. "
                f"Found one for client {message.client}.",
            )
        return self._with_mark(self._take(message))

    def _with_mark(self, messages: list[ClientMessage]) -> list[ClientMessage]:
        """Append a mark of the ledger if one is due."""
        if self._budget is not None and (mark := self._budget.due_mark()):
            messages.append(LedgerMark(self.index, self.sender.number(), mark))
        return messages

    def _take(self, message: ServerMessage) -> list[ClientMessage]:
        if isinstance(message, Welcome) and self._budget is not None:
            self._budget.recognise(message.mark)
        if isinstance(message, Rekey | Keys):
            return self.sender.rekey(message)
        if not isinstance(message, Request) or not self.sender.ready:
            return []
        self._check_rows(message.rows)
        return self._answer_permuted(message) if message.permute else self._answer(message)

    def _answer(self, request: Request) -> list[ClientMessage]:
        """Return embeddings of the rows that the budget allows, or Decline if it allows none."""
        rows = request.rows
        if self._budget is not None:
            rows = self._budget.spend(rows, "prediction", whole=self.sender.summed)
            if not len(rows):
                return [self._decline(request.number)]
        embeddings = self._embedded(self.model, self._features, rows, evaluating=True)
        return self.sender.refresh(rows, embeddings, request.number)

    def _answer_permuted(self, request: Request) -> list[ClientMessage]:
        """Answer with embeddings of rows among which this client has permuted some of its features.

        Charge first: the permutation must not move values of records that may not be uploaded any more.
        """
        allowed, group, rows = self._permutations, request.permute, request.rows
        if allowed is None or not (group == EVERYTHING or group in allowed.groups):
            reason = f"{group} is not permuted here: prediction.importance of this client does not allow it"
            return [self._decline(request.number, reason)]
        # If some features move and others stay, two of the answers depend on each record: two charges.
        for _ in range(1 if group == EVERYTHING else 2):
            if self._budget is not None and len(rows):
                rows = self._budget.spend(rows, "prediction", whole=self.sender.summed)
        if not len(rows):
            return [self._decline(request.number)]
        sources = rows[allowed.generator.permutation(len(rows))]
        if group == EVERYTHING:
            embeddings = self._embedded(self.model, self._features, sources, evaluating=True)
        else:
            features, moved = self._features[rows], torch.from_numpy(allowed.groups[group])
            features[:, moved] = self._features[sources][:, moved]
            embeddings = self._embedded(self.model, features, None, evaluating=True)
        return self.sender.refresh(rows, embeddings, request.number)

    def _check_rows(self, rows: RowIds) -> None:
        """Raise InvalidMessage unless these are distinct rows of this client.

        The budget is charged once per row. A row named twice would get two embeddings with independent noise
        for one charge.
        """
        check_rows(rows, len(self._features))

    def _embedded(
        self, model: nn.Module, features: Tensor, rows: RowIds | None, *, evaluating: bool
    ) -> Matrix:
        """Return embeddings of these rows (None: all), perturbed if the client is private."""
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
        self, request: int, reason: str = "the privacy budget of the requested rows is spent"
    ) -> Decline:
        return Decline(self.index, self.sender.number(), request, reason)
