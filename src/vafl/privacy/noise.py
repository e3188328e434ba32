"""Noise that nobody can predict: a stream cipher's output, keyed by the operating system.

Whoever could continue or rewind the generator could subtract the noise. So it is never the run's
seeded generator, its key is never stored or shown, and it is a cipher, not a statistical generator.
"""

import math
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

_LARGEST_DRAW = 1 << 20  # numbers made at once: bounds memory


class Noise:
    """Draws float32 noise; one object for each client."""

    def __init__(self) -> None:
        self._stream = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor()

    def gaussian(self, shape: Sequence[int], deviation: float) -> Tensor:
        """N(0, deviation^2), by inverting the distribution function in float64."""
        return self._draw(shape, lambda unit: unit.erfinv_().mul_(math.sqrt(2) * deviation))

    def uniform(self, shape: Sequence[int], deviation: float) -> Tensor:
        """U[-sqrt(3) deviation, sqrt(3) deviation]."""
        return self._draw(shape, lambda unit: unit.mul_(math.sqrt(3) * deviation))

    def _draw(self, shape: Sequence[int], transform: Callable[[Tensor], Tensor]) -> Tensor:
        count = math.prod(shape)
        sizes = [min(_LARGEST_DRAW, count - start) for start in range(0, count, _LARGEST_DRAW)]
        parts = [transform(self._symmetric(size)).float() for size in sizes]
        whole = parts[0] if len(parts) == 1 else torch.cat([torch.empty(0), *parts])
        return whole.view(*shape)

    def _symmetric(self, count: int) -> Tensor:
        """Float64 in the open interval (-1, 1), 53 bits each."""
        words = np.frombuffer(self._stream.update(bytes(8 * count)), np.uint64)
        return torch.from_numpy(((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-52 - 1.0)
