"""Rows of numbers: some of them gathered, their squares summed.

numpy's BLAS has threads of its own, whose waiting takes a core from the others: nothing here or in
gradients.py asks it for more than it does in one thread.
"""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """tensor[rows], by numpy: it gathers in half the time torch takes."""
    return torch.from_numpy(tensor.numpy().take(rows.numpy(), 0))


def sum_of_squares(values: npt.NDArray[Any]) -> float:
    """Of all of them, whatever their order in memory; not finite if one of them is not."""
    flat = torch.from_numpy(values.ravel("K"))
    return float(torch.dot(flat, flat))
