"""The metrics of an evaluation, computed from the head's outputs [rows, outputs] and the labels [rows].

There are three families of metrics: for two classes, for several classes, and for regression. Every
evaluation computes all metrics of the task's family. A metric that is undefined on the labels, or whose value
is not finite, is None.

This module needs only NumPy, so that run folders can be read without loading torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from vafl.arrays import Array, Doubles
from vafl.errors import ConfigError

Figures = dict[str, float | None]
"""The name of a metric -> its value; None if it is undefined."""

MetricName = Literal[
    "loss", "auc", "log_loss", "accuracy", "average_precision", "brier", "f1", "macro_f1", "r2", "rmse", "mae"
]
_LARGE = 1e4  # from here on, a value is shown with 4 significant digits instead of 4 decimals
_LEAST_SHARE = float(np.finfo(float).eps)  # replaces a class share of 0, so that the log loss stays finite


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        compute: takes outputs [rows, outputs] and labels [rows], both float64; returns NaN if undefined.
        higher_is_better: whether a higher value is better.
        needs_two_values: whether the metric is defined only if the labels are not all the same.
    """

    name: str
    compute: Callable[[Doubles, Doubles], float]
    higher_is_better: bool = True
    needs_two_values: bool = False

    def is_defined_on(self, labels: npt.ArrayLike) -> bool:
        """Return whether the metric is defined on these labels, [rows]."""
        values = np.asarray(labels)
        return len(values) > 0 and (not self.needs_two_values or bool((values != values[0]).any()))

    def measure(self, outputs: npt.ArrayLike, labels: npt.ArrayLike) -> float | None:
        """Return the metric of the head's outputs; None if it is undefined or not finite."""
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


# --- two classes: outputs are the log-odds of the second class, or one score per class ---


def log_odds(outputs: Doubles) -> Doubles:
    """Return the log-odds of the second class, [rows]."""
    return outputs[:, 0] if outputs.shape[1] == 1 else outputs[:, 1] - outputs[:, 0]


def sigmoid(scores: Doubles) -> Doubles:
    """Return the probability of the second class from its log-odds."""
    shrunk = np.exp(-np.abs(scores))  # at most 1, so it cannot overflow
    share: Doubles = np.where(scores < 0, shrunk, 1) / (1 + shrunk)
    return share


def counts_by_threshold(scores: Doubles, labels: Doubles) -> tuple[Doubles, Doubles]:
    """Return the numbers of true and false positives at each distinct threshold.

    The highest threshold comes first, after an entry of 0 for a threshold above all scores. Rows with equal
    scores share a threshold, so a tie counts one half in the area under the ROC curve.
    """
    order = np.argsort(-scores, kind="stable")
    last_of_score = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    true = np.append(0.0, np.cumsum(labels[order])[last_of_score])
    return true, np.append(0.0, last_of_score + 1.0) - true


def _auc(outputs: Doubles, labels: Doubles) -> float:
    true, false = counts_by_threshold(log_odds(outputs), labels)
    return float(np.trapezoid(true, false) / (true[-1] * false[-1]))


def _average_precision(outputs: Doubles, labels: Doubles) -> float:
    true, false = counts_by_threshold(log_odds(outputs), labels)
    precision = true[1:] / (true[1:] + false[1:])
    return float(np.diff(true) @ precision / true[-1])


def _binary_log_loss(outputs: Doubles, labels: Doubles) -> float:
    scores = log_odds(outputs)
    return float(np.mean(np.logaddexp(0, scores) - scores * labels))


def _binary_accuracy(outputs: Doubles, labels: Doubles) -> float:
    return float(np.mean((log_odds(outputs) > 0) == labels))


def _brier(outputs: Doubles, labels: Doubles) -> float:
    return float(np.mean((sigmoid(log_odds(outputs)) - labels) ** 2))


def _f1(outputs: Doubles, labels: Doubles) -> float:
    predicted = log_odds(outputs) > 0
    both = predicted.sum() + labels.sum()
    return float(2 * labels[predicted].sum() / both)


# --- several classes: one output per class ---


def _log_loss(outputs: Doubles, labels: Doubles) -> float:
    of_label = np.take_along_axis(outputs, labels.astype(np.int64)[:, None], 1)[:, 0]
    top = outputs.max(axis=1)
    return float(np.mean(top + np.log(np.exp(outputs - top[:, None]).sum(axis=1)) - of_label))


def _accuracy(outputs: Doubles, labels: Doubles) -> float:
    return float(np.mean(outputs.argmax(axis=1) == labels))


