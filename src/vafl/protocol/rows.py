"""Array types of the protocol, and functions on row numbers.

The protocol uses numpy arrays. Only models, optimisers and noise use torch: on small batches, creating a
tensor costs more than computing with it.
"""

import numpy as np

from vafl import kernels
from vafl.arrays import Array, Floats, Matrix, RowIds
from vafl.errors import InvalidMessage

NO_ROWS: RowIds = np.empty(0, dtype=np.int64)
_SUMMED_ROWS = 65_536  # rows summed at a time, which bounds memory


def check_rows(rows: RowIds, count: int) -> None:
    """Raise InvalidMessage unless these are distinct numbers in 0..count - 1."""
    if kernels.in_order(rows, count):  # the fast path: vafl's clients send rows in ascending order
        return
    numbers = np.sort(rows)
    if (numbers[1:] == numbers[:-1]).any():
        raise InvalidMessage("VFL-4081", "rows must be distinct. Found a row twice in one message.")
    if not (numbers[0] >= 0 and numbers[-1] < count):
        raise InvalidMessage(
            "VFL-4082", f"rows must be in 0..{count - 1}. Found {numbers[0]}..{numbers[-1]}."
        )


def mean_of_rows(matrix: Matrix, rows: RowIds) -> Floats:
    """Return the mean of these rows of a matrix, [width], in bounded memory; zeros for no rows."""
    parts = [matrix[part].sum(0, dtype=np.float64) for part in in_parts(rows, _SUMMED_ROWS)]
    mean: Floats = (np.sum(parts, axis=0) / max(1, len(rows))).astype(np.float32)
    return mean


def in_parts(array: Array, size: int) -> list[Array]:
    """Split an array into parts of `size` lines. The last part may be smaller; an empty array is one part."""
    return [array[start : start + size] for start in range(0, max(1, len(array)), size)]
