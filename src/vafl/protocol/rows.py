"""Rows, as a message names them: checked, and gathered."""

import numpy as np
import torch
from torch import Tensor

from vafl import kernels
from vafl.errors import InvalidMessage


def check_rows(rows: Tensor, count: int) -> None:
    """Raises InvalidMessage unless these are distinct rows of so many."""
    numbers = rows.numpy()
    if kernels.in_order(numbers, count):  # as our own parties name them
        return
    numbers = np.sort(numbers)
    if (numbers[1:] == numbers[:-1]).any():
        raise InvalidMessage("rows must be distinct. Found a row named twice in one message.")
    if not (numbers[0] >= 0 and numbers[-1] < count):
        raise InvalidMessage(f"rows must be in 0..{count - 1}. Found {numbers[0]}..{numbers[-1]}.")


def take_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """tensor[rows]."""
    return torch.from_numpy(kernels.gather(tensor.numpy(), rows.numpy()))
