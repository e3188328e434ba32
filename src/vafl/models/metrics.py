"""Metrics: what an evaluation measures, from the head's outputs [rows, outputs] and the labels [rows].

There are three families: two classes, several classes, and numbers. A task measures its whole family at every
evaluation. A metric that is not defined on the labels at hand, or whose value is not finite, is None.

This module needs NumPy only: reading run folders must not load torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vafl.errors import ConfigError

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Figures = dict[str, float | None]
"""The name of a metric -> its value; None where it is not defined."""

MetricName = Literal[
    "loss", "auc", "log_loss", "accuracy", "average_precision", "brier", "f1", "macro_f1", "r2", "rmse", "mae"
]
_LARGE = 1e4  # from here on a value has digits enough before its point
_LEAST_SHARE = float(np.finfo(float).eps)  # of a class that no training row has: its log loss stays finite


@dataclass(frozen=True)
class Metric:
    """One figure of merit.

    Attributes:
        compute: takes outputs [rows, outputs] and labels [rows], both float64; NaN where it is not defined.
        needs_two_values: whether it is defined only on labels that are not all the same.
    """

    name: str
    compute: Callable[[Floats, Floats], float]
    higher_is_better: bool = True
    needs_two_values: bool = False

    def is_defined_on(self, labels: npt.ArrayLike) -> bool:
        """Return whether these labels, [rows], have what the metric needs."""
        values = np.asarray(labels)
        return len(values) > 0 and (not self.needs_two_values or bool((values != values[0]).any()))

    def measure(self, outputs: npt.ArrayLike, labels: npt.ArrayLike) -> float | None:
        """Return the metric of the head's outputs; None if it is not defined or not finite."""
        seen, known = np.asarray(outputs, np.float64), np.asarray(labels, np.float64)
        if not self.is_defined_on(known) or not np.isfinite(seen).all():
            return None
        with np.errstate(all="ignore"):
            value = float(self.compute(seen, known))
        return value if math.isfinite(value) else None

    def is_better(self, value: float, other: float) -> bool:
        """Return whether `value` is strictly better than `other`."""
        return value > other if self.higher_is_better else value < other

    def reaches(self, value: float, target: float) -> bool:
        """Return whether `value` is as good as `target`, or better."""
        return not self.is_better(target, value)


# --- two classes: outputs are the log-odds of the second class, or one score for each ---


def log_odds(outputs: Floats) -> Floats:
    """[rows]: the log-odds of the second class."""
    return outputs[:, 0] if outputs.shape[1] == 1 else outputs[:, 1] - outputs[:, 0]


def sigmoid(scores: Floats) -> Floats:
    """Return the probability of the second class by its log-odds."""
    shrunk = np.exp(-np.abs(scores))  # at most 1, so nothing overflows
    share: Floats = np.where(scores < 0, shrunk, 1) / (1 + shrunk)
    return share


def counts_by_threshold(scores: Floats, labels: Floats) -> tuple[Floats, Floats]:
    """Return the true and false positives at each distinct threshold, the highest first, from (0, 0) on.

    Rows with equal scores share a threshold, so ties count by halves in the area under the ROC curve.
    """
    order = np.argsort(-scores, kind="stable")
    last_of_score = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    true = np.append(0.0, np.cumsum(labels[order])[last_of_score])
    return true, np.append(0.0, last_of_score + 1.0) - true


def _auc(outputs: Floats, labels: Floats) -> float:
    true, false = counts_by_threshold(log_odds(outputs), labels)
    return float(np.trapezoid(true, false) / (true[-1] * false[-1]))


def _average_precision(outputs: Floats, labels: Floats) -> float:
    true, false = counts_by_threshold(log_odds(outputs), labels)
    precision = true[1:] / (true[1:] + false[1:])
    return float(np.diff(true) @ precision / true[-1])


def _binary_log_loss(outputs: Floats, labels: Floats) -> float:
    scores = log_odds(outputs)
    return float(np.mean(np.logaddexp(0, scores) - scores * labels))


