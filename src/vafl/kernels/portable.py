"""The kernels in numpy, for installations without a C compiler. This module defines what each kernel does."""

import numpy as np
import numpy.typing as npt

from vafl.arrays import Array, Doubles, Floats, Integers, Iterations, Labels, RowIds


def gather(matrix: Array, rows: RowIds) -> Array:
    """Return matrix[rows]."""
    gathered: Array = matrix[rows]  # `take` would first copy a matrix that is not contiguous
    return gathered


def gather_sums(sums: Doubles, rows: RowIds) -> Floats:
    """Return sums[rows], rounded to float32."""
    return sums[rows].astype(np.float32)


def count_delays(
    stored_at: Iterations, rows: RowIds, counts: Integers, iteration: int, own: int, forever: int, /
) -> int:
    """Add the delays of these rows to a histogram per client. If the longest delay has no bin, add nothing.

    Args:
        stored_at: [table rows, clients], the iteration that each cell was stored for.
        rows: the rows to count.
        counts: [clients, bins]. Delay d is in bin d + 2, delays of at least `forever` are in bin 1, and all
            delays of the client `own` are in bin 0.
        iteration: the current iteration.
        own: the client to leave out of the other bins; -1 for none.
        forever: delays from here on are infinite.

    Returns:
        The longest finite delay.
    """
    clients, bins = counts.shape
    delays = np.int32(iteration) - stored_at[rows]
    finite = np.where(delays < forever, delays, 0)
    longest = int(finite.max(initial=0))
    if finite.min(initial=0) < 0:
        raise ValueError(f"a delay must be 0 or more. Found {finite.min()}.")
    if longest < bins - 2:
        places = np.where(delays < forever, delays + 2, 1)
        if own >= 0:
            places[:, own] = 0
        places += bins * np.arange(clients, dtype=np.int32)
        counts += np.bincount(places.ravel(), minlength=clients * bins).reshape(clients, bins)
    return longest


def store(cells: Floats, stored_at: Iterations, rows: RowIds, fresh: Floats, iteration: int, /) -> bool:
    """Set cells[rows] = fresh and stored_at[rows] = iteration, for distinct rows; return True."""
    _as_items(cells)[rows] = _as_items(fresh)
    stored_at[rows] = iteration
    return True


def store_summed(
    cells: Floats,
    stored_at: Iterations,
    rows: RowIds,
    fresh: Floats,
    sums: Doubles,
    iteration: int,
    largest: float,
    /,
) -> bool:
    """Do the same as `store`, and update the sums that the cells are part of.

    Returns:
        Whether all old and new values are at most `largest` in magnitude. If not, the sums may have lost
        digits, and the caller must sum the cells again.
    """
    old, changed = cells[rows], sums[rows]
    changed -= old
    changed += fresh
    _as_items(sums)[rows] = _as_items(changed)
    store(cells, stored_at, rows, fresh, iteration)
    return bool(np.abs(old).max(initial=0) <= largest and np.abs(fresh).max(initial=0) <= largest)


@np.errstate(all="ignore")
def add_row(matrix: Floats, row: Floats, /) -> None:
    """Add `row` to each row of the matrix, in place."""
    matrix += row


@np.errstate(all="ignore")
def sum_rows(matrix: Floats) -> Floats:
    """Return matrix.sum(0), accumulated in float64: a float32 sum of many rows would lose digits."""
    total: Floats = matrix.sum(0, dtype=np.float64).astype(np.float32)
    return total


@np.errstate(all="ignore")
def softmax(scores: Floats, labels: Labels, weights: Floats) -> tuple[float, Floats]:
    """Return the weighted cross-entropy loss and its slopes w.r.t. the scores.

    The loss is the sum over i of weights[i] * (log(sum of exp(scores[i])) - scores[i, labels[i]]). It is
    computed in the type of the scores. It is not finite if a score is NaN or infinite. An exception is minus
    infinity, which gives a class the probability 0 and makes the loss infinite only at the label.

    The reductions run over the first axis of the transposed scores, because numpy and torch are slow along a
    short last axis.
    """
    shares = scores.T.copy()
    shares -= shares.max(0)
    classes = labels.astype(np.int64)  # the products below would overflow a small integer type
    correct = classes * len(scores) + np.arange(len(scores))  # flat indices of the labels in [classes, batch]
    of_labels = shares.take(correct)
    np.exp(shares, out=shares)
    totals = shares.sum(0)
    shares /= totals
    shares.reshape(-1)[correct] -= 1
    slopes = np.multiply(shares.T, weights[:, None], out=np.empty_like(scores))
    return float((np.log(totals) - of_labels) @ weights), slopes


def _as_items(matrix: Array) -> npt.NDArray[np.void]:
    """Return a view with each row as one item, which numpy scatters three times faster than rows."""
    return matrix.view(np.dtype((np.void, matrix.shape[1] * matrix.itemsize)))[:, 0]
