"""The loops of portable.py in C, for float32 and rows that are each in one piece; numpy does the others."""

import numpy as np

from vafl.kernels import _native, portable
from vafl.kernels._native import add_row, count_delays, descend, in_order, store, store_summed
from vafl.kernels.portable import Array, Floats, Iterations, Labels, Numbers, Sums

__all__ = ["add_row", "all_finite", "count_delays", "descend", "gather", "gather_delays", "gather_sums"]
__all__ += ["in_order", "softmax", "store", "store_summed", "sum_rows"]

_LABELS = "BHIlq"  # the types that the loop reads as they are


def gather(matrix: Array, rows: Numbers) -> Array:
    """matrix[rows]."""
    if not matrix.flags.c_contiguous and not matrix[:1].flags.c_contiguous:
        return portable.gather(matrix, rows)
    found: Array = np.empty((len(rows), *matrix.shape[1:]), matrix.dtype)
    _native.gather(matrix, rows, found)
    return found


def gather_sums(sums: Sums, rows: Numbers) -> Floats:
    """sums[rows], rounded to float32."""
    found = np.empty((len(rows), sums.shape[1]), np.float32)
    _native.gather_sums(sums, rows, found)
    return found


def gather_delays(stored_at: Iterations, rows: Numbers, iteration: int) -> Iterations:
    """iteration - stored_at[rows]."""
    found = np.empty((len(rows), stored_at.shape[1]), np.int32)
    _native.gather_delays(stored_at, rows, found, iteration)
    return found


def all_finite(matrix: Floats) -> bool:
    """Whether there is no NaN and no infinity among these."""
    return _native.all_finite(matrix) if matrix.flags.c_contiguous else portable.all_finite(matrix)


def sum_rows(matrix: Floats) -> Floats:
    """matrix.sum(0), by way of float64."""
    total = np.empty(matrix.shape[1], np.float32)
    _native.sum_rows(np.ascontiguousarray(matrix), total)
    return total


def softmax(scores: Floats, labels: Labels, weights: Floats) -> tuple[float, Floats]:
    """The weighted loss, and its slopes."""
    if scores.dtype != np.float32 or not scores.flags.c_contiguous:
        return portable.softmax(scores, labels, weights)
    own = labels if labels.dtype.char in _LABELS else labels.astype(np.int64)
    slopes = np.empty(scores.shape, np.float32)
    return _native.softmax(scores, np.ascontiguousarray(own), weights, slopes), slopes
