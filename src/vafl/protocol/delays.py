"""How stale the embeddings were that the steps really used: the whole distribution, per client."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vafl.protocol.table import FOREVER, Delays

EXACT_BELOW = 65_536  # longer delays share one bin; their maximum stays exact
_FLUSH_AFTER = 64


@dataclass(frozen=True)
class DelaySummary:
    """Delays, in global iterations, of one client's cells when they were used.

    Attributes:
        never: uses of cells that had never been uploaded (infinitely stale, not in the figures).
        over_bound: uses beyond the delay bound, under the policy that allows them.
    """

    uses: int
    max: int
    mean: float
    p50: int
    p99: int
    never: int
    over_bound: int


class DelayLog:
    """Counts used delays. `record` is O(1) on the hot path; counting is done for many steps at once."""

    def __init__(self, clients: int, bound: int | None = None) -> None:
        self._bound = FOREVER * 2 - 1 if bound is None else bound
        self._counts = np.zeros((clients, 64), dtype=np.int64)
        self._max = np.zeros(clients, dtype=np.int64)
        self._sum = np.zeros(clients, dtype=np.int64)
        self._never = np.zeros(clients, dtype=np.int64)
        self._over = np.zeros(clients, dtype=np.int64)
        self._pending: list[tuple[Delays, int | None]] = []

    def record(self, delays: Delays, own: int | None) -> None:
        """Notes [batch, clients] delays of one step; the column `own` (just uploaded) is left out."""
        self._pending.append((delays, own))
        if len(self._pending) >= _FLUSH_AFTER:
            self._flush()

    def summaries(self) -> list[DelaySummary]:
        self._flush()
        return [self._summary(client) for client in range(len(self._max))]

    def _flush(self) -> None:
        if not self._pending:
            return
        for client in range(len(self._max)):
            columns = [delays[:, client] for delays, own in self._pending if own != client]
            if columns:
                self._count(client, np.concatenate(columns))
        self._pending.clear()

    def _count(self, client: int, delays: npt.NDArray[np.int32]) -> None:
        known = delays[delays < FOREVER]
        self._never[client] += len(delays) - len(known)
        self._over[client] += np.count_nonzero(delays > self._bound)
        if not len(known):
            return
        self._sum[client] += known.sum(dtype=np.int64)
        self._max[client] = max(self._max[client], known.max())
        counts = np.bincount(np.minimum(known, EXACT_BELOW))
        if len(counts) > self._counts.shape[1]:
            wider = min(EXACT_BELOW + 1, 2 * len(counts)) - self._counts.shape[1]
            self._counts = np.pad(self._counts, ((0, 0), (0, wider)))
        self._counts[client, : len(counts)] += counts

    def _summary(self, client: int) -> DelaySummary:
        uses = int(self._counts[client].sum())
        return DelaySummary(
            uses=uses,
            max=int(self._max[client]),
            mean=float(self._sum[client] / uses) if uses else 0.0,
            p50=self._percentile(client, uses, 0.50),
            p99=self._percentile(client, uses, 0.99),
            never=int(self._never[client]),
            over_bound=int(self._over[client]),
        )

    def _percentile(self, client: int, uses: int, share: float) -> int:
        if not uses:
            return 0
        delay = int(np.searchsorted(np.cumsum(self._counts[client]), share * uses))
        return min(delay, int(self._max[client]))
