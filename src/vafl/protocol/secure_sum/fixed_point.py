"""Scores as whole numbers modulo 2^64: sums of them are exact, so masks that cancel leave nothing behind."""

import numpy as np
import numpy.typing as npt

from vafl.errors import Diverged

FRACTION_BITS = 32  # a float32 of magnitude 2^-9 or more has no digit below 2^-32: it is encoded exactly
Words = npt.NDArray[np.uint64]
Scores = npt.NDArray[np.float32]


def largest_score(clients: int) -> float:
    """What no client's score may reach, so that the sum of so many cannot wrap around."""
    return 2.0 ** (63 - FRACTION_BITS) / clients


def encode(scores: Scores, clients: int) -> Words:
    """Multiples of 2^-32, negative ones as two's complements.

    Raises:
        Diverged: a score is too large for a sum of `clients` of them.
    """
    values = scores.astype(np.float64)
    limit = largest_score(clients)
    if values.size and not np.abs(values).max() < limit:
        found = values.flat[np.abs(values).argmax()]  # NaN, if there is one
        raise Diverged(
            "VFL-4121",
            f"a score must be below {limit:,.0f} in magnitude for the secure sum of {clients} clients. "
            f"Found {found:g}. Lower optimiser.step_size, or scale the features.",
        )
    return np.rint(np.ldexp(values, FRACTION_BITS)).astype(np.int64).view(np.uint64)


def decode(total: Words) -> Scores:
    """The sum, as float32, that the words stand for."""
    sums: Scores = np.ldexp(total.view(np.int64).astype(np.float64), -FRACTION_BITS).astype(np.float32)
    return sums
