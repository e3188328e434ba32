"""Functions on row numbers.

The protocol uses numpy arrays. Only models, optimisers and noise use torch: on small batches, creating a
tensor costs more than computing with it.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from vafl.arrays import Array, Floats, Matrix, RowIds
from vafl.errors import InvalidMessage

NO_ROWS: RowIds = np.empty(0, dtype=np.int64)
_SUMMED_ROWS = 65_536  # rows summed at a time, which bounds memory


def check_rows(rows: RowIds, count: int) -> None:
    """Raise InvalidMessage unless these are distinct numbers in 0..count - 1."""
    if np.count_nonzero(rows[1:] <= rows[:-1]):  # vafl's own clients send rows in ascending order
        rows = np.sort(rows)
        if (rows[1:] == rows[:-1]).any():
            raise InvalidMessage("VFL-4081", "rows must be distinct. Found a row twice in one message.")
    if len(rows) and not (rows[0] >= 0 and rows[-1] < count):
        raise InvalidMessage("VFL-4082", f"rows must be in 0..{count - 1}. Found {rows[0]}..{rows[-1]}.")


def mean_of_rows(matrix: Matrix, rows: RowIds) -> Floats:
    """Return the mean of these rows of a matrix, [width], in bounded memory; zeros for no rows."""
    parts = [matrix[part].sum(0, dtype=np.float64) for part in in_parts(rows, _SUMMED_ROWS)]
    mean: Floats = (np.sum(parts, axis=0) / max(1, len(rows))).astype(np.float32)
    return mean


def slices_of(sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the slice of each of several parts with these sizes, laid end to end."""
    return tuple(slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True))


def in_parts(array: Array, size: int) -> list[Array]:
    """Split an array into parts of `size` lines. The last part may be smaller; an empty array is one part."""
    return [array[start : start + size] for start in range(0, max(1, len(array)), size)]
