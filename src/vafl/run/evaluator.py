"""Evaluation of the complete model on held-out rows, in a process that has the models of all parties."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from vafl.data.split import Parts
from vafl.models.metrics import Figures, Metrics
from vafl.models.probabilities import Calibration
from vafl.protocol.prediction_client import Budget, embed


class Evaluator:
    """Measures the complete model on the held-out rows.

    It reads the models of all parties, so only simulations can use it.

    Args:
        models, features: one of each per party; features are [rows, ...].
        labels: [rows].
        parts: the numbers of training, validation and test rows.
        summed: whether the head takes the sum of the embeddings (True) or their concatenation.
        undo: reverses the effect of class weights on the outputs before they are measured.
        budgets: one per party if they are private. Evaluations are charged to them, as in a federation. If a
            party's budget is exhausted, its last embeddings are used, or zeros if there are none.

    Attributes:
        measured: part -> the head's outputs on these rows at the last evaluation.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        features: Sequence[Tensor],
        head: nn.Module,
        labels: Tensor,
        metrics: Metrics,
        parts: Parts,
        *,
        summed: bool,
        undo: Calibration | None = None,
        budgets: Sequence[Budget] = (),
    ) -> None:
        self._models, self._features = list(models), list(features)
        self._head, self._labels, self._metrics, self._summed = head, labels, metrics, summed
        self._parts, self._budgets, self._undo = parts, budgets, undo or Calibration()
        self._last_sent: dict[tuple[int, str], Tensor] = {}  # by party and part
        self.measured: dict[str, Tensor] = {}

    def __call__(self) -> Figures:
        """Measure on the validation rows, or on the test rows if there are none."""
        return self._measure(self._parts.watched)

    def test(self) -> Figures | None:
        """Measure on the test rows; None if `__call__` does that already."""
        return self._measure("test") if self._parts.validation else None

    def _measure(self, part: str) -> Figures:
        rows = self._parts.slices[part]
        parts = _embeddings(self._models, [features[rows] for features in self._features])
        for party, budget in enumerate(self._budgets):
            place = (party, part)
            if len(budget.spend(np.arange(rows.start, rows.stop), "evaluation", whole=True)):
                self._last_sent[place] = parts[party]
            parts[party] = self._last_sent.get(place, torch.zeros_like(parts[party]))
        self.measured[part] = _outputs(self._head, parts, summed=self._summed)
        return self._metrics.measure(self._undo(self.measured[part]), self._labels[rows])

    def outputs(self, features: Sequence[Tensor]) -> Tensor:
        """Return the head's outputs [rows, outputs] for one feature tensor per party."""
        return outputs(self._models, self._head, features, summed=self._summed)

    def embeddings(self) -> list[Tensor]:
        """Return each party's embeddings of the validation and test rows, [held-out rows, width]."""
        return _embeddings(self._models, [features[self._parts.train :] for features in self._features])


def outputs(
    models: Sequence[nn.Module], head: nn.Module, features: Sequence[Tensor], *, summed: bool
) -> Tensor:
    """Return the outputs [rows, outputs] of the complete model for the features of all parties."""
    return _outputs(head, _embeddings(models, features), summed=summed)


@torch.no_grad()
def _outputs(head: nn.Module, parts: list[Tensor], *, summed: bool) -> Tensor:
    with _evaluating([head]):
        inputs = torch.stack(parts).sum(0) if summed else torch.cat(parts, dim=1)
        return head(inputs)  # type: ignore[no-any-return]


def _embeddings(models: Sequence[nn.Module], features: Sequence[Tensor]) -> list[Tensor]:
    with _evaluating(models):
        return [embed(model, rows) for model, rows in zip(models, features, strict=True)]


@contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Set the modules to evaluation mode inside the block."""
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module in modules:
            module.train()
