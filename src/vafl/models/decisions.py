"""Decide between two classes by a probability threshold that is chosen for a goal, such as the best F1.

The threshold is chosen on the validation rows with the models that a run keeps. It is stored with the head,
next to the calibration of the probabilities. This module needs only NumPy, so that configurations can be read
without loading torch.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vafl.arrays import Doubles, Integers
from vafl.errors import ConfigError
from vafl.models.metrics import Figures, counts_by_threshold
from vafl.models.probabilities import Calibration, probabilities

Goal = Literal["accuracy", "f1", "precision", "recall", "cost"]

EVEN = 0.5  # this threshold chooses the more probable class


@dataclass(frozen=True)
class DecisionSettings:
    """How a prediction chooses between two classes. Predictions always include the probabilities too.

    A row is assigned to the second class if its probability reaches a threshold. The threshold is chosen on
    the validation rows, and summary.json reports its results on the test rows.

    Attributes:
        goal: `f1`: the highest F1 score. `accuracy`: the more probable class, a threshold of 0.5.
            `precision`: the highest recall with a precision of `at_least`. `recall`: the highest precision
            with a recall of `at_least`. `cost`: the lowest cost. `auto` is `f1` if there are validation rows
            of both classes, otherwise `accuracy`.
        at_least: for the goals `precision` and `recall`. If no threshold reaches it, the closest one is used,
            and summary.json has `reached: false`.
        cost_false_positive: for the goal `cost`: the cost of a row that is wrongly assigned to the second
            class.
        cost_false_negative: for the goal `cost`: the cost of a row of the second class that is missed.
    """

    goal: Literal["auto"] | Goal = "auto"
    at_least: float | None = None
    cost_false_positive: float = 1.0
    cost_false_negative: float = 1.0

    def __post_init__(self) -> None:
        bounded = self.goal in ("precision", "recall")
        if bounded and (self.at_least is None or not 0 < self.at_least <= 1):
            raise ConfigError(
                "VFL-3001",
                f'decision.goal = "{self.goal}" needs decision.at_least, above 0 and at most 1, such as 0.9. '
                f"Found {'none' if self.at_least is None else self.at_least}.",
            )
        if self.at_least is not None and not bounded:
            raise ConfigError(
                "VFL-3002",
                f'decision.at_least is for the goals "precision" and "recall". Found it with goal = '
                f'"{self.goal}". Leave it out, or choose one of these goals.',
            )
        costs = (self.cost_false_positive, self.cost_false_negative)
        if not all(0 < cost < math.inf for cost in costs):
            raise ConfigError(
                "VFL-3003",
                "decision.cost_false_positive and cost_false_negative must be above 0. "
                f"Found {costs[0]} and {costs[1]}.",
            )
        if costs != (1.0, 1.0) and self.goal != "cost":
            raise ConfigError(
                "VFL-3004",
                'decision.cost_false_positive and cost_false_negative are for goal = "cost". Found '
                f'{costs[0]} and {costs[1]} with goal = "{self.goal}". Set goal = "cost", or leave them out.',
            )

    def resolved(self, *, fitted: bool) -> Goal:
        """Return the goal to use: `accuracy` if the threshold is not `fitted` on validation rows."""
        if not fitted:
            return "accuracy"
        return "f1" if self.goal == "auto" else self.goal

    def check_rows(self, classes: int, *, both: bool) -> None:
        """Check that the goal fits the labels; `auto` always does.

        Args:
            classes: the number of classes; 0 for a regression.
            both: whether there are validation rows of both classes.

        Raises:
            ConfigError: the goal does not fit.
        """
        if self.goal != "auto" and classes != 2:
            found = f"{classes} classes" if classes else "numbers"
            raise ConfigError(
                "VFL-3005",
                f'decision.goal = "{self.goal}" chooses a threshold for two classes. Found labels with '
                f"{found}. Leave [decision] out: with several classes, the most probable one is predicted.",
            )
        if self.goal not in ("auto", "accuracy") and not both:
            raise ConfigError(
                "VFL-3006",
                f'decision.goal = "{self.goal}" needs validation rows of both classes to choose a threshold. '
                "Hold out more rows (data.validation_fraction), or leave it out for a threshold of 0.5.",
            )


@dataclass(frozen=True)
class Threshold:
    """A threshold, and whether it meets the goal on the rows that it was chosen on.

    Attributes:
        value: the lowest probability that assigns a row to the second class. Above 1, no row is assigned.
        reached: whether the threshold meets the goal.
    """

    value: float = EVEN
    reached: bool = True


def choose_threshold(
    settings: DecisionSettings, goal: Goal, shares: npt.ArrayLike, labels: npt.ArrayLike
) -> Threshold:
    """Return the threshold that meets the goal best on these rows.

    Among equally good thresholds, it is the highest, which assigns the fewest rows to the second class.

    Args:
        shares: [rows], the probability of the second class.
        labels: [rows], 0 or 1; both occur.
    """
    if goal == "accuracy":
        return Threshold()
    chances, known = np.asarray(shares, np.float64), np.asarray(labels, np.float64)
    true, false = counts_by_threshold(chances, known)
    recall = true / true[-1]
    with np.errstate(invalid="ignore"):
        precision = np.nan_to_num(true / (true + false))  # 0 if no row is assigned to the second class
    reached = np.ones(len(true), bool)
    if goal == "f1":
        merits: tuple[Doubles, ...] = (2 * true / (true + false + true[-1]),)
    elif goal == "cost":
        missed = true[-1] - true
        merits = (-settings.cost_false_positive * false - settings.cost_false_negative * missed,)
    else:
        aim, other = (precision, recall) if goal == "precision" else (recall, precision)
        reached = aim >= (settings.at_least or 0.0)
        merits = (other, aim) if reached.any() else (aim, other)
    allowed = np.flatnonzero(reached) if reached.any() else np.arange(len(true))
    # lexsort sorts by its last key first, hence `reversed`. It is stable and thresholds are in descending
    # order, so the highest threshold wins a tie.
    order = np.lexsort([-merit[allowed] for merit in reversed(merits)])
    return Threshold(_between(chances, int(allowed[order[0]])), bool(reached.any()))


def _between(shares: Doubles, place: int) -> float:
    """Return a threshold that only the rows with the `place` highest distinct probabilities reach."""
    values = np.unique(shares)[::-1]
    if place == len(values):
        return 0.0
    if place == 0:
        return 1.0 if values[0] < 1 else float(np.nextafter(1.0, 2.0))
    above, below = float(values[place - 1]), float(values[place])
    middle = (above + below) / 2
    return middle if middle > below else above  # adjacent floats have no number between them


def decision_figures(
    settings: DecisionSettings, threshold: float, shares: npt.ArrayLike, labels: npt.ArrayLike
) -> dict[str, Any]:
    """Return accuracy, precision, recall, F1 and the confusion matrix of a threshold on these rows.

    `confusion` is [[true negatives, false positives], [false negatives, true positives]]. An undefined figure
    is None, such as the precision if no row is assigned to the second class.
    """
    chosen, known = np.asarray(shares) >= threshold, np.asarray(labels).astype(bool)
    negatives, positives = (
        [int(np.sum(~chosen & (known == label))), int(np.sum(chosen & (known == label)))]
        for label in (False, True)
    )
    (true_negatives, false_positives), (false_negatives, true_positives) = negatives, positives
    errors = false_positives + false_negatives
    figures: Figures = {
        "accuracy": _share(true_negatives + true_positives, len(known)),
        "precision": _share(true_positives, true_positives + false_positives),
        "recall": _share(true_positives, true_positives + false_negatives),
        "f1": _share(2 * true_positives, 2 * true_positives + errors),
    }
    if settings.goal == "cost":
        figures["cost"] = (
            settings.cost_false_positive * false_positives + settings.cost_false_negative * false_negatives
        )
    return {"rows": len(known), "confusion": [negatives, positives], **figures}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


@dataclass(frozen=True)
class Decision:
    """Turns a head's outputs into probabilities and a class. It is stored with the head.

    Attributes:
        calibration: the map from outputs to calibrated outputs.
        threshold: the threshold for two classes, as in `Threshold`.
    """

    calibration: Calibration = field(default_factory=Calibration)
    threshold: float = EVEN

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < 2:
            raise ValueError(f"the threshold of a decision must be from 0 to 1. Found {self.threshold}")

    def check_outputs(self, outputs: int, classes: int) -> None:
        """Raise ValueError unless this fits a head with these outputs and classes.

        Args:
            outputs: the number of outputs of the head.
            classes: the number of classes; 0 for a regression.
        """
        method = self.calibration.method
        if method in ("shift", "platt") and len(self.calibration.shifts) != outputs:
            raise ValueError(
                f"a calibration must have one shift for each of the {outputs} outputs. Found "
                f"{len(self.calibration.shifts)}"
            )
        if (method != "none" and not classes) or (method == "isotonic" and classes != 2):
            raise ValueError(f'a calibration by "{method}" does not fit {classes} classes')

    def probabilities(self, outputs: npt.ArrayLike) -> Doubles:
        """Return the calibrated probability of each class, [rows, classes]."""
        return probabilities(self.calibration(outputs))

    def choose(self, shares: npt.ArrayLike) -> Integers:
        """Return the class number of each row, [rows], from probabilities [rows, classes]."""
        chances = np.asarray(shares)
        chosen = chances[:, 1] >= self.threshold if chances.shape[1] == 2 else chances.argmax(axis=1)
        return chosen.astype(np.int64)
