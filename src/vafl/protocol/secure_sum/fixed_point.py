"""Fixed-point scores: integers modulo 2^64. Their sums are exact, so masks cancel without a remainder."""

import numpy as np

from vafl.arrays import Matrix, Words
from vafl.errors import Diverged

FRACTION_BITS = 32  # exact for float32 of magnitude 2^-9 or more, which has no digit below 2^-32


def largest_score(clients: int) -> float:
    """Return the magnitude below which scores must stay, so that the sum over all clients cannot overflow."""
    return 2.0 ** (63 - FRACTION_BITS) / clients


def encode(scores: Matrix, clients: int) -> Words:
    """Return scores as multiples of 2^-32, with negative values in two's complement.

    Raises:
        Diverged: a score is too large for a sum of `clients` of them.
    """
    values = scores.astype(np.float64)
    limit = largest_score(clients)
    if values.size and not np.abs(values).max() < limit:
        largest = values.flat[np.abs(values).argmax()]  # argmax returns the position of a NaN if there is one
        raise Diverged(
            "VFL-4121",
            f"a score must be below {limit:,.0f} in magnitude for the secure sum of {clients} clients. "
            f"Found {largest:g}. Lower optimiser.step_size, or scale the features.",
        )
    return np.rint(np.ldexp(values, FRACTION_BITS)).astype(np.int64).view(np.uint64)


def decode(total: Words) -> Matrix:
    """Return the scores, as float32, that a sum of words represents."""
    sums: Matrix = np.ldexp(total.view(np.int64).astype(np.float64), -FRACTION_BITS).astype(np.float32)
    return sums
