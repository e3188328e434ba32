"""The arithmetic of a server step: the loss on the rows of a group of turns, and its gradients."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
from torch import nn

from vafl import kernels
from vafl.arrays import Array, Floats, Labels, Matrix
from vafl.protocol.descent import Descent
from vafl.protocol.gradients import head_with_way_back
from vafl.protocol.losslog import LossLog
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
        gradient, steps = pull_back(slopes)
        if group[0].steps:
            self.losses.note(loss)
            self._descent.step(steps, iteration)
        parts = _split(gradient, table, group, shared)
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


def _split(gradient: Matrix, table: EmbeddingTable, group: Sequence[Turn], shared: bool) -> list[Matrix]:
    """Return each turn's part of the gradient."""
    if shared:
        blocks: Sequence[Matrix] = [gradient] * len(group)
    elif len(group) == 1:
        blocks = [gradient]
    else:
        # `gradient` is of the mean over the turns. Each client needs the gradient of its own turn's mean
        # loss.
        ends = list(accumulate(len(turn.rows) for turn in group))
        blocks = np.split(gradient * np.float32(len(group)), ends[:-1])
    if table.sums is not None:
        return list(blocks)
    columns = [table.columns[turn.client] for turn in group]
    return [np.ascontiguousarray(block[:, column]) for block, column in zip(blocks, columns, strict=True)]


@lru_cache(maxsize=16)
def mean_weights(sizes: tuple[int, ...]) -> Matrix:
    """Return weights [rows] that turn a sum over all rows into the mean of the turns' means."""
    return np.concatenate([np.full(size, 1 / (size * len(sizes)), np.float32) for size in sizes])
