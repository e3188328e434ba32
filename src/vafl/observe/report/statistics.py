"""Statistics of a model's scores on held-out rows: curves, intervals, bins.

All functions are pure functions of arrays. The shape of scores depends on the labels:

- two classes: the probability of the positive class, [rows]
- more classes: the probability of each class, [rows, classes]
- numbers: the predictions, [rows]
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from vafl.arrays import Doubles, Flags, Integers

Z95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution
REPLICATES = 1000  # of the bootstrap
_MOST_GROUPS = 2000  # the most units that the bootstrap resamples
_SEED = 95  # fixed, so that a report is reproducible
_LEAST_PROBABILITY = 1e-15  # keeps the log loss finite


@dataclass(frozen=True)
class Interval:
    """A 95 % confidence interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """The points of a curve from left to right; x and y are [points]."""

    x: Doubles
    y: Doubles


# --- two classes: ranking ---


def _counts_by_threshold(scores: Doubles, positive: Flags) -> tuple[Doubles, Doubles]:
    """Return the true and false positives at each distinct threshold, highest first, starting at (0, 0)."""
    order = np.argsort(-scores, kind="stable")
    last_of_score = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    true = np.append(0.0, np.cumsum(positive[order], dtype=np.float64)[last_of_score])
    return true, np.append(0.0, last_of_score + 1.0) - true


def roc(scores: Doubles, positive: Flags) -> Curve:
    """Return false and true positive rates at each distinct threshold. Needs rows of both classes."""
    true, false = _counts_by_threshold(scores, positive)
    return Curve(false / false[-1], true / true[-1])


def precision_recall(scores: Doubles, positive: Flags) -> Curve:
    """Return recall and precision at each distinct threshold, the highest first. Needs a positive row."""
    true, false = _counts_by_threshold(scores, positive)
    return Curve(true[1:] / true[-1], true[1:] / (true[1:] + false[1:]))


def average_precision(scores: Doubles, positive: Flags) -> float:
    """Return the area under the steps of the precision-recall curve."""
    curve = precision_recall(scores, positive)
    return float(np.diff(curve.x, prepend=0.0) @ curve.y)


def thinned(curve: Curve, points: int = 200) -> Curve:
    """Return at most `points` points of a curve, spread evenly along its length, including both ends."""
    if len(curve.x) <= points:
        return curve
    along = np.append(0.0, np.cumsum(np.hypot(np.diff(curve.x), np.diff(curve.y))))
    chosen = np.unique(np.searchsorted(along, np.linspace(0, along[-1], points)).clip(0, len(along) - 1))
    chosen = np.unique(np.append(chosen, (0, len(along) - 1)))[:points]
    chosen[-1] = len(along) - 1
    return Curve(curve.x[chosen], curve.y[chosen])


def auc(scores: Doubles, positive: Flags) -> tuple[float, Interval | None]:
    """Return the area under the ROC curve and DeLong's interval. Needs rows of both classes.

    The variance is that of DeLong, DeLong and Clarke-Pearson (1988), computed from midranks as in Sun and Xu
    (2014). The interval is None if a class has a single row. It is also None if all pairs, or no pairs, are
    ranked correctly: the estimated variance is then 0, which would claim certainty.
    """
    won, lost = _placements(scores, positive)
    area = float(won.mean())
    reach = _delong_reach(won, lost)
    return area, None if reach is None else Interval(max(0.0, area - reach), min(1.0, area + reach))


def auc_difference(scores: Doubles, others: Doubles, positive: Flags) -> Interval | None:
    """Return DeLong's interval of the AUC of `scores` minus the AUC of `others`, on the same rows.

    Two models that are measured on the same rows make similar mistakes. The paired variance includes their
    covariance, so the interval is usually much narrower than the two separate ones suggest. Needs rows of
    both classes. The interval is None as in `auc`: equal rankings have an estimated variance of 0.
    """
    won, lost = (
        placements - other
        for placements, other in zip(
            _placements(scores, positive), _placements(others, positive), strict=True
        )
    )
    difference, reach = float(won.mean()), _delong_reach(won, lost)
    return None if reach is None else Interval(max(-1.0, difference - reach), min(1.0, difference + reach))