def _confusion(outputs: Doubles, labels: Doubles) -> tuple[Doubles, Doubles, Doubles]:
    """Return the numbers of correct, predicted and labelled rows of each class, [classes] each."""
    classes, predicted, known = outputs.shape[1], outputs.argmax(axis=1), labels.astype(np.int64)
    counts = (np.bincount(rows, minlength=classes) for rows in (known[predicted == known], predicted, known))
    correct, predictions, labelled = (count.astype(np.float64) for count in counts)
    return correct, predictions, labelled


def _macro_f1(outputs: Doubles, labels: Doubles) -> float:
    """Return the mean F1 over the classes that are labelled or predicted, like scikit-learn."""
    correct, predicted, labelled = _confusion(outputs, labels)
    present = predicted + labelled > 0
    return float(np.mean(2 * correct[present] / (predicted + labelled)[present]))


def by_class(outputs: npt.ArrayLike, labels: npt.ArrayLike, classes: Sequence[str]) -> dict[str, Figures]:
    """Return precision, recall, F1 and the number of rows of each class, by class name.

    Precision is None for a class that is never predicted. Recall is None for a class without rows.
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


# --- regression: one output ---


def _r2(outputs: Doubles, labels: Doubles) -> float:
    spread = np.sum((labels - labels.mean()) ** 2)
    return float(1 - np.sum((outputs[:, 0] - labels) ** 2) / spread)


def _rmse(outputs: Doubles, labels: Doubles) -> float:
    return float(np.sqrt(np.mean((outputs[:, 0] - labels) ** 2)))


def _mae(outputs: Doubles, labels: Doubles) -> float:
    return float(np.mean(np.abs(outputs[:, 0] - labels)))


# --- families ---


def shown_name(metric: str) -> str:
    """Return a metric's name for display.

    `f1` is measured at a probability of 0.5. A run also reports the F1 at its chosen threshold, so the
    displayed name tells the two apart.
    """
    return "f1 (at 0.5)" if metric == "f1" else metric


def as_text(figures: Mapping[str, float | None]) -> str:
    """Return the metrics as text, such as "auc 0.9132, log_loss 0.2871"."""
    return ", ".join(f"{shown_name(name)} {figure(value)}" for name, value in figures.items())


def figure(value: float | None) -> str:
    """Return a metric's value as text; a dash if it is undefined."""
    return "\N{EN DASH}" if value is None else f"{value:.4f}" if abs(value) < _LARGE else f"{value:.4g}"


def _family(*metrics: Metric) -> Mapping[str, Metric]:
    return {metric.name: metric for metric in metrics}


# In each family, the first metric is the default headline, and the second is the one that "loss" means.
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
        each: all metrics.
        headline: the metric that is displayed first, and that stop.metric sets a target for.
        select: the metric that decides which model is kept.
        loss: the run's loss.
        outputs: the number of outputs of the head.
    """

    each: tuple[Metric, ...]
    headline: Metric
    select: Metric
    loss: str
    outputs: int

    @classmethod
    def of(cls, loss: str, outputs: int, headline: str = "auto", select: str = "loss") -> "Metrics":
        """Return the metrics for a head with `outputs` outputs that is trained with `loss`.

        Args:
            headline: the setting model.metric.
            select: the setting stop.select.

        Raises:
            ConfigError: `headline` or `select` is not a metric of such a head.
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
                    f'{setting} must be a metric for {found}: loss, {", ".join(family)}. Found "{name}".',
                )
            return family[name]

        chosen = find("model.metric", headline), find("stop.select", select)
        return cls(tuple(family.values()), *chosen, loss, outputs)

    def measure(self, outputs: npt.ArrayLike, labels: npt.ArrayLike) -> Figures:
        """Return every metric of the head's outputs."""
        seen, known = np.asarray(outputs, np.float64), np.asarray(labels, np.float64)
        return {metric.name: metric.measure(seen, known) for metric in self.each}

    def trivial(self, train_labels: npt.ArrayLike, labels: npt.ArrayLike) -> Figures:
        """Return every metric, on `labels`, of a baseline that uses the training labels and no feature.

        The baseline predicts the mean of a regression's labels, or the share of each class.
        """
        row = self._trivial_row(np.asarray(train_labels))
        rows = len(np.asarray(labels))
        return self.measure(np.broadcast_to(row, (rows, self.outputs)), labels)

    def _trivial_row(self, train_labels: Array) -> Doubles:
        """Return the baseline's outputs for any row, [outputs]."""
        if self.loss == "squared":
            return np.array([train_labels.mean(dtype=np.float64)])
        classes = 2 if self.loss == "binary" else self.outputs
        shares = np.bincount(train_labels.astype(np.int64), minlength=classes) / len(train_labels)
        scores = np.log(np.maximum(shares, _LEAST_SHARE))
        return scores if self.loss == "softmax" else scores[1:] - scores[:1]
