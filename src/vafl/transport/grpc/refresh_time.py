"""Limits the time that a client spends on refreshes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SHARE = 1.0  # of the time between refreshes
_WEIGHT = 0.2  # of the newest measurement in the running means


class MeasuredTime:
    """Lets refreshes take as long as everything that the client does or waits for between them.

    Without a limit, a client with a slow model would refresh more and more rows: while it refreshes, the
    others make more uploads, whose rows it refreshes next. It would hardly train. A client that sleeps or
    waits for the server has time for more.

    Args:
        least: rows that may always be refreshed.
        clock: seconds.
    """

    def __init__(self, least: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._least, self._clock = least, clock
        self._ended: float | None = None  # when the last refresh ended
        self._pause = self._per_row = 0.0  # running means: seconds between refreshes, and for one row

    def rows(self) -> int:
        """Return how many rows may be refreshed now."""
        if not self._per_row:
            return self._least
        return max(self._least, int(_SHARE * self._pause / self._per_row))

    @contextmanager
    def refreshing(self, rows: int) -> Iterator[None]:
        """Measure how long it takes to embed this number of rows."""
        began = self._clock()
        if self._ended is not None:
            self._pause = _mean(self._pause, began - self._ended)
        yield
        self._ended = self._clock()
        self._per_row = _mean(self._per_row, (self._ended - began) / max(1, rows))


def _mean(mean: float, value: float) -> float:
    """Return the running mean with one more value; the first value is its own mean."""
    return mean + _WEIGHT * (value - mean) if mean else value
