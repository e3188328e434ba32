"""Losses (one value a row) and metrics (one value a data set)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F  # noqa: N812
from sklearn.metrics import r2_score, roc_auc_score
from torch import Tensor

_FEW_CLASSES = 64


def softmax(outputs: Tensor, labels: Tensor) -> Tensor:
    """Softmax cross-entropy: outputs [batch, classes], labels int64 [batch] -> [batch].

    For few classes torch's log_softmax is some twenty times faster along the first axis than the last.
    """
    if outputs.shape[1] > _FEW_CLASSES:
        return F.cross_entropy(outputs, labels, reduction="none")
    likelihoods = outputs.t().contiguous().log_softmax(0)
    return likelihoods.gather(0, labels[None])[0].neg()


def binary(outputs: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy: outputs [batch, 1], labels 0.0 or 1.0 [batch] -> [batch]."""
    return F.binary_cross_entropy_with_logits(outputs[:, 0], labels, reduction="none")


def squared(outputs: Tensor, labels: Tensor) -> Tensor:
    """Squared error: outputs [batch, 1], labels [batch] -> [batch]."""
    return (outputs[:, 0] - labels).square()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": softmax,
    "binary": binary,
    "squared": squared,
}


def accuracy(outputs: Tensor, labels: Tensor) -> float:
    """Share of rows whose largest output (or sign, for one output) is the label."""
    predicted = outputs[:, 0] > 0 if outputs.shape[1] == 1 else outputs.argmax(1)
    return float((predicted == labels).float().mean())


def auc(outputs: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve of the one output, or of the difference of two."""
    scores = outputs[:, 0] if outputs.shape[1] == 1 else outputs[:, 1] - outputs[:, 0]
    return float(roc_auc_score(labels.numpy(), scores.numpy()))


def r2(outputs: Tensor, labels: Tensor) -> float:
    """Coefficient of determination."""
    return float(r2_score(labels.numpy().astype(np.float64), outputs[:, 0].numpy().astype(np.float64)))


@dataclass(frozen=True)
class Metric:
    """A figure of merit on a test set."""

    name: str
    measure: Callable[[Tensor, Tensor], float]
    higher_is_better: bool = True

    def reaches(self, value: float, target: float) -> bool:
        """Whether `value` is as good as `target`."""
        return value >= target if self.higher_is_better else value <= target


def metric(name: str, loss: str) -> Metric:
    """The metric of that name; `loss` means the run's own loss, on the test set."""
    if name == "loss":
        return Metric("loss", lambda outputs, labels: float(LOSSES[loss](outputs, labels).mean()), False)
    return Metric(name, {"accuracy": accuracy, "auc": auc, "r2": r2}[name])
