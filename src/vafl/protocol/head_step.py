"""The arithmetic of a server step: the loss on the rows of a group of turns, and its gradients."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from torch import nn

from vafl import kernels
from vafl.arrays import Array, Block, Floats, Labels, Matrix
from vafl.protocol.descent import Descent
from vafl.protocol.gradients import head_with_way_back
from vafl.protocol.losslog import LossLog
from vafl.protocol.rows import slices_of
from vafl.protocol.rules import Turn
from vafl.protocol.table import EmbeddingTable

Loss = Callable[[Matrix, Array, Matrix], tuple[float, Matrix]]
Mask = Callable[[Matrix], Matrix]


class HeadStep:
    """Evaluates the loss once for a group of turns, and steps the head by their mean gradient.

    Args:
        labels: [training rows], one label per row.
        head: maps the result of `table.read` to outputs.
        loss: (outputs, labels, weights [batch]) -> the weighted sum of the rows' losses, and its slopes
            [batch, outputs].
        descent: steps the head's parameters.
        mask: transforms the gradients [batch, width] before they are sent, for example by noise. None sends
            them as they are.
        weights: [training rows] with mean 1, the weight of each row in the loss; None if all weights are
            equal.

    Attributes:
        losses: the losses of the steps.
    """

    def __init__(
        self,
        labels: Labels,
        head: nn.Module,
        loss: Loss,
        descent: Descent,
        mask: Mask | None,
        weights: Floats | None = None,
    ) -> None:
        self.losses = LossLog()
        self._labels, self._weights = _compact(labels), weights
        self._loss, self._descent, self._mask = loss, descent, mask
        self._through_head = head_with_way_back(head, descent.parameters)

    def __call__(
        self, table: EmbeddingTable, group: Sequence[Turn], iteration: int, *, shared: bool
    ) -> list[Matrix]:
        """Return, for each turn, the gradient of the mean loss of its rows, [batch, width].

        The head steps, unless the turns are queries. The weights are not normalised within a batch: a batch
        with many heavy rows counts more. So the expected gradient is that of the weighted loss over all rows.

        Args:
            shared: whether all turns have the same rows.

        Raises:
            Diverged: the loss is not finite. Nothing has changed.
        """
        turns = group[:1] if shared else group
        rows = turns[0].rows if len(turns) == 1 else np.concatenate([turn.rows for turn in turns])
        outputs, pull_back = self._through_head(table.read(rows))
        weights = mean_weights(tuple([turn.rows.size for turn in turns]))
        if self._weights is not None:
            weights = weights * kernels.gather(self._weights, rows)
        loss, slopes = self._loss(outputs, kernels.gather(self._labels, rows), weights)
        self.losses.check(loss, iteration)
        parts, steps = pull_back(slopes, _blocks(table, turns if table.sums is not None else group, shared))
        if group[0].steps:
            self.losses.note(loss)
            self._descent.step(steps, iteration)
        if len(turns) > 1:
            # The slopes are of the mean over the turns. Each client needs the gradient of its own turn's mean
            # loss.
            parts = [part * np.float32(len(turns)) for part in parts]
        if len(parts) < len(group):
            parts *= len(group)  # all clients share the gradient of the sum
        if self._mask is None:
            return parts
        # Clients that share a gradient get the same noise. Independent noise for each would average out.
        masked = {id(part): self._mask(part) for part in parts}
        return [masked[id(part)] for part in parts]


def _compact(labels: Labels) -> Array:
    """Return class labels in the smallest integer type, so that those of 10^7 rows fit into the cache."""
    if labels.dtype.kind in "iu" and labels.min(initial=0) >= 0:
        labels = labels.astype(np.min_scalar_type(labels.max(initial=0)))
    return np.ascontiguousarray(labels)


def _blocks(table: EmbeddingTable, turns: Sequence[Turn], shared: bool) -> list[Block]:
    """Return the block of the head's input that holds the embeddings of each turn.

    Args:
        shared: whether all turns have the same rows. Otherwise the rows of the turns follow each other.
    """
    sizes = [turn.rows.size for turn in turns]
    rows = [slice(None)] * len(turns) if shared else slices_of(sizes)
    if table.sums is not None:
        return [(part, slice(None)) for part in rows]
    return [(part, table.columns[turn.client]) for part, turn in zip(rows, turns, strict=True)]


@lru_cache(maxsize=16)
def mean_weights(sizes: tuple[int, ...]) -> Matrix:
    """Return weights [rows] that turn a sum over all rows into the mean of the turns' means."""
    return np.concatenate([np.full(size, 1 / (size * len(sizes)), np.float32) for size in sizes])
