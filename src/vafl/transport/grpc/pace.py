"""How fast a private client answers requests for the same record."""

import time
from collections.abc import Callable

import numpy as np

from vafl.protocol.rows import Rows

AT_ONCE = 200  # answers for one record without any wait
PER_SECOND = 20.0  # answers for one record after those


class Pace:
    """Holds back answers for a record that the server asks for again and again.

    Each answer carries fresh noise, so many answers average it out. A budget ends that; the pace gives the
    operator time to see it in the log. It counts by record, so a server that asks for many records once each
    never waits: predictions and the delay bound do that. Evaluations ask for the same records each time. With
    one every 50 updates, the default, they reach this pace beyond 1,000 updates a second only.

    This is a token bucket for every record, kept as one number (the generic cell rate algorithm): the time at
    which the bucket will be full again.

    Args:
        rows: how many records the client has.
        clock: seconds.
    """

    def __init__(self, rows: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full_at = np.full(rows, -np.inf)

    def wait(self, rows: Rows) -> float:
        """Seconds until these rows may be answered for; 0 means now."""
        if not self._are_known(rows):
            return 0.0
        now = self._clock()
        full_at = max(float(self._full_at[rows].max()), now)
        return max(0.0, full_at + (1 - AT_ONCE) / PER_SECOND - now)

    def count(self, rows: Rows) -> None:
        """Book an answer for these rows."""
        if self._are_known(rows):
            self._full_at[rows] = np.maximum(self._full_at[rows], self._clock()) + 1 / PER_SECOND

    def _are_known(self, rows: Rows) -> bool:
        """Whether the client has such rows. It refuses a request for others."""
        return len(rows) > 0 and int(rows.min()) >= 0 and int(rows.max()) < len(self._full_at)
