"""Statistics of a model's scores on held-out rows: curves, intervals, bins.

Everything here is a pure function of arrays. Scores of two classes are [rows], the probability of the
positive class; of several classes [rows, classes]; of numbers [rows], the predictions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]

Z95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution
REPLICATES = 1000
_MOST_GROUPS = 2000
_SEED = 95
_LEAST_PROBABILITY = 1e-15


@dataclass(frozen=True)
class Interval:
    """A 95 % confidence interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """Points of a curve from left to right, each [points]."""

    x: Floats
    y: Floats


# --- two classes: ranking ---


def _counts_by_threshold(scores: Floats, positive: Flags) -> tuple[Floats, Floats]:
    """Return the true and false positives at each distinct threshold, the highest first, from (0, 0) on."""
    order = np.argsort(-scores, kind="stable")
    last_of_score = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    true = np.append(0.0, np.cumsum(positive[order], dtype=np.float64)[last_of_score])
    return true, np.append(0.0, last_of_score + 1.0) - true


def roc(scores: Floats, positive: Flags) -> Curve:
    """Return false and true positive rates at each distinct threshold. Needs rows of both classes."""
    true, false = _counts_by_threshold(scores, positive)
    return Curve(false / false[-1], true / true[-1])


def precision_recall(scores: Floats, positive: Flags) -> Curve:
    """Return recall and precision at each distinct threshold, the highest first. Needs a positive row."""
    true, false = _counts_by_threshold(scores, positive)
    return Curve(true[1:] / true[-1], true[1:] / (true[1:] + false[1:]))


def average_precision(scores: Floats, positive: Flags) -> float:
    """Return the area under the steps of the precision-recall curve."""
    curve = precision_recall(scores, positive)
    return float(np.diff(curve.x, prepend=0.0) @ curve.y)


def thinned(curve: Curve, points: int = 200) -> Curve:
    """Return at most `points` points of a curve, spread evenly along its length; the ends stay."""
    if len(curve.x) <= points:
        return curve
    along = np.append(0.0, np.cumsum(np.hypot(np.diff(curve.x), np.diff(curve.y))))
    chosen = np.unique(np.searchsorted(along, np.linspace(0, along[-1], points)).clip(0, len(along) - 1))
    chosen = np.unique(np.append(chosen, (0, len(along) - 1)))[:points]
    chosen[-1] = len(along) - 1
    return Curve(curve.x[chosen], curve.y[chosen])


def auc(scores: Floats, positive: Flags) -> tuple[float, Interval | None]:
    """Return the area under the ROC curve and DeLong's interval. Needs rows of both classes.

    The variance is that of DeLong, DeLong and Clarke-Pearson (1988), computed from midranks as Sun and Xu
    (2014) do. The interval is None with a single row of a class, and if every pair is ranked right or every
    pair wrong: the estimated variance is then 0, which would claim certainty.
    """
    won, lost = _placements(scores, positive)
    area = float(won.mean())
    reach = _delong_reach(won, lost)
    return area, None if reach is None else Interval(max(0.0, area - reach), min(1.0, area + reach))


def auc_difference(scores: Floats, others: Floats, positive: Flags) -> Interval | None:
    """Return DeLong's interval of the AUC of `scores` minus the AUC of `others`, on the same rows.

    Two models that are measured on the same rows make similar mistakes. The paired variance takes the
    covariance of both into account, so the interval is usually much narrower than the two single ones
    suggest. Needs rows of both classes. None as in `auc`: equal rankings have an estimated variance of 0.
    """
    won, lost = (
        one - other
        for one, other in zip(_placements(scores, positive), _placements(others, positive), strict=True)
    )
    difference, reach = float(won.mean()), _delong_reach(won, lost)
    return None if reach is None else Interval(max(-1.0, difference - reach), min(1.0, difference + reach))


def _placements(scores: Floats, positive: Flags) -> tuple[Floats, Floats]:
    """Return of each positive row the share of negative rows below it, and of each negative row the share of
    positive rows above it. The mean of either is the AUC."""
    above, below = scores[positive], scores[~positive]
    everywhere = _midranks(np.concatenate((above, below)))
    won = (everywhere[: len(above)] - _midranks(above)) / len(below)
    lost = 1 - (everywhere[len(above) :] - _midranks(below)) / len(above)
    return won, lost


def _delong_reach(won: Floats, lost: Floats) -> float | None:
    """Return half the width of the interval from placements, or differences of placements; None if the
    variance cannot be estimated or is 0."""
    if min(len(won), len(lost)) < 2:
        return None
    variance = won.var(ddof=1) / len(won) + lost.var(ddof=1) / len(lost)
    return Z95 * float(np.sqrt(variance)) if variance > 0 else None