def _placements(scores: Doubles, positive: Flags) -> tuple[Doubles, Doubles]:
    """Return the placement of every row. The mean over either class is the AUC.

    Returns:
        For each positive row the share of negative rows below it, and for each negative row the share of
        positive rows above it. Ties count half.
    """
    above, below = scores[positive], scores[~positive]
    everywhere = _midranks(np.concatenate((above, below)))
    won = (everywhere[: len(above)] - _midranks(above)) / len(below)
    lost = 1 - (everywhere[len(above) :] - _midranks(below)) / len(above)
    return won, lost


def _delong_reach(won: Doubles, lost: Doubles) -> float | None:
    """Return half the width of the interval, from placements or differences of placements.

    None if the variance cannot be estimated or is 0.
    """
    if min(len(won), len(lost)) < 2:
        return None
    variance = won.var(ddof=1) / len(won) + lost.var(ddof=1) / len(lost)
    return Z95 * float(np.sqrt(variance)) if variance > 0 else None


def _midranks(values: Doubles) -> Doubles:
    """Return the ranks of the values, starting at 1. Equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Doubles = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks


# --- bootstrap ---


def bootstrap(sums: Doubles, statistic: Callable[[Doubles], Doubles], seed: int = _SEED) -> Interval | None:
    """Return the percentile bootstrap interval of a statistic that is a function of sums over rows.

    Above 2,000 rows, the rows are randomly divided into 2,000 groups of equal size, and groups are resampled
    instead of rows. This bounds time and memory, and leaves the variance of a sum unchanged.

    Args:
        sums: The contribution of each row to each sum, [rows, terms].
        statistic: Maps sums [replicates, terms] to the statistic [replicates].

    Returns:
        The interval; None if the statistic is undefined in more than half of the replicates.
    """
    if len(sums) > _MOST_GROUPS:
        order = np.random.default_rng(seed).permutation(len(sums))
        starts = np.linspace(0, len(sums), _MOST_GROUPS, endpoint=False).astype(np.int64)
        sums = np.add.reduceat(sums[order], starts)
    with np.errstate(all="ignore"):
        values = statistic(_resamples(len(sums), seed) @ sums)
    values = values[np.isfinite(values)]
    if len(values) < REPLICATES / 2:
        return None
    low, high = np.quantile(values, (0.025, 0.975))
    return Interval(float(low), float(high))


@lru_cache(maxsize=2)
def _resamples(groups: int, seed: int) -> Doubles:
    """Return how often each replicate draws each group, [replicates, groups]. All metrics share the draws."""
    generator = np.random.default_rng(seed)
    shares = np.full(groups, 1 / groups)
    return generator.multinomial(groups, shares, REPLICATES).astype(np.float64)


def interval_of(metric: str, scores: Doubles, labels: Doubles) -> Interval | None:
    """Return the interval of a metric; None if there are too few rows, or the metric has no interval.

    Args:
        metric: The metric's name.
        scores: [rows], or [rows, classes] for more than two classes.
        labels: The class indices, or numbers, [rows].
    """
    if metric == "auc":
        positive = labels == 1
        return auc(scores, positive)[1] if positive.any() and not positive.all() else None
    if metric not in _TERMS:
        return None
    terms = [np.ones(len(labels)), *_TERMS[metric](scores, labels)]
    return bootstrap(np.stack(terms, axis=1), _STATISTICS.get(metric, _mean))


def difference_interval(metric: str, scores: Doubles, others: Doubles, labels: Doubles) -> Interval | None:
    """Return the interval of a metric of `scores` minus the same metric of `others`, on the same rows.

    The interval is paired. For the AUC it is DeLong's. For other metrics, each replicate of the bootstrap
    measures both models on the same rows. None as in `interval_of`, and if the scores are equal.

    Args:
        scores, others: The scores of two models, each as in `interval_of`.
        labels: As in `interval_of`.
    """
    if metric == "auc":
        positive = labels == 1
        return auc_difference(scores, others, positive) if positive.any() and not positive.all() else None
    if metric not in _TERMS or np.array_equal(scores, others):
        return None
    terms, other_terms = _TERMS[metric](scores, labels), _TERMS[metric](others, labels)
    statistic = _STATISTICS.get(metric, _mean)

    def difference(sums: Doubles) -> Doubles:
        rows, sums_of_scores, sums_of_others = np.split(sums, (1, 1 + len(terms)), axis=1)
        gain: Doubles = statistic(np.hstack((rows, sums_of_scores))) - statistic(
            np.hstack((rows, sums_of_others))
        )
        return gain

    return bootstrap(np.stack([np.ones(len(labels)), *terms, *other_terms], axis=1), difference)


# Every metric except the AUC is a function of sums over rows. The functions below return the contribution of
# each row to these sums. The first sum, which is left out here, counts the rows.


def _correct(scores: Doubles, labels: Doubles) -> list[Doubles]:
    predicted = scores.argmax(axis=1) if scores.ndim == 2 else scores > 0.5
    return [(predicted == labels).astype(np.float64)]


def _log_loss(scores: Doubles, labels: Doubles) -> list[Doubles]:
    if scores.ndim == 2:
        of_label = np.take_along_axis(scores, labels.astype(np.int64)[:, None], 1)[:, 0]
    else:
        of_label = np.where(labels == 1, scores, 1 - scores)
    return [-np.log(np.maximum(of_label, _LEAST_PROBABILITY))]


def _hits(scores: Doubles, labels: Doubles) -> list[Doubles]:
    predicted, positive = scores > 0.5, labels == 1
    return [each.astype(np.float64) for each in (predicted & positive, predicted, positive)]


def _hits_by_class(scores: Doubles, labels: Doubles) -> list[Doubles]:
    """Return indicators for correct, predicted and labelled, with one column per class."""
    unit = np.eye(scores.shape[1])
    predicted, labelled = unit[scores.argmax(axis=1)], unit[labels.astype(np.int64)]
    return [*(predicted * labelled).T, *predicted.T, *labelled.T]


def _spread(scores: Doubles, labels: Doubles) -> list[Doubles]:
    centred = labels - labels.mean()  # avoids cancellation in the sum of squares if labels are far from 0
    return [centred, centred**2, (scores - labels) ** 2]


_TERMS: dict[str, Callable[[Doubles, Doubles], list[Doubles]]] = {
    "accuracy": _correct,
    "log_loss": _log_loss,
    "brier": lambda scores, labels: [(scores - labels) ** 2],
    "f1": _hits,
    "macro_f1": _hits_by_class,
    "mae": lambda scores, labels: [np.abs(scores - labels)],
    "rmse": lambda scores, labels: [(scores - labels) ** 2],
    "r2": _spread,
}

# The functions below map sums [replicates, terms] to the metric [replicates].


def _mean(sums: Doubles) -> Doubles:
    mean: Doubles = sums[:, 1] / sums[:, 0]
    return mean


def _f1(sums: Doubles) -> Doubles:
    _, correct, predicted, labelled = sums.T
    f1: Doubles = 2 * correct / (predicted + labelled)
    return f1


def _macro_f1(sums: Doubles) -> Doubles:
    correct, predicted, labelled = np.split(sums[:, 1:], 3, axis=1)
    macro: Doubles = np.nanmean(2 * correct / (predicted + labelled), axis=1)
    return macro


def _r2(sums: Doubles) -> Doubles:
    rows, labels, squares, errors = sums.T
    r2: Doubles = 1 - errors / (squares - labels**2 / rows)
    return r2


_STATISTICS: dict[str, Callable[[Doubles], Doubles]] = {
    "f1": _f1,
    "macro_f1": _macro_f1,
    "rmse": lambda sums: np.sqrt(_mean(sums)),
    "r2": _r2,
}


# --- two classes: probabilities and shares ---


@dataclass(frozen=True)
class Bin:
    """A group of rows with similar scores.

    Attributes:
        rows: The number of rows.
        score: The mean score.
        share: The share of positive rows.
        interval: Wilson's interval of the share.
    """

    rows: int
    score: float
    share: float
    interval: Interval


def reliability(scores: Doubles, positive: Flags, bins: int = 10) -> list[Bin]:
    """Return predicted probabilities and actual shares in bins of about equal size.

    Rows with equal scores are in the same bin, so there may be fewer bins.
    """
    edges = np.unique(np.quantile(scores, np.linspace(0, 1, bins + 1)[1:-1]))
    places = np.searchsorted(edges, scores, side="left")
    groups = []
    for place in np.unique(places).tolist():
        inside = places == place
        rows, share = int(inside.sum()), float(positive[inside].mean())
        groups.append(Bin(rows, float(scores[inside].mean()), share, wilson(share, rows)))
    return groups


def wilson(share: float, rows: int) -> Interval:
    """Return Wilson's 95 % interval of a share that was observed in `rows` rows."""
    shrink = 1 + Z95**2 / rows
    centre = (share + Z95**2 / (2 * rows)) / shrink
    reach = Z95 / shrink * float(np.sqrt(share * (1 - share) / rows + Z95**2 / (4 * rows**2)))
    return Interval(max(0.0, centre - reach), min(1.0, centre + reach))


