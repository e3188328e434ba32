"""The ceiling: the same models and the same loss, with every column in one place."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from vafl.protocol.descent import Descent
from vafl.protocol.gradients import pull_back
from vafl.protocol.head_step import Loss, mean_weights
from vafl.protocol.losslog import LossLog
from vafl.protocol.rows import Matrix
from vafl.protocol.schedule import BatchSchedule
from vafl.protocol.tensors import as_arrays


class Centralised:
    """Minibatch descent over all parties' models and the head at once; nothing is ever stale.

    Args:
        features: [rows, ...] of each party.
        models: the parties' embedding models.
        head: on the sum or on the concatenation of the embeddings.
        summed: which of the two.
        descents: of the parties' models, then of the head.
        l2: the parties' regulariser.
        weights: [rows], of mean 1: how much each row counts in the loss; None if all count the same.
    """

    def __init__(
        self,
        features: Sequence[Tensor],
        labels: Tensor,
        models: Sequence[nn.Module],
        head: nn.Module,
        loss: Loss,
        descents: Sequence[Descent],
        schedule: BatchSchedule,
        *,
        summed: bool,
        l2: float = 0.0,
        weights: Matrix | None = None,
    ) -> None:
        self.models, self.head = list(models), head
        self.iteration = 0
        self._features, self._labels, self._loss = list(features), labels, loss
        self._weights = weights
        self._descents, self._schedule, self._summed, self._l2 = list(descents), schedule, summed, l2
        self.losses = LossLog()

    @np.errstate(all="ignore")
    def step(self) -> None:
        """One minibatch: every party's model and the head move together."""
        rows = torch.from_numpy(self._schedule.batch(self.iteration))
        parts = [
            model(features.index_select(0, rows))
            for model, features in zip(self.models, self._features, strict=True)
        ]
        inputs = torch.stack(parts).sum(0) if self._summed else torch.cat(parts, dim=1)
        outputs = self.head(inputs)
        labels, weights = self._labels.index_select(0, rows), mean_weights((len(rows),))
        if self._weights is not None:
            weights = weights * self._weights[rows.numpy()]
        loss, slopes = self._loss(outputs.detach().numpy(), labels.numpy(), weights)
        self.losses.check(loss, self.iteration)
        self.losses.note(loss)
        parameters = [parameter for descent in self._descents for parameter in descent.parameters]
        gradients = as_arrays(pull_back(outputs, torch.from_numpy(slopes), parameters))
        for descent in self._descents:
            mine, gradients = gradients[: len(descent.parameters)], gradients[len(descent.parameters) :]
            l2 = 0.0 if descent is self._descents[-1] else self._l2
            descent.step(mine, self.iteration, l2=l2)
        self.iteration += 1