def _midranks(values: Floats) -> Floats:
    """Return ranks from 1 on; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks


# --- bootstrap ---


def bootstrap(sums: Floats, statistic: Callable[[Floats], Floats], seed: int = _SEED) -> Interval | None:
    """Return the percentile bootstrap interval of a statistic that is a function of sums over rows.

    Above 2,000 rows, the rows are put at random into 2,000 groups of equal size, and groups are resampled
    instead of rows. The variance of a sum stays the same, and time and memory are bounded.

    Args:
        sums: [rows, terms], what each row adds to each sum.
        statistic: From sums [replicates, terms] to [replicates].
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
def _resamples(groups: int, seed: int) -> Floats:
    """[replicates, groups]: how often each replicate has each group. All metrics of a report share them."""
    generator = np.random.default_rng(seed)
    shares = np.full(groups, 1 / groups)
    return generator.multinomial(groups, shares, REPLICATES).astype(np.float64)


def interval_of(metric: str, scores: Floats, labels: Floats) -> Interval | None:
    """Return the interval of a metric, by name; None if the rows are too few, or it has none.

    Args:
        scores: of two classes and of numbers [rows], of several classes [rows, classes].
        labels: [rows], the places of the classes, or numbers.
    """
    if metric == "auc":
        positive = labels == 1
        return auc(scores, positive)[1] if positive.any() and not positive.all() else None
    if metric not in _TERMS:
        return None
    terms = [np.ones(len(labels)), *_TERMS[metric](scores, labels)]
    return bootstrap(np.stack(terms, axis=1), _STATISTICS.get(metric, _mean))


def difference_interval(metric: str, scores: Floats, others: Floats, labels: Floats) -> Interval | None:
    """Return the interval of a metric of `scores` minus the same metric of `others`, on the same rows.

    It is paired: DeLong's for the AUC; for other metrics each replicate of the bootstrap measures both models
    on the same drawn rows. None as in `interval_of`, and if the models do not differ.

    Args:
        scores, others: of two models, each as in `interval_of`.
        labels: [rows], as in `interval_of`.
    """
    if metric == "auc":
        positive = labels == 1
        return auc_difference(scores, others, positive) if positive.any() and not positive.all() else None
    if metric not in _TERMS or np.array_equal(scores, others):
        return None
    one, other = _TERMS[metric](scores, labels), _TERMS[metric](others, labels)
    statistic = _STATISTICS.get(metric, _mean)

    def difference(sums: Floats) -> Floats:
        rows, own, theirs = np.split(sums, (1, 1 + len(one)), axis=1)
        found: Floats = statistic(np.hstack((rows, own))) - statistic(np.hstack((rows, theirs)))
        return found

    return bootstrap(np.stack([np.ones(len(labels)), *one, *other], axis=1), difference)


# What each row adds to the sums that a metric is a function of, beside 1 for the row itself:


def _correct(scores: Floats, labels: Floats) -> list[Floats]:
    predicted = scores.argmax(axis=1) if scores.ndim == 2 else scores > 0.5
    return [(predicted == labels).astype(np.float64)]


def _log_loss(scores: Floats, labels: Floats) -> list[Floats]:
    if scores.ndim == 2:
        of_label = np.take_along_axis(scores, labels.astype(np.int64)[:, None], 1)[:, 0]
    else:
        of_label = np.where(labels == 1, scores, 1 - scores)
    return [-np.log(np.maximum(of_label, _LEAST_PROBABILITY))]


def _hits(scores: Floats, labels: Floats) -> list[Floats]:
    predicted, positive = scores > 0.5, labels == 1
    return [each.astype(np.float64) for each in (predicted & positive, predicted, positive)]


def _hits_by_class(scores: Floats, labels: Floats) -> list[Floats]:
    """Correct, predicted and labelled, one column for each class."""
    unit = np.eye(scores.shape[1])
    predicted, labelled = unit[scores.argmax(axis=1)], unit[labels.astype(np.int64)]
    return [*(predicted * labelled).T, *predicted.T, *labelled.T]


def _spread(scores: Floats, labels: Floats) -> list[Floats]:
    centred = labels - labels.mean()  # sums of squares would lose digits of labels far from 0
    return [centred, centred**2, (scores - labels) ** 2]


_TERMS: dict[str, Callable[[Floats, Floats], list[Floats]]] = {
    "accuracy": _correct,
    "log_loss": _log_loss,
    "brier": lambda scores, labels: [(scores - labels) ** 2],
    "f1": _hits,
    "macro_f1": _hits_by_class,
    "mae": lambda scores, labels: [np.abs(scores - labels)],
    "rmse": lambda scores, labels: [(scores - labels) ** 2],
    "r2": _spread,
}

# From sums [replicates, terms] to the metric, [replicates]:


def _mean(sums: Floats) -> Floats:
    mean: Floats = sums[:, 1] / sums[:, 0]
    return mean