def _binary_accuracy(outputs: Floats, labels: Floats) -> float:
    return float(np.mean((log_odds(outputs) > 0) == labels))


def _brier(outputs: Floats, labels: Floats) -> float:
    return float(np.mean((sigmoid(log_odds(outputs)) - labels) ** 2))


def _f1(outputs: Floats, labels: Floats) -> float:
    predicted = log_odds(outputs) > 0
    both = predicted.sum() + labels.sum()
    return float(2 * labels[predicted].sum() / both)


# --- several classes: one output for each ---


def _log_loss(outputs: Floats, labels: Floats) -> float:
    of_label = np.take_along_axis(outputs, labels.astype(np.int64)[:, None], 1)[:, 0]
    top = outputs.max(axis=1)
    return float(np.mean(top + np.log(np.exp(outputs - top[:, None]).sum(axis=1)) - of_label))


def _accuracy(outputs: Floats, labels: Floats) -> float:
    return float(np.mean(outputs.argmax(axis=1) == labels))


def _confusion(outputs: Floats, labels: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the correct, predicted and labelled rows of each class, [classes]."""
    classes, predicted, known = outputs.shape[1], outputs.argmax(axis=1), labels.astype(np.int64)
    counts = (np.bincount(rows, minlength=classes) for rows in (known[predicted == known], predicted, known))
    correct, predictions, labelled = (count.astype(np.float64) for count in counts)
    return correct, predictions, labelled


def _macro_f1(outputs: Floats, labels: Floats) -> float:
    """The mean over the classes that are labelled or predicted, as scikit-learn has it."""
    correct, predicted, labelled = _confusion(outputs, labels)
    present = predicted + labelled > 0
    return float(np.mean(2 * correct[present] / (predicted + labelled)[present]))


def by_class(outputs: npt.ArrayLike, labels: npt.ArrayLike, classes: Sequence[str]) -> dict[str, Figures]:
    """Return precision, recall, F1 and the number of rows of each class, by name.

    Precision is None for a class that is never predicted, recall for one that has no rows.
    """
    correct, predicted, labelled = _confusion(np.asarray(outputs), np.asarray(labels))
    with np.errstate(all="ignore"):
        figures = {
            "precision": correct / predicted,
            "recall": correct / labelled,
            "f1": 2 * correct / (predicted + labelled),
        }
    return {
        name: {
            **{key: _finite(float(values[place])) for key, values in figures.items()},
            "rows": int(labelled[place]),
        }
        for place, name in enumerate(classes)
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# --- numbers: one output ---


def _r2(outputs: Floats, labels: Floats) -> float:
    spread = np.sum((labels - labels.mean()) ** 2)
    return float(1 - np.sum((outputs[:, 0] - labels) ** 2) / spread)


def _rmse(outputs: Floats, labels: Floats) -> float:
    return float(np.sqrt(np.mean((outputs[:, 0] - labels) ** 2)))


def _mae(outputs: Floats, labels: Floats) -> float:
    return float(np.mean(np.abs(outputs[:, 0] - labels)))


# --- families ---


def shown_name(metric: str) -> str:
    """Return a metric's name for people.

    `f1` is measured at a probability of 0.5. A run also reports the F1 at the threshold that it chose, so the
    name says which of the two it is.
    """
    return "f1 (at 0.5)" if metric == "f1" else metric


def as_text(figures: Mapping[str, float | None]) -> str:
    """Return the metrics as words, such as "auc 0.9132, log_loss 0.2871"."""
    return ", ".join(f"{shown_name(name)} {figure(value)}" for name, value in figures.items())


def figure(value: float | None) -> str:
    """Return a metric's value as text; a dash where it is not defined."""
    return "\N{EN DASH}" if value is None else f"{value:.4f}" if abs(value) < _LARGE else f"{value:.4g}"


def _family(*metrics: Metric) -> Mapping[str, Metric]:
    return {metric.name: metric for metric in metrics}


# The first of each family is the headline by default, the second is what "loss" means.
_TWO_CLASSES = _family(
    Metric("auc", _auc, needs_two_values=True),
    Metric("log_loss", _binary_log_loss, higher_is_better=False),
    Metric("accuracy", _binary_accuracy),
    Metric("average_precision", _average_precision, needs_two_values=True),
    Metric("brier", _brier, higher_is_better=False),
    Metric("f1", _f1),
)
_CLASSES = _family(
    Metric("accuracy", _accuracy),
    Metric("log_loss", _log_loss, higher_is_better=False),
    Metric("macro_f1", _macro_f1),
)
_NUMBERS = _family(
    Metric("r2", _r2, needs_two_values=True),
    Metric("rmse", _rmse, higher_is_better=False),
    Metric("mae", _mae, higher_is_better=False),
)
LOWER_IS_BETTER = frozenset(
    name
    for family in (_TWO_CLASSES, _CLASSES, _NUMBERS)
    for name, metric in family.items()
    if not metric.higher_is_better
)
IN_LABEL_UNITS = ("rmse", "mae")


@dataclass(frozen=True)
class Metrics:
    """The metrics of one task, which are measured together.

    Attributes:
        each: all of them.
        headline: the one that is shown where there is room for one, and that stop.metric is a target for.
        select: the one by which the model to keep is chosen.
        loss, outputs: the run's loss and the number of outputs of its head.
    """

    each: tuple[Metric, ...]
    headline: Metric
    select: Metric
    loss: str
    outputs: int

    @classmethod
    def of(cls, loss: str, outputs: int, headline: str = "auto", select: str = "loss") -> "Metrics":
        """Return the metrics for a head with `outputs` outputs that is trained by `loss`.

        Args:
            headline: model.metric.
            select: stop.select.

        Raises:
            ConfigError: one of these two is not measured for such a head.
        """
        if loss == "squared":
            family = _NUMBERS
        else:
            family = _TWO_CLASSES if loss == "binary" or outputs == 2 else _CLASSES
        first, second, *_ = family

        def find(setting: str, name: str) -> Metric:
            name = {"auto": first, "loss": second}.get(name, name)
            if name not in family:
                found = (
                    "two classes"
                    if family is _TWO_CLASSES
                    else "classes"
                    if family is _CLASSES
                    else "numbers"
                )
                raise ConfigError(
                    "VFL-3021",
                    f'{setting} must be a metric of {found}: loss, {", ".join(family)}. Found "{name}".',
                )
            return family[name]

        chosen = find("model.metric", headline), find("stop.select", select)
        return cls(tuple(family.values()), *chosen, loss, outputs)

    def measure(self, outputs: npt.ArrayLike, labels: npt.ArrayLike) -> Figures:
        """Return every metric of the head's outputs."""
        seen, known = np.asarray(outputs, np.float64), np.asarray(labels, np.float64)
        return {metric.name: metric.measure(seen, known) for metric in self.each}

    def trivial(self, train_labels: npt.ArrayLike, labels: npt.ArrayLike) -> Figures:
        """Return every metric, on `labels`, of the model that knows the training labels and no feature.

        It predicts the mean of numbers and the shares of classes, whose accuracy is the largest class's.
        """
        row = self._trivial_row(np.asarray(train_labels))
        rows = len(np.asarray(labels))
        return self.measure(np.broadcast_to(row, (rows, self.outputs)), labels)

    def _trivial_row(self, train_labels: Array) -> Floats:
        """[outputs]"""
        if self.loss == "squared":
            return np.array([train_labels.mean(dtype=np.float64)])
        classes = 2 if self.loss == "binary" else self.outputs
        shares = np.bincount(train_labels.astype(np.int64), minlength=classes) / len(train_labels)
        scores = np.log(np.maximum(shares, _LEAST_SHARE))
        return scores if self.loss == "softmax" else scores[1:] - scores[:1]
