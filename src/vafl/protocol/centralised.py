"""Centralised training: the same models and loss with all columns in one place, as an upper bound."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from vafl.arrays import Floats
from vafl.protocol.descent import Descent
from vafl.protocol.gradients import pull_back
from vafl.protocol.head_step import Loss, mean_weights
from vafl.protocol.losslog import LossLog
from vafl.protocol.schedule import BatchSchedule
from vafl.protocol.tensors import as_arrays


class Centralised:
    """Minibatch descent on all parties' models and the head together. No embedding is stale.

    Args:
        features: the features of each party, [rows, ...].
        models: the parties' embedding models.
        head: maps the sum or the concatenation of the embeddings to outputs.
        summed: whether the head takes the sum.
        descents: one for each party's model, then one for the head.
        l2: coefficient of the parties' regulariser.
        weights: [rows] with mean 1, the weight of each row in the loss; None if all weights are equal.
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
        weights: Floats | None = None,
    ) -> None:
        self.models, self.head = list(models), head
        self.iteration = 0
        self._features, self._labels, self._loss = list(features), labels, loss
        self._weights = weights
        self._descents, self._schedule, self._summed, self._l2 = list(descents), schedule, summed, l2
        self.losses = LossLog()

    @np.errstate(all="ignore")
    def step(self) -> None:
        """Step every party's model and the head on one minibatch."""
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
            count = len(descent.parameters)
            part, gradients = gradients[:count], gradients[count:]
            l2 = 0.0 if descent is self._descents[-1] else self._l2  # the head has no regulariser
            descent.step(part, self.iteration, l2=l2)
        self.iteration += 1