@dataclass(frozen=True)
class Tenth:
    """The rows of one tenth of a ranking, the highest scores first.

    Attributes:
        positives: The positive rows in this tenth. If rows with equal scores are on both sides of its border,
            their positives are divided in proportion, so this need not be a whole number.
        share: `positives` / `rows`.
        lift: `share` as a multiple of the share of positives in all rows.
        found: The share of all positives that are in this tenth or an earlier one.
    """

    rows: int
    positives: float
    share: float
    lift: float
    found: float


def gains(scores: Doubles, positive: Flags, parts: int = 10) -> list[Tenth]:
    """Return the tenths of the ranking by score. Needs a positive row, and at least `parts` rows."""
    order = np.argsort(-scores, kind="stable")
    _, group, sizes = np.unique(scores[order], return_inverse=True, return_counts=True)
    # The expected label of a row if rows of equal scores were ordered at random:
    expected = (np.bincount(group, weights=positive[order]) / sizes)[group]
    total, found, tenths = float(positive.sum()), 0.0, []
    for tenth in np.array_split(expected, parts):
        positives = float(tenth.sum())
        found += positives
        share = positives / len(tenth)
        tenths.append(Tenth(len(tenth), positives, share, share * len(expected) / total, found / total))
    return tenths


# --- classes ---


