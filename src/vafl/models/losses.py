"""Loss functions with a weight for each row, and their gradients in closed form.

A loss takes outputs [batch, outputs], labels [batch] and weights [batch]. It returns the weighted sum of the
rows' losses, and the gradient of that sum with respect to the outputs, [batch, outputs]. No autograd graph is
recorded. An overflow gives inf or NaN without a warning: the run detects a loss that is not finite.
"""

from collections.abc import Callable

import numpy as np

from vafl import kernels
from vafl.arrays import Array, Floats, Labels, Matrix

Loss = Callable[[Matrix, Array, Matrix], tuple[float, Matrix]]


def softmax(outputs: Matrix, labels: Labels, weights: Floats) -> tuple[float, Matrix]:
    """Return softmax cross-entropy and its gradient. Labels are class numbers."""
    return kernels.softmax(outputs, labels, weights)


@np.errstate(all="ignore")
def binary(outputs: Matrix, labels: Labels, weights: Floats) -> tuple[float, Matrix]:
    """Return binary cross-entropy of one output, and its gradient. Labels are 0.0 or 1.0."""
    scores = outputs[:, 0]
    shrunk = np.exp(-np.abs(scores))  # at most 1 for any score, so it cannot overflow
    values = np.maximum(scores, 0) - scores * labels + np.log1p(shrunk)
    shares = np.where(scores < 0, shrunk, 1) / (1 + shrunk)
    return float(values @ weights), ((shares - labels) * weights)[:, None]


@np.errstate(all="ignore")
def squared(outputs: Matrix, labels: Labels, weights: Floats) -> tuple[float, Matrix]:
    """Return the squared error of one output, and its gradient."""
    errors = outputs[:, 0] - labels
    weighted = errors * weights
    return float(errors @ weighted), 2 * weighted[:, None]


def squared_in_unit(unit: float) -> Loss:
    """Return a squared loss of errors in units of `unit`, so that its size does not depend on the labels.

    Errors beyond `FAR` units count linearly (Huber's loss). A single wrong label, such as a typing error in a
    table, then cannot pull the model away from all other labels.
    """

    @np.errstate(all="ignore")
    def scaled(outputs: Matrix, labels: Labels, weights: Floats) -> tuple[float, Matrix]:
        errors = (outputs[:, 0] - labels) / np.float32(unit)
        # An error that is NaN must stay NaN, so that the run notices that training has diverged.
        near = np.where(np.abs(errors) > FAR, np.copysign(np.float32(FAR), errors), errors)
        weighted = near * weights
        return float((2 * errors - near) @ weighted), (2 * weighted / np.float32(unit))[:, None]

    return scaled


FAR = 10.0  # in units of the labels; a unit is about their standard deviation

LOSSES: dict[str, Loss] = {
    "softmax": softmax,
    "binary": binary,
    "squared": squared,
}


def evenly(rows: int) -> Matrix:
    """Return equal weights that add up to 1, so that the weighted sum is the mean."""
    return np.full(rows, 1 / rows, np.float32)


# Bounds for one row, with respect to its outputs: the norm of the gradient, which the squared loss does not
# bound, and the largest eigenvalue of the Hessian.
LARGEST_SLOPES = {"softmax": 2**0.5, "binary": 1.0}
LARGEST_CURVATURES = {"softmax": 0.5, "binary": 0.25, "squared": 2.0}
