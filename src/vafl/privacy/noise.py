"""Noise that nobody can predict: a stream cipher's output, keyed by the operating system.

Whoever could continue or rewind the generator could subtract the noise. So it is never the run's
seeded generator, its key is never stored or shown, and it is a cipher, not a statistical generator.
"""

import math
import os
from collections.abc import Sequence

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

_DRAWN_AT_ONCE = 1 << 13  # numbers: larger blocks of memory come fresh, page by page, from the system
_NOTHING = bytes(8 * _DRAWN_AT_ONCE)  # what the cipher encrypts


class Noise:
    """Draws float32 noise; one object for each client."""

    def __init__(self) -> None:
        self._stream = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor()
        self._normals = torch.empty(0)  # drawn and not yet used

    def gaussian(self, shape: Sequence[int], deviation: float) -> Tensor:
        """N(0, deviation^2), by inverting the distribution function in float64."""
        count, parts = math.prod(shape), list[Tensor]()
        while count > len(self._normals):
            count -= len(self._normals)
            parts.append(self._normals)
            self._normals = self._symmetric().erfinv_().mul_(math.sqrt(2)).float()
        taken, self._normals = self._normals[:count], self._normals[count:]
        return (torch.cat([*parts, taken]) if parts else taken).view(*shape).mul_(deviation)

    def uniform(self, shape: Sequence[int], deviation: float) -> Tensor:
        """U[-sqrt(3) deviation, sqrt(3) deviation]."""
        count = math.prod(shape)
        blocks = [self._symmetric() for _ in range(0, count, _DRAWN_AT_ONCE)]
        unit = torch.cat([torch.empty(0), *blocks])[:count]
        return unit.mul_(math.sqrt(3) * deviation).float().view(*shape)

    def _symmetric(self) -> Tensor:
        """Float64 in the open interval (-1, 1): odd multiples of 2^-53, which float64 holds exactly."""
        words = np.frombuffer(self._stream.update(_NOTHING), np.int64) & -2048
        words |= 1024
        return torch.from_numpy(words * 2.0**-63)
