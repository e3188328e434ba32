"""What each loop means, by numpy: for machines that had no C compiler when vafl was installed."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]
Labels = npt.NDArray[np.integer]
Floats = npt.NDArray[np.float32]
Sums = npt.NDArray[np.float64]
Iterations = npt.NDArray[np.int32]


def in_order(rows: Numbers, count: int, /) -> bool:
    """Whether these rise, and are in 0..count - 1."""
    if np.count_nonzero(rows[1:] <= rows[:-1]):
        return False
    return not len(rows) or bool(rows[0] >= 0 and rows[-1] < count)


def gather(matrix: Array, rows: Numbers) -> Array:
    """matrix[rows]."""
    found: Array = matrix[rows]  # `take` would first copy a whole matrix whose rows lie apart
    return found


def gather_sums(sums: Sums, rows: Numbers) -> Floats:
    """sums[rows], rounded to float32."""
    return sums[rows].astype(np.float32)


def gather_delays(stored_at: Iterations, rows: Numbers, iteration: int) -> Iterations:
    """iteration - stored_at[rows]."""
    found: Iterations = np.int32(iteration) - stored_at[rows]
    return found


def count_delays(
    stored_at: Iterations, rows: Numbers, counts: Numbers, iteration: int, own: int, forever: int, /
) -> int:
    """Counts the delays of these rows, [uses, clients], into [clients, bins]: delay d into bin d + 2.

    Bin 1 is for delays of `forever` and more, bin 0 for all of the client `own` (-1: none). If the longest
    delay does not fit, nothing is counted.

    Returns:
        The longest.
    """
    clients, bins = counts.shape
    delays = gather_delays(stored_at, rows, iteration)
    known = np.where(delays < forever, delays, 0)
    longest = int(known.max(initial=0))
    if known.min(initial=0) < 0:
        raise ValueError(f"a delay must be 0 or more. Found {known.min()}.")
    if longest < bins - 2:
        places = np.where(delays < forever, delays + 2, 1)
        if own >= 0:
            places[:, own] = 0
        places += bins * np.arange(clients, dtype=np.int32)
        counts += np.bincount(places.ravel(), minlength=clients * bins).reshape(clients, bins)
    return longest


def store(cells: Floats, stored_at: Iterations, rows: Numbers, fresh: Floats, iteration: int, /) -> bool:
    """cells[rows] = fresh, and stored_at[rows] = iteration, for distinct rows; True."""
    _as_items(cells)[rows] = _as_items(fresh)
    stored_at[rows] = iteration
    return True


def store_summed(
    cells: Floats,
    stored_at: Iterations,
    rows: Numbers,
    fresh: Floats,
    sums: Sums,
    iteration: int,
    largest: float,
    /,
) -> bool:
    """As `store`, and keeps up sums that the cells are part of.

    Returns:
        Whether nothing that came or went was beyond `largest`, which takes digits of a sum with it.
    """
    old, changed = cells[rows], sums[rows]
    changed -= old
    changed += fresh
    _as_items(sums)[rows] = _as_items(changed)
    store(cells, stored_at, rows, fresh, iteration)
    return bool(np.abs(old).max(initial=0) <= largest and np.abs(fresh).max(initial=0) <= largest)


def all_finite(matrix: Floats) -> bool:
    """Whether there is no NaN and no infinity among these."""
    return bool(np.isfinite(matrix).all())


@np.errstate(all="ignore")
def add_row(matrix: Floats, row: Floats, /) -> None:
    """matrix += row: to each of its own."""
    matrix += row


@np.errstate(all="ignore")
def descend(values: Floats, moves: Floats, step_size: float, /) -> None:
    """values -= step_size * moves, in float32."""
    values -= step_size * moves


@np.errstate(all="ignore")
def sum_rows(matrix: Floats) -> Floats:
    """matrix.sum(0), by way of float64: added row after row, many rows would lose digits."""
    total: Floats = matrix.sum(0, dtype=np.float64).astype(np.float32)
    return total


@np.errstate(all="ignore")
def softmax(scores: Floats, labels: Labels, weights: Floats) -> tuple[float, Floats]:
    """The sum over i of weights[i] * (log(sum of exp(scores[i])) - scores[i, labels[i]]), and its slopes.

    In float64 if the scores are. Not finite if a score is infinite or not a number; one of minus infinity
    has a share of 0, and matters at the label only.
    Done class after class: along the last axis numpy and torch take long where classes are few.
    """
    shares = scores.T.copy()
    shares -= shares.max(0)
    places = labels.astype(np.int64)  # a small type could not hold what follows
    correct = places * len(scores) + np.arange(len(scores))  # their places in what is [classes, batch]
    of_labels = shares.take(correct)
    np.exp(shares, out=shares)
    totals = shares.sum(0)
    shares /= totals
    shares.reshape(-1)[correct] -= 1
    slopes = np.multiply(shares.T, weights[:, None], out=np.empty_like(scores))
    return float((np.log(totals) - of_labels) @ weights), slopes


def _as_items(matrix: Array) -> npt.NDArray[np.void]:
    """Each row as one item: numpy scatters those in a third of the time that rows take."""
    return matrix.view(np.dtype((np.void, matrix.shape[1] * matrix.itemsize)))[:, 0]
