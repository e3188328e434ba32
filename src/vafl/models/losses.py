"""Losses of rows, each with a weight.

A loss takes outputs [batch, outputs], labels [batch] and weights [batch]; it gives the weighted sum of the
rows' losses and the slopes of that sum, [batch, outputs]: in closed form, so no graph has to be recorded.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

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


def squared_in_unit(unit: float) -> Loss:
    """Return the squared error of labels in another unit, so that gradients are of the same size for any.

    Beyond `FAR` units it grows in proportion to the error (Huber's loss). So one label that is far off, such
    as a wrong number in a table, cannot pull the model away from all others.
    """

    @np.errstate(all="ignore")
    def scaled(outputs: Matrix, labels: Array, weights: Matrix) -> tuple[float, Matrix]:
        errors = (outputs[:, 0] - labels) / np.float32(unit)
        # Not clip: it would turn an error that is not a number into one.
        near = np.where(np.abs(errors) > FAR, np.copysign(np.float32(FAR), errors), errors)
        weighted = near * weights
        return float((2 * errors - near) @ weighted), (2 * weighted / np.float32(unit))[:, None]

    return scaled


FAR = 10.0  # units of the labels; their standard deviation, more or less

LOSSES: dict[str, Loss] = {
    "softmax": softmax,
    "binary": binary,
    "squared": squared,
}


def evenly(rows: int) -> Matrix:
    """The weights of a mean."""
    return np.full(rows, 1 / rows, np.float32)


LARGEST_SLOPES = {"softmax": 2**0.5, "binary": 1.0}  # of a row; the squared loss has none
LARGEST_CURVATURES = {"softmax": 0.5, "binary": 0.25, "squared": 2.0}