def _f1(sums: Floats) -> Floats:
    _, correct, predicted, labelled = sums.T
    f1: Floats = 2 * correct / (predicted + labelled)
    return f1


def _macro_f1(sums: Floats) -> Floats:
    correct, predicted, labelled = np.split(sums[:, 1:], 3, axis=1)
    macro: Floats = np.nanmean(2 * correct / (predicted + labelled), axis=1)
    return macro


def _r2(sums: Floats) -> Floats:
    rows, labels, squares, errors = sums.T
    r2: Floats = 1 - errors / (squares - labels**2 / rows)
    return r2


_STATISTICS: dict[str, Callable[[Floats], Floats]] = {
    "f1": _f1,
    "macro_f1": _macro_f1,
    "rmse": lambda sums: np.sqrt(_mean(sums)),
    "r2": _r2,
}


# --- two classes: probabilities and shares ---


@dataclass(frozen=True)
class Bin:
    """Rows with similar scores.

    Attributes:
        score: The mean score of the rows.
        share: The share of positive rows.
        interval: Wilson's interval of that share.
    """

    rows: int
    score: float
    share: float
    interval: Interval


def reliability(scores: Floats, positive: Flags, bins: int = 10) -> list[Bin]:
    """Compare predicted probabilities with what happened, in bins of about equally many rows.

    Rows of equal scores stay together, so there may be fewer bins.
    """
    edges = np.unique(np.quantile(scores, np.linspace(0, 1, bins + 1)[1:-1]))
    places = np.searchsorted(edges, scores, side="left")
    found = []
    for place in np.unique(places).tolist():
        own = places == place
        rows, share = int(own.sum()), float(positive[own].mean())
        found.append(Bin(rows, float(scores[own].mean()), share, wilson(share, rows)))
    return found


def wilson(share: float, rows: int) -> Interval:
    """Return Wilson's 95 % interval of a share seen in `rows` rows."""
    shrink = 1 + Z95**2 / rows
    centre = (share + Z95**2 / (2 * rows)) / shrink
    reach = Z95 / shrink * float(np.sqrt(share * (1 - share) / rows + Z95**2 / (4 * rows**2)))
    return Interval(max(0.0, centre - reach), min(1.0, centre + reach))


@dataclass(frozen=True)
class Tenth:
    """The rows of one tenth of a ranking, the highest scores first.

    Attributes:
        positives: Positive rows in it. Rows of equal scores on both sides of a border count in proportion.
        share: `positives` / `rows`.
        lift: `share` as a multiple of the share of positives in all rows.
        found: The share of all positives in this tenth and those before it.
    """

    rows: int
    positives: float
    share: float
    lift: float
    found: float


def gains(scores: Floats, positive: Flags, parts: int = 10) -> list[Tenth]:
    """Return what each tenth of the ranking holds. Needs a positive row, and `parts` rows or more."""
    order = np.argsort(-scores, kind="stable")
    _, group, sizes = np.unique(scores[order], return_inverse=True, return_counts=True)
    # The expected label of a row if rows of equal scores were ordered at random:
    expected = (np.bincount(group, weights=positive[order]) / sizes)[group]
    total, found, tenths = float(positive.sum()), 0.0, []
    for own in np.array_split(expected, parts):
        positives = float(own.sum())
        found += positives
        share = positives / len(own)
        tenths.append(Tenth(len(own), positives, share, share * len(expected) / total, found / total))
    return tenths


# --- classes ---


def confusion(predicted: Places, actual: Places, classes: int) -> Places:
    """[classes, classes]: the number of rows by actual class (lines) and predicted class (columns)."""
    counts = np.bincount(actual * classes + predicted, minlength=classes * classes)
    return counts.reshape(classes, classes).astype(np.int64)


# --- numbers ---


@dataclass(frozen=True)
class ErrorTenth:
    """The rows of one tenth by prediction, the lowest first.

    Attributes:
        predicted, actual: Their means.
        error: The mean absolute error.
    """

    rows: int
    predicted: float
    actual: float
    error: float


def errors_by_tenth(predictions: Floats, labels: Floats, parts: int = 10) -> list[ErrorTenth]:
    """Return predictions, labels and errors of each tenth by prediction. Needs `parts` rows or more."""
    order = np.lexsort((labels, predictions))
    return [
        ErrorTenth(
            len(own),
            float(predictions[own].mean()),
            float(labels[own].mean()),
            float(np.abs(predictions[own] - labels[own]).mean()),
        )
        for own in np.array_split(order, parts)
    ]


def usual_range(*values: Floats, share: float = 0.99) -> tuple[float, float]:
    """Return a range that holds the middle `share` of each of `values`."""
    tails = ((1 - share) / 2, (1 + share) / 2)
    bounds = [np.quantile(each, tails) for each in values]
    low, high = min(float(own[0]) for own in bounds), max(float(own[1]) for own in bounds)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