def confusion(predicted: Integers, actual: Integers, classes: int) -> Integers:
    """Return the number of rows by actual and predicted class, [actual classes, predicted classes]."""
    counts = np.bincount(actual * classes + predicted, minlength=classes * classes)
    return counts.reshape(classes, classes).astype(np.int64)


# --- numbers ---


@dataclass(frozen=True)
class ErrorTenth:
    """The rows of one tenth by prediction, the lowest first.

    Attributes:
        rows: The number of rows.
        predicted, actual: The mean prediction and the mean label.
        error: The mean absolute error.
    """

    rows: int
    predicted: float
    actual: float
    error: float


def errors_by_tenth(predictions: Doubles, labels: Doubles, parts: int = 10) -> list[ErrorTenth]:
    """Return the means and errors of each tenth by prediction. Needs at least `parts` rows."""
    order = np.lexsort((labels, predictions))
    return [
        ErrorTenth(
            len(rows),
            float(predictions[rows].mean()),
            float(labels[rows].mean()),
            float(np.abs(predictions[rows] - labels[rows]).mean()),
        )
        for rows in np.array_split(order, parts)
    ]


def usual_range(*values: Doubles, share: float = 0.99) -> tuple[float, float]:
    """Return a range that includes the middle `share` of each of the arrays."""
    tails = ((1 - share) / 2, (1 + share) / 2)
    bounds = [np.quantile(each, tails) for each in values]
    low, high = min(float(ends[0]) for ends in bounds), max(float(ends[1]) for ends in bounds)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
