"""Noise that nobody can predict: a stream cipher's output, keyed by the operating system.

Whoever could continue or rewind the generator could subtract the noise. So it is never the run's
seeded generator, its key is never stored or shown, and it is a cipher, not a statistical generator.
"""

import math
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

_DRAWN_AT_ONCE = 1 << 15  # numbers, into memory that is used again and again: what is fresh comes slowly
_NOTHING = bytes(8 * _DRAWN_AT_ONCE)  # what the cipher encrypts


class Noise:
    """Draws float32 noise; one object for each client."""

    def __init__(self) -> None:
        cipher = algorithms.AES(os.urandom(32))
        self._stream = Cipher(cipher, modes.CTR(bytes(16))).encryptor()
        self._bytes = bytearray(len(_NOTHING) + cipher.block_size // 8 - 1)
        self._words = np.frombuffer(self._bytes, np.int64, _DRAWN_AT_ONCE)
        self._unit = np.empty(_DRAWN_AT_ONCE)
        self._normals = np.empty(_DRAWN_AT_ONCE, np.float32)
        self._used = _DRAWN_AT_ONCE  # of them

    def gaussian(self, shape: Sequence[int], deviation: float) -> Tensor:
        """N(0, deviation^2), by inverting the distribution function in float64."""
        return torch.from_numpy(self.normals(shape, deviation))

    def normals(self, shape: Sequence[int], deviation: float) -> npt.NDArray[np.float32]:
        """The same, as numpy has it."""
        drawn, filled = np.empty(math.prod(shape), np.float32), 0
        while filled < len(drawn):
            if self._used == _DRAWN_AT_ONCE:
                self._draw_normals()
            some = self._normals[self._used : self._used + len(drawn) - filled]
            np.multiply(some, np.float32(deviation), out=drawn[filled : filled + len(some)])
            filled += len(some)
            self._used += len(some)
        return drawn.reshape(shape)

    def uniform(self, shape: Sequence[int], deviation: float) -> Tensor:
        """U[-sqrt(3) deviation, sqrt(3) deviation]."""
        drawn = np.empty(math.prod(shape), np.float32)
        for start in range(0, len(drawn), _DRAWN_AT_ONCE):
            part = drawn[start : start + _DRAWN_AT_ONCE]
            self._draw_unit()
            np.multiply(self._unit[: len(part)], math.sqrt(3) * deviation, out=part, casting="same_kind")
        return torch.from_numpy(drawn).view(*shape)

    def _draw_normals(self) -> None:
        self._draw_unit()
        torch.from_numpy(self._unit).erfinv_()
        np.multiply(self._unit, math.sqrt(2), out=self._normals, casting="same_kind")
        self._used = 0

    def _draw_unit(self) -> None:
        """Float64 in the open interval (-1, 1): odd multiples of 2^-53, which float64 holds exactly."""
        self._stream.update_into(_NOTHING, self._bytes)
        words = self._words
        words &= -2048
        words |= 1024
        np.multiply(words, 2.0**-63, out=self._unit)
