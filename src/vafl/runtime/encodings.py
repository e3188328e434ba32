"""How matrices travel: float32 as they are, or shorter and rounded."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vafl.runtime.settings import Encoding

Frame = bytes | memoryview
Parts = list[Frame]
Pack = Callable[[Tensor], Parts]
Unpack = Callable[[Frame, int, int, int], Tensor]  # of the frame, from this position: lines, width
_FLOAT = np.dtype("<f4")


def matrix_bytes(encoding: Encoding, lines: int, width: int) -> int:
    """How many a matrix takes."""
    if encoding == "int8":
        return lines * (width + 4)
    return lines * width * (4 if encoding == "float32" else 2)


def _pack_float32(matrix: Tensor) -> Parts:
    return [np.ascontiguousarray(matrix.numpy(), _FLOAT).data]


def _unpack_float32(frame: Frame, position: int, lines: int, width: int) -> Tensor:
    flat = np.frombuffer(frame, _FLOAT, lines * width, position)
    return torch.from_numpy(flat.reshape(lines, width).astype(np.float32))


def _pack_as(kind: torch.dtype) -> Pack:
    def pack(matrix: Tensor) -> Parts:
        return [matrix.to(kind).contiguous().view(torch.uint8).numpy().data]

    return pack


def _unpack_as(kind: torch.dtype) -> Unpack:
    def unpack(frame: Frame, position: int, lines: int, width: int) -> Tensor:
        if not lines * width:  # torch does not look at no bytes as another type
            return torch.zeros(lines, width)
        raw = np.frombuffer(frame, np.uint8, lines * width * kind.itemsize, position).copy()
        return torch.from_numpy(raw).view(kind).view(lines, width).float()

    return unpack


def _pack_int8(matrix: Tensor) -> Parts:
    """Each row by its own scale: the largest magnitude becomes 127."""
    scales = matrix.abs().amax(dim=1).div_(127) if matrix.shape[1] else matrix.new_zeros(len(matrix))
    steps = (matrix / scales.clamp_min(1e-30)[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return [scales.numpy().data, steps.contiguous().numpy().data]


def _unpack_int8(frame: Frame, position: int, lines: int, width: int) -> Tensor:
    scales = torch.from_numpy(np.frombuffer(frame, "<f4", lines, position).copy())
    steps = np.frombuffer(frame, np.int8, lines * width, position + 4 * lines).copy()
    return torch.from_numpy(steps).view(lines, width) * scales[:, None]


PACKING: dict[Encoding, tuple[Pack, Unpack]] = {
    "float32": (_pack_float32, _unpack_float32),
    "float16": (_pack_as(torch.float16), _unpack_as(torch.float16)),
    "bfloat16": (_pack_as(torch.bfloat16), _unpack_as(torch.bfloat16)),
    "int8": (_pack_int8, _unpack_int8),
}
