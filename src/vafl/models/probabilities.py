"""Compute and calibrate probabilities from a head's outputs.

Outputs are [rows, outputs]. A single column is the log-odds of the second of two classes; several columns are
one score per class. A calibration maps outputs to outputs of the same form, whose probabilities match the
frequencies on the validation rows. Metrics therefore work the same with and without calibration.

This module needs only NumPy. Fitting an isotonic calibration also loads scikit-learn.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from vafl.arrays import Doubles, Integers
from vafl.models.metrics import log_odds, sigmoid

Method = Literal["none", "shift", "platt", "isotonic"]

_ALMOST_CONVERGED = 1e-12  # Newton's method stops when a step would lower the mean loss by less than this
_MOST_STEPS = 100


@dataclass(frozen=True)
class Calibration:
    """Maps outputs to calibrated outputs. It consists of plain numbers, which the constructor checks.

    Attributes:
        method: `none` leaves outputs unchanged; `shift` undoes class weights without a fit.
        scale, shifts: for `shift` and `platt`: the result is outputs * scale + shifts, one shift per output.
        scores, shares: for `isotonic`: ascending log-odds, and the probability of the second class there. It
            is interpolated linearly between two scores, and constant beyond the first and the last.
    """

    method: Method = "none"
    scale: float = 1.0
    shifts: tuple[float, ...] = ()
    scores: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        numbers = (self.scale, *self.shifts, *self.scores, *self.shares)
        if not all(map(math.isfinite, numbers)) or self.scale < 0:
            raise ValueError("a calibration must have finite numbers, and a scale of 0 or more")
        if (self.method in ("shift", "platt")) != bool(self.shifts):
            raise ValueError("a calibration must have shifts if, and only if, its method is shift or platt")
        if (self.method == "isotonic") != bool(self.scores) or len(self.scores) != len(self.shares):
            raise ValueError(
                "a calibration must have as many scores as shares, and none unless its method is isotonic"
            )
        rising = all(low < high for low, high in pairwise(self.scores))
        if not rising or any(low > high for low, high in pairwise(self.shares)):
            raise ValueError("the scores of a calibration must ascend, and its shares must not descend")
        if self.shares and not 0 < self.shares[0] <= self.shares[-1] < 1:
            raise ValueError("the shares of a calibration must be above 0 and below 1")

    def __call__(self, outputs: npt.ArrayLike) -> Doubles:
        """Return the calibrated outputs, of the same shape."""
        seen = np.asarray(outputs, np.float64)
        if self.shifts:
            seen = seen * self.scale + np.array(self.shifts)
        if self.method == "isotonic":
            share = np.interp(log_odds(seen), self.scores, self.shares)
            calibrated = np.log(share) - np.log1p(-share)
            seen = calibrated[:, None] if seen.shape[1] == 1 else np.stack([0 * share, calibrated], 1)
        return seen

    @classmethod
    def undoing(cls, class_weights: Sequence[float], outputs: int) -> "Calibration":
        """Return the shift that undoes the class weights of the training loss.

        A model that minimises the weighted log loss multiplies the true probability of each class by the
        weight of the class, up to normalisation. Its score is therefore too high by the logarithm of the
        weight.

        Args:
            class_weights: [classes], the weights of the training loss.
            outputs: the number of outputs of the head.
        """
        if len(set(class_weights)) < 2:
            return cls()
        shifts = -np.log(np.asarray(class_weights, np.float64))
        shifts = shifts[1:] - shifts[:1] if outputs == 1 else shifts
        return cls("shift", shifts=tuple(shifts.tolist()))

    @classmethod
    def fit(
        cls, method: Method, outputs: npt.ArrayLike, labels: npt.ArrayLike, class_weights: Sequence[float]
    ) -> "Calibration":
        """Fit a calibration on validation rows, which must contain at least two classes.

        For two classes, `platt` fits scale and shift of the log-odds. For several classes, it fits one scale
        (the inverse of a temperature), and the shifts undo the class weights of the training loss.

        Args:
            outputs: [rows, outputs], finite.
            labels: [rows], class numbers.
            class_weights: [classes], the weights of the training loss.
        """
        seen, known = np.asarray(outputs, np.float64), np.asarray(labels, np.int64)
        if method == "isotonic":
            scores, shares = _isotonic(log_odds(seen), known)
            return cls("isotonic", scores=scores, shares=shares)
        if method == "none":
            return cls()
        if seen.shape[1] <= 2:
            scale, shift = _platt(log_odds(seen), known)
            return cls("platt", scale, (shift,) if seen.shape[1] == 1 else (0.0, shift))
        weights = np.log(np.asarray(class_weights, np.float64))
        scale = _inverse_temperature(seen - weights, known)
        return cls("platt", scale, tuple((-scale * weights).tolist()))


def probabilities(outputs: Doubles) -> Doubles:
    """Return the probability of each class, [rows, classes], from outputs, calibrated or not."""
    if outputs.shape[1] == 1:
        second = sigmoid(outputs[:, 0])
        return np.stack([1 - second, second], 1)
    shares = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    result: Doubles = shares / shares.sum(axis=1, keepdims=True)
    return result


def _platt(scores: Doubles, labels: Integers) -> tuple[float, float]:
    """Return scale and shift of the log-odds by maximum likelihood.

    Platt's targets, (n + 1) / (n + 2) for n rows of a class, replace the labels. They keep the fit finite if
    the scores separate the classes. If the scores rank the classes in the wrong order, the scale is 0, as in
    an isotonic fit: a calibration never reverses the ranking.
    """
    count = int(labels.sum())
    targets = np.where(labels == 1, (count + 1) / (count + 2), 1 / (len(labels) - count + 2))
    centre, unit = scores.mean(), scores.std() or 1.0
    design = np.stack([(scores - centre) / unit, np.ones(len(scores))], 1)

    def evaluate(theta: Doubles) -> tuple[float, Doubles, Doubles]:
        logits = design @ theta
        share = sigmoid(logits)
        value = np.mean(np.logaddexp(0, logits) - targets * logits)
        curvature = (design.T * (share * (1 - share))) @ design / len(design)
        return float(value), design.T @ (share - targets) / len(design), curvature

    mean = float(targets.mean())
    constant = math.log(mean / (1 - mean))
    scale, shift = _newton(evaluate, np.array([0.0, constant])).tolist()
    return (scale / unit, shift - scale * centre / unit) if scale > 0 else (0.0, constant)


def _inverse_temperature(outputs: Doubles, labels: Integers) -> float:
    """Return the scale of the outputs of several classes by maximum likelihood.

    Labels are smoothed a little. Like Platt's targets, this keeps the scale finite if every row is classified
    correctly.
    """
    rows, classes = outputs.shape
    centred = outputs - outputs.mean(axis=1, keepdims=True)
    unit = float(centred.std()) or 1.0
    centred /= unit
    smoothing = 2 / (rows + 2)
    targets = np.full((rows, classes), smoothing / classes)
    targets[np.arange(rows), labels] += 1 - smoothing
    aims = (targets * centred).sum(axis=1)

    def evaluate(theta: Doubles) -> tuple[float, Doubles, Doubles]:
        scaled = theta[0] * centred
        top = scaled.max(axis=1)
        value = np.mean(top + np.log(np.exp(scaled - top[:, None]).sum(axis=1)) - theta[0] * aims)
        shares = probabilities(scaled)
        means = (shares * centred).sum(axis=1)
        spread = np.mean((shares * centred**2).sum(axis=1) - means**2)
        return float(value), np.array([np.mean(means - aims)]), np.array([[spread]])

    return max(0.0, float(_newton(evaluate, np.zeros(1))[0])) / unit


def _newton(evaluate: Callable[[Doubles], tuple[float, Doubles, Doubles]], start: Doubles) -> Doubles:
    """Minimise a convex function by Newton's method with step halving.

    Args:
        evaluate: returns value, gradient and Hessian.
    """
    theta, (value, gradient, hessian) = start, evaluate(start)
    for _ in range(_MOST_STEPS):
        # The ridge bounds the step if the function is almost flat. It does not move the minimum, since the
        # gradient is exact.
        step = np.linalg.solve(hessian + 1e-12 * np.eye(len(theta)), gradient)
        gain, size = float(gradient @ step), 1.0
        if gain < _ALMOST_CONVERGED:
            break
        # Armijo's rule: halve the step until the value falls by at least a fraction of the predicted gain.
        while (trial := evaluate(theta - size * step))[0] > value - 1e-4 * size * gain:
            size /= 2
            if size < 1e-10:
                return theta
        theta, (value, gradient, hessian) = theta - size * step, trial
    return theta


def _isotonic(scores: Doubles, labels: Integers) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return log-odds, and the probabilities at them, by isotonic regression (pool adjacent violators).

    Probabilities stay 1 / (n + 2) away from 0 and 1 for n rows, since n rows cannot prove certainty. Without
    that bound, a single wrong row would have an infinite log loss.
    """
    from sklearn.isotonic import IsotonicRegression  # noqa: PLC0415 - slow to import, and rarely needed

    bound = 1 / (len(labels) + 2)
    fitted = IsotonicRegression(y_min=bound, y_max=1 - bound).fit(scores, labels)
    return tuple(fitted.X_thresholds_.tolist()), tuple(fitted.y_thresholds_.tolist())
