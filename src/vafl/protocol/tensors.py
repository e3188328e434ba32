"""Conversions between numpy arrays and torch tensors, which share memory where possible."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vafl.arrays import Array


def as_tensor(array: Array) -> Tensor:
    """Return a tensor in the array's memory; a copy if it is read-only, because torch might write to it."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def as_arrays(tensors: Sequence[Tensor]) -> list[Array]:
    """Return arrays in the tensors' memory; bfloat16, which numpy lacks, is converted to float32."""
    detached = (tensor.detach().cpu() for tensor in tensors)  # the tensors of a GPU have no arrays
    return [(tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy() for tensor in detached]
