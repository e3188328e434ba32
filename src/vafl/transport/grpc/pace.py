"""Limit how fast a private client answers requests for the same record."""

import time
from collections.abc import Callable

import numpy as np

from vafl.arrays import RowIds

AT_ONCE = 200  # answers for one record without a wait
PER_SECOND = 20.0  # answers for one record per second after those


class Pace:
    """Delay answers for a record that the server asks for again and again.

    Each answer carries fresh noise, so averaging many answers removes it. The privacy budget stops that
    eventually; the pace gives the operator time to notice it in the log. The pace counts by record, so it
    never delays a server that asks for many records once each, as predictions and the delay bound do.
    Evaluations ask for the same records each time. With the default of one evaluation every 50 updates, they
    are delayed only beyond 1,000 updates per second.

    Each record has a token bucket. It is stored as a single number, the time at which the bucket will be full
    again (the generic cell rate algorithm).

    Args:
        rows: number of records of the client.
        clock: seconds; only differences matter.
    """

    def __init__(self, rows: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full_at = np.full(rows, -np.inf)

    def wait(self, rows: RowIds) -> float:
        """Return the seconds until these rows may be answered; 0 means now."""
        if not self._are_known(rows):
            return 0.0
        now = self._clock()
        full_at = max(float(self._full_at[rows].max()), now)
        return max(0.0, full_at + (1 - AT_ONCE) / PER_SECOND - now)

    def count(self, rows: RowIds) -> None:
        """Record an answer for these rows."""
        if self._are_known(rows):
            self._full_at[rows] = np.maximum(self._full_at[rows], self._clock()) + 1 / PER_SECOND

    def _are_known(self, rows: RowIds) -> bool:
        """Return whether the client has all these rows. It refuses a request for others without an answer."""
        return len(rows) > 0 and int(rows.min()) >= 0 and int(rows.max()) < len(self._full_at)
