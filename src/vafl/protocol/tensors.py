"""The border between the protocol's arrays and torch: nothing is copied that can be shared."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vafl.protocol.rows import Array


def as_tensor(array: Array) -> Tensor:
    """In the array's memory, unless that is not to be written to: torch would not keep to it."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def as_arrays(tensors: Sequence[Tensor]) -> list[Array]:
    """The tensors' own memory, but for numbers that numpy does not know."""
    plain = (tensor.detach() for tensor in tensors)
    return [(own.float() if own.dtype == torch.bfloat16 else own).numpy() for own in plain]
