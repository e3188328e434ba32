"""Losses (of rows, each with a weight) and metrics (one value a data set).

A loss takes outputs [batch, outputs], labels [batch] and weights [batch]; it gives the weighted sum of the
rows' losses and the slopes of that sum, [batch, outputs]: in closed form, so no graph has to be recorded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vafl import kernels

Array = npt.NDArray[Any]
Matrix = npt.NDArray[np.float32]
Loss = Callable[[Matrix, Array, Matrix], tuple[float, Matrix]]


def softmax(outputs: Matrix, labels: Array, weights: Matrix) -> tuple[float, Matrix]:
    """Softmax cross-entropy, labels whole numbers."""
    return kernels.softmax(outputs, labels, weights)


@np.errstate(all="ignore")
def binary(outputs: Matrix, labels: Array, weights: Matrix) -> tuple[float, Matrix]:
    """Binary cross-entropy of one output, labels 0.0 or 1.0."""
    scores = outputs[:, 0]
    shrunk = np.exp(-np.abs(scores))  # at most 1, whatever the score
    values = np.maximum(scores, 0) - scores * labels + np.log1p(shrunk)
    shares = np.where(scores < 0, shrunk, 1) / (1 + shrunk)
    return float(values @ weights), ((shares - labels) * weights)[:, None]


@np.errstate(all="ignore")
def squared(outputs: Matrix, labels: Array, weights: Matrix) -> tuple[float, Matrix]:
    """Squared error of one output."""
    errors = outputs[:, 0] - labels
    weighted = errors * weights
    return float(errors @ weighted), 2 * weighted[:, None]


def in_unit(loss: Loss, unit: float) -> Loss:
    """The squared error of labels in another unit, so that gradients are of the same size for all labels."""

    def scaled(outputs: Matrix, labels: Array, weights: Matrix) -> tuple[float, Matrix]:
        value, slopes = loss(outputs, labels, weights)
        return value / unit**2, slopes / np.float32(unit**2)

    return scaled


LOSSES: dict[str, Loss] = {
    "softmax": softmax,
    "binary": binary,
    "squared": squared,
}


def evenly(rows: int) -> Matrix:
    """The weights of a mean."""
    return np.full(rows, 1 / rows, np.float32)


def probabilities(outputs: Tensor, loss: str) -> Tensor:
    """[rows, classes] of what a head says; only where the loss is one of classes."""
    if loss == "softmax":
        return outputs.softmax(1)
    second = outputs[:, 0].sigmoid()
    return torch.stack([1 - second, second], 1)


LARGEST_SLOPES = {"softmax": 2**0.5, "binary": 1.0}  # of a row; the squared loss has none
LARGEST_CURVATURES = {"softmax": 0.5, "binary": 0.25, "squared": 2.0}


def accuracy(outputs: Tensor, labels: Tensor) -> float:
    """Share of rows whose largest output (or sign, for one output) is the label."""
    predicted = outputs[:, 0] > 0 if outputs.shape[1] == 1 else outputs.argmax(1)
    return float((predicted == labels).float().mean())


def auc(outputs: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve of the one output, or of the difference of two."""
    from sklearn.metrics import roc_auc_score  # noqa: PLC0415 - takes longer to load than all the rest

    scores = outputs[:, 0] if outputs.shape[1] == 1 else outputs[:, 1] - outputs[:, 0]
    return float(roc_auc_score(labels.numpy(), scores.numpy()))


def r2(outputs: Tensor, labels: Tensor) -> float:
    """Coefficient of determination."""
    from sklearn.metrics import r2_score  # noqa: PLC0415 - as above

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
        own = LOSSES[loss]

        def mean(outputs: Tensor, labels: Tensor) -> float:
            return own(outputs.detach().numpy(), labels.numpy(), evenly(len(labels)))[0]

        return Metric("loss", mean, False)
    return Metric(name, {"accuracy": accuracy, "auc": auc, "r2": r2}[name])
