"""Cryptographically secure noise: the output of a stream cipher with a key from the operating system.

An attacker who could predict or rewind the generator could subtract the noise. So the noise never comes from
the run's seeded generator, the key is never stored or shown, and the generator is a cipher.
"""

import math
import os
from collections.abc import Sequence

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from vafl.arrays import Doubles, Floats

_DRAWN_AT_ONCE = 1 << 15  # numbers per draw, into a reused buffer: allocating fresh memory is slow
_NOTHING = bytes(8 * _DRAWN_AT_ONCE)  # zeros: encrypting them yields the key stream
_STEP = 2.0**-13  # rounding step, relative to the power of two above the deviation: small beside the noise


class Noise:
    """A noise generator; each client has its own."""

    def __init__(self) -> None:
        cipher = algorithms.AES(os.urandom(32))
        self._stream = Cipher(cipher, modes.CTR(bytes(16))).encryptor()
        # `update_into` requires room for one block less one byte more than the input.
        self._bytes = bytearray(len(_NOTHING) + cipher.block_size // 8 - 1)
        self._words = np.frombuffer(self._bytes, np.int64, _DRAWN_AT_ONCE)
        self._unit = np.empty(_DRAWN_AT_ONCE)
        self._used = _DRAWN_AT_ONCE  # normal numbers in `_unit` that were handed out already

    def added_to(self, values: Floats | Doubles, deviation: float) -> Floats:
        """Return values + N(0, deviation^2), both rounded to multiples of the same step.

        The last bits of a plain floating-point sum reveal which values it can be a sum of, however large the
        noise is (Mironov, 2012). On a common grid, every value can produce every sum. Values are rounded
        towards zero, so that no norm grows. The sum is exact until it is rounded to float32, which is
        post-processing.
        """
        if not deviation:
            return values.astype(np.float32)
        step = _STEP * 2.0 ** math.frexp(deviation)[1]
        steps = values / np.float64(step)
        np.trunc(steps, out=steps)
        noise = self.normals(values.size, deviation / step)
        steps += np.rint(noise, out=noise).reshape(values.shape)
        steps *= step
        return steps.astype(np.float32)

    def gaussian(self, shape: Sequence[int], deviation: float) -> Tensor:
        """Return N(0, deviation^2) in float32, for values that stay local. Use `added_to` for uploads."""
        drawn = self.normals(math.prod(shape), deviation).astype(np.float32)
        return torch.from_numpy(drawn).view(*shape)

    def normals(self, count: int, deviation: float) -> Doubles:
        """Return N(0, deviation^2) in float64, by inverting the distribution function."""
        drawn, filled = np.empty(count), 0
        while filled < count:
            if self._used == _DRAWN_AT_ONCE:
                self._draw_unit()
                torch.from_numpy(self._unit).erfinv_()
                self._used = 0
            some = self._unit[self._used : self._used + count - filled]
            np.multiply(some, math.sqrt(2) * deviation, out=drawn[filled : filled + len(some)])
            filled += len(some)
            self._used += len(some)
        return drawn

    def uniform(self, shape: Sequence[int], deviation: float) -> Tensor:
        """Return uniform noise with this standard deviation: U[-sqrt(3) deviation, sqrt(3) deviation]."""
        drawn = np.empty(math.prod(shape), np.float32)
        for start in range(0, len(drawn), _DRAWN_AT_ONCE):
            part = drawn[start : start + _DRAWN_AT_ONCE]
            self._draw_unit()
            self._used = _DRAWN_AT_ONCE  # this overwrote the normal numbers
            np.multiply(self._unit[: len(part)], math.sqrt(3) * deviation, out=part, casting="same_kind")
        return torch.from_numpy(drawn).view(*shape)

    def _draw_unit(self) -> None:
        """Fill `_unit` with uniform numbers in the open interval (-1, 1).

        They are odd multiples of 2^-53, which float64 represents exactly. They are never 0 or +-1, where
        erfinv would be infinite.
        """
        self._stream.update_into(_NOTHING, self._bytes)
        # -2048 clears the low 11 bits and 1024 sets the highest of them: each word becomes an odd multiple of
        # 2^10. Times 2^-63, that is an odd multiple of 2^-53.
        words = self._words
        words &= -2048
        words |= 1024
        np.multiply(words, 2.0**-63, out=self._unit)
