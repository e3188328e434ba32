"""The whole model on rows held out, where one process has all of it."""

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
    """Measures the whole model on the held-out rows. It sees every party's model, which only a simulator may.

    Args:
        models, features: one of each for every party; features are [rows, ...].
        labels: [rows].
        parts: which rows are for validation and for testing.
        summed: whether the head sees the sum or the concatenation of the embeddings.
        undo: undoes the effect of class weights on the outputs before they are measured.
        budgets: one for each party, if they are private. Evaluations are charged as in a federation. If a
            party's budget is spent, its last embeddings are used, or zeros.

    Attributes:
        measured: the name of a part -> the head's outputs on these rows when they were last measured.
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
        self._said: dict[tuple[int, str], Tensor] = {}  # by party and part
        self.measured: dict[str, Tensor] = {}

    def __call__(self) -> Figures:
        """Measure on the validation rows, or on the test rows if there are none."""
        return self._measure(self._parts.watched)

    def test(self) -> Figures | None:
        """Measure on the test rows; None if `__call__` does that already."""
        return self._measure("test") if self._parts.validation else None

    def _measure(self, part: str) -> Figures:
        rows = self._parts.slices[part]
        parts = _embeddings(self._models, [own[rows] for own in self._features])
        for party, budget in enumerate(self._budgets):
            place = (party, part)
            if len(budget.spend(np.arange(rows.start, rows.stop), "evaluation", whole=True)):
                self._said[place] = parts[party]
            parts[party] = self._said.get(place, torch.zeros_like(parts[party]))
        self.measured[part] = _outputs(self._head, parts, summed=self._summed)
        return self._metrics.measure(self._undo(self.measured[part]), self._labels[rows])

    def outputs(self, features: Sequence[Tensor]) -> Tensor:
        """The head's outputs [rows, outputs] for one feature tensor a party."""
        return outputs(self._models, self._head, features, summed=self._summed)

    def embeddings(self) -> list[Tensor]:
        """Each party's embeddings [held-out rows, width] of validation and test rows."""
        return _embeddings(self._models, [own[self._parts.train :] for own in self._features])


def outputs(
    models: Sequence[nn.Module], head: nn.Module, features: Sequence[Tensor], *, summed: bool
) -> Tensor:
    """What the whole model says, [rows, outputs], given every party's features."""
    return _outputs(head, _embeddings(models, features), summed=summed)


@torch.no_grad()
def _outputs(head: nn.Module, parts: list[Tensor], *, summed: bool) -> Tensor:
    with _evaluating([head]):
        inputs = torch.stack(parts).sum(0) if summed else torch.cat(parts, dim=1)
        return head(inputs)  # type: ignore[no-any-return]


def _embeddings(models: Sequence[nn.Module], features: Sequence[Tensor]) -> list[Tensor]:
    with _evaluating(models):
        return [embed(model, own) for model, own in zip(models, features, strict=True)]


@contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module in modules:
            module.train()
