"""The kernels in C, for float32 matrices with contiguous rows. Other inputs go to portable.py."""

import numpy as np

from vafl.arrays import Array, Doubles, Floats, Labels, RowIds
from vafl.kernels import _native, portable
from vafl.kernels._native import add_row, count_delays, store, store_summed

__all__ = ["add_row", "count_delays", "gather", "gather_sums", "softmax", "store", "store_summed", "sum_rows"]

_LABELS = "BHIlq"  # the integer types that the C kernel reads without conversion


def gather(matrix: Array, rows: RowIds) -> Array:
    """Return matrix[rows]."""
    if not matrix.flags.c_contiguous and not matrix[:1].flags.c_contiguous:
        return portable.gather(matrix, rows)
    gathered: Array = np.empty((len(rows), *matrix.shape[1:]), matrix.dtype)
    _native.gather(matrix, rows, gathered)
    return gathered


def gather_sums(sums: Doubles, rows: RowIds) -> Floats:
    """Return sums[rows], rounded to float32."""
    gathered = np.empty((len(rows), sums.shape[1]), np.float32)
    _native.gather_sums(sums, rows, gathered)
    return gathered


def sum_rows(matrix: Floats) -> Floats:
    """Return matrix.sum(0), accumulated in float64."""
    total = np.empty(matrix.shape[1], np.float32)
    _native.sum_rows(np.ascontiguousarray(matrix), total)
    return total


def softmax(scores: Floats, labels: Labels, weights: Floats) -> tuple[float, Floats]:
    """Return the weighted cross-entropy loss and its slopes. See portable.py."""
    if scores.dtype != np.float32 or not scores.flags.c_contiguous:
        return portable.softmax(scores, labels, weights)
    readable = labels if labels.dtype.char in _LABELS else labels.astype(np.int64)
    slopes = np.empty(scores.shape, np.float32)
    return _native.softmax(scores, np.ascontiguousarray(readable), weights, slopes), slopes
