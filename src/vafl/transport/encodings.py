"""Encode matrices as float32, which is exact, or as float16, bfloat16 or int8, which are rounded."""

from collections.abc import Callable

import numpy as np
import torch

from vafl.arrays import Matrix
from vafl.transport.settings import Encoding

Frame = bytes | memoryview
Parts = list[Frame]
Pack = Callable[[Matrix], Parts]
Unpack = Callable[[Frame, int, int, int], Matrix]  # (frame, position of the matrix, lines, width)
_FLOAT = np.dtype("<f4")


def matrix_bytes(encoding: Encoding, lines: int, width: int) -> int:
    """Return the bytes of an encoded matrix [lines, width]."""
    if encoding == "int8":
        return lines * (width + 4)
    return lines * width * (4 if encoding == "float32" else 2)


def _pack_float32(matrix: Matrix) -> Parts:
    return [np.ascontiguousarray(matrix, _FLOAT).data]


def _unpack_float32(frame: Frame, position: int, lines: int, width: int) -> Matrix:
    """Return a view of the frame's memory; a copy if the matrix is not aligned there or not native."""
    matrix: Matrix = np.ndarray((lines, width), _FLOAT, frame, position)
    return matrix if _FLOAT.isnative and matrix.flags.aligned else matrix.astype(np.float32)


def _pack_as(kind: torch.dtype) -> Pack:
    def pack(matrix: Matrix) -> Parts:
        return [torch.from_numpy(matrix).to(kind).contiguous().view(torch.uint8).numpy().data]

    return pack


def _unpack_as(kind: torch.dtype) -> Unpack:
    def unpack(frame: Frame, position: int, lines: int, width: int) -> Matrix:
        if not lines * width:  # torch cannot view an empty tensor as another type
            return np.zeros((lines, width), np.float32)
        raw = np.frombuffer(frame, np.uint8, lines * width * kind.itemsize, position).copy()
        return torch.from_numpy(raw).view(kind).view(lines, width).float().numpy()

    return unpack


def _pack_int8(matrix: Matrix) -> Parts:
    """Scale each row so that its largest magnitude becomes 127, and round to whole numbers."""
    scales = np.abs(matrix).max(axis=1, initial=0) / np.float32(127)
    # The lower limit avoids a division by zero for a row of zeros.
    steps = np.rint(matrix / np.maximum(scales, np.float32(1e-30))[:, None]).clip(-127, 127)
    return [scales.astype(_FLOAT).data, steps.astype(np.int8, order="C").data]


def _unpack_int8(frame: Frame, position: int, lines: int, width: int) -> Matrix:
    scales = np.frombuffer(frame, _FLOAT, lines, position).astype(np.float32)
    steps = np.frombuffer(frame, np.int8, lines * width, position + 4 * lines)
    return steps.reshape(lines, width) * scales[:, None]


PACKING: dict[Encoding, tuple[Pack, Unpack]] = {
    "float32": (_pack_float32, _unpack_float32),
    "float16": (_pack_as(torch.float16), _unpack_as(torch.float16)),
    "bfloat16": (_pack_as(torch.bfloat16), _unpack_as(torch.bfloat16)),
    "int8": (_pack_int8, _unpack_int8),
}
