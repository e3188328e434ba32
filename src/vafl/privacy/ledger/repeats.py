"""Log when the server requests records again that a private client has already sent."""

import logging
import math
import time
from collections.abc import Callable

import numpy as np

from vafl.arrays import Integers, RowIds
from vafl.privacy.ledger.accounts import KINDS, NOBODY, Kind
from vafl.privacy.ledger.ledger import Ledger

log = logging.getLogger("vafl.client")

_ASKED: tuple[Kind, ...] = ("request", "evaluation", "prediction")  # uploads that the server initiates
_PLACES = [KINDS.index(kind) for kind in _ASKED]
_EVERY = 60.0  # seconds between two log lines of one sort


class Repeats:
    """Watch the requests of one run.

    Honest servers repeat requests too: every evaluation is for the same records. The client logs that at
    level INFO. If the client has not trained since it sent a record, another answer only gives the server new
    noise on the same embedding. The client logs that as a WARNING, and also a request beyond the budget. The
    log names no record; `vafl privacy` does.

    Args:
        ledger: the ledger, which counts the uploads of all runs.
        accounts: [rows], each row's account in the ledger.
        limit: the budget, in mu.
        clock: returns the time in seconds.
    """

    def __init__(
        self, ledger: Ledger, accounts: Integers, limit: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ledger, self._accounts, self._limit, self._clock = ledger, accounts, limit, clock
        # The client uploads a minibatch only after the answer to an earlier one, so the number of minibatches
        # stands for the version of its model.
        self._version = 1
        self._sent_at = np.zeros(len(accounts), dtype=np.int64)  # version at the last upload; 0 for none
        self._next: dict[str, float] = {}  # by sort of line: when the next one may be written

    def note(self, asked: RowIds, sent: RowIds, kind: Kind) -> None:
        """Note an upload after the ledger was charged.

        Args:
            asked: the rows that were to be uploaded.
            sent: those that the budget allows.
        """
        if kind == "batch":
            self._version += 1
        elif kind in _ASKED:
            if len(sent) < len(asked):
                self._log_refusal(len(asked) - len(sent), len(asked), kind)
            self._log_repeats(sent[self._accounts[sent] != NOBODY], kind)
        self._sent_at[sent] = self._version

    def _log_refusal(self, refused: int, asked: int, kind: Kind) -> None:
        if self._is_due("refusal"):
            log.warning(
                "%d of the %d records that the server asked for (%s) are not sent: the budget of mu %.4g is "
                "spent",
                refused,
                asked,
                kind,
                self._limit,
            )

    def _log_repeats(self, rows: RowIds, kind: Kind) -> None:
        unchanged = int((self._sent_at[rows] == self._version).sum())
        if unchanged and self._is_due("unchanged"):
            log.warning(
                "the server asked again for %d records (%s) although the model has not changed since they "
                "were sent: fresh noise on the same embedding averages out. %s",
                unchanged,
                kind,
                self._most_asked(rows),
            )
            return
        repeated = int((self._times_asked(rows) > 1).sum())
        if repeated and self._is_due("repeated"):
            log.info("the server asked again for %d records (%s). %s", repeated, kind, self._most_asked(rows))

    def _times_asked(self, rows: RowIds) -> Integers:
        """Return how often the client has sent each row on request, over all runs in the ledger: [rows]."""
        times: Integers = self._ledger.counts.take(self._accounts[rows], 1)[_PLACES].sum(0, dtype=np.int64)
        return times

    def _most_asked(self, rows: RowIds) -> str:
        times = self._times_asked(rows)
        worst = int(times.argmax())
        spent = math.sqrt(float(self._ledger.spent[self._accounts[rows[worst]]]))
        budget = "unlimited" if math.isinf(self._limit) else f"{self._limit:.4g}"
        return (
            f"The most-asked of them was asked for {times[worst]} times; mu {spent:.4g} is spent on it, the "
            f"budget is {budget}"
        )

    def _is_due(self, sort: str) -> bool:
        """Return whether to write a line of this sort now, and start the wait for the next one."""
        now = self._clock()
        if now < self._next.get(sort, -math.inf):
            return False
        self._next[sort] = now + _EVERY
        return True
