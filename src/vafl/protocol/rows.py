"""Rows of numbers: checked as a message names them, gathered, their squares summed.

numpy's BLAS has threads of its own, whose waiting takes a core from the others: nothing here or in
gradients.py asks it for more than it does in one thread.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vafl.errors import InvalidMessage

_BY_TORCH = 10_000  # numbers of a product; numpy's BLAS would use several threads for more


def check_rows(rows: Tensor, count: int) -> None:
    """Raises InvalidMessage unless these are distinct rows of so many."""
    numbers = rows.numpy()
    if np.count_nonzero(numbers[1:] <= numbers[:-1]):  # our own parties name rows in order
        numbers = np.sort(numbers)
        if (numbers[1:] == numbers[:-1]).any():
            raise InvalidMessage("rows must be distinct. Found a row named twice in one message.")
    if len(numbers) and not (numbers[0] >= 0 and numbers[-1] < count):
        raise InvalidMessage(f"rows must be in 0..{count - 1}. Found {numbers[0]}..{numbers[-1]}.")


def take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """tensor[rows], by numpy: it gathers in half the time torch takes."""
    return torch.from_numpy(tensor.numpy().take(rows.numpy(), 0))


def sum_of_squares(values: npt.NDArray[Any]) -> float:
    """Of all of them, whatever their order in memory; not finite if one of them is not."""
    flat = values.ravel("K")
    if flat.size < _BY_TORCH:
        return float(np.vdot(flat, flat))  # which, other than dot, is silent where it overflows
    one = torch.from_numpy(flat)
    return float(torch.dot(one, one))
