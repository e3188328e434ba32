"""The rate at which a measured curve falls: the slope of a straight line through its logarithms."""

from collections.abc import Sequence

import numpy as np

from vafl.arrays import Doubles


def slope(x: Sequence[float] | Doubles, y: Sequence[float] | Doubles, start: float) -> float:
    """Return the slope of log y against log x, fitted over x >= start: -1 is O(1/x), -1/2 is O(1/sqrt(x))."""
    horizontal, vertical = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    tail = horizontal >= start
    return float(np.polyfit(np.log(horizontal[tail]), np.log(vertical[tail]), 1)[0])
