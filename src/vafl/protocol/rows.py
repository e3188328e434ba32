"""Rows, as a message names them: checked, and gathered; and what a message says of them.

The protocol speaks in numpy arrays. Torch is inside the models, the optimisers and the noise: on small
batches its tensors cost more to make than to compute with.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from vafl import kernels
from vafl.errors import InvalidMessage

Rows = npt.NDArray[np.int64]
Matrix = npt.NDArray[np.float32]  # [rows, width]
Array = npt.NDArray[Any]
NO_ROWS: Rows = np.empty(0, dtype=np.int64)
_SUMMED_ROWS = 65_536  # at a time


def check_rows(rows: Rows, count: int) -> None:
    """Raises InvalidMessage unless these are distinct rows of so many."""
    if kernels.in_order(rows, count):  # as our own parties name them
        return
    numbers = np.sort(rows)
    if (numbers[1:] == numbers[:-1]).any():
        raise InvalidMessage("VFL-4081", "rows must be distinct. Found a row named twice in one message.")
    if not (numbers[0] >= 0 and numbers[-1] < count):
        raise InvalidMessage(
            "VFL-4082", f"rows must be in 0..{count - 1}. Found {numbers[0]}..{numbers[-1]}."
        )


def mean_of_rows(matrix: Matrix, rows: Rows) -> npt.NDArray[np.float32]:
    """Return the mean of these rows of a matrix, [width]; zeros for no rows. Memory stays bounded."""
    parts = [matrix[part].sum(0, dtype=np.float64) for part in in_parts(rows, _SUMMED_ROWS)]
    mean: npt.NDArray[np.float32] = (np.sum(parts, axis=0) / max(1, len(rows))).astype(np.float32)
    return mean


def in_parts(array: Array, size: int) -> list[Array]:
    """One after the other, so many lines each; the last may have fewer."""
    return [array[start : start + size] for start in range(0, max(1, len(array)), size)]
