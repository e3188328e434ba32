"""The distribution of the delays of the embeddings that steps used, per client."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vafl import kernels
from vafl.arrays import Iterations, RowIds
from vafl.protocol.table import FOREVER, EmbeddingTable

EXACT_BELOW = 65_536  # longer delays share one bin; their mean and maximum stay exact
_COUNTED = ("counts", "longest", "excess")


@dataclass(frozen=True)
class DelaySummary:
    """Delays of one client's cells when steps used them, in global iterations.

    Attributes:
        uses: how often a step used a cell of this client.
        max, mean, p50, p99: statistics of the recorded uses. If `sampled` is above 1, a delay longer than
            `max` may have been missed.
        never: uses of cells that had never been uploaded. Their delay is infinite and not in the statistics.
        over_bound: uses beyond the delay bound, which the policy `use` allows.
        sampled: one use in this many was recorded. `uses`, `never` and `over_bound` are scaled up; 1 is
            exact.
    """

    uses: int
    max: int
    mean: float
    p50: int
    p99: int
    never: int
    over_bound: int
    sampled: int


class DelayLog:
    """Counts the delays of used cells in a histogram per client.

    Args:
        clients: the number of clients.
        bound: the delay bound D, or None.
        every: record one in this many of the rows that steps use.
    """

    def __init__(self, clients: int, bound: int | None = None, every: int = 1) -> None:
        self._bound, self._every, self._skipping = bound, every, 0
        self._longest_bin = max(EXACT_BELOW, (bound or 0) + 1)
        self._counts = np.zeros((clients, 64), dtype=np.int64)  # bins of `count_delays`; grows as needed
        self._longest = np.zeros(clients, dtype=np.int64)
        self._excess = np.zeros(clients, dtype=np.int64)  # sum of what delays exceed the longest bin by

    def record(self, table: EmbeddingTable, rows: RowIds, iteration: int, own: int | None) -> None:
        """Record the delays of one in `every` of these rows at step `iteration`.

        Args:
            own: the client that has just uploaded the rows, whose delays are not recorded. None records
                those of all clients.
        """
        if self._every > 1:
            sampled = rows[self._skipping :: self._every].copy()
            self._skipping = (self._skipping - len(rows)) % self._every
            if not len(sampled):
                return
            rows = sampled
        left_out = -1 if own is None else own
        # `count_delays` counts nothing if the longest delay has no bin. Then add bins and count again.
        longest = table.count_delays(rows, iteration, self._counts, left_out)
        if longest + 2 < self._counts.shape[1]:
            return
        delays = table.delays(rows, iteration)
        if longest > self._longest_bin:
            delays, longest = self._shortened(delays, own), self._longest_bin
        if longest + 2 >= self._counts.shape[1]:
            self._counts = np.pad(self._counts, ((0, 0), (0, longest + 3)))
        stored_at = -delays  # so that at iteration 0 the delays are those in `delays`
        kernels.count_delays(stored_at, np.arange(len(rows)), self._counts, 0, left_out, FOREVER)

    def summaries(self) -> list[DelaySummary]:
        """Return the summary of each client."""
        return [self._summary(client) for client in range(len(self._counts))]

    def state(self) -> dict[str, Tensor]:
        """Return the counts for a checkpoint."""
        return {name: torch.from_numpy(getattr(self, f"_{name}").copy()) for name in _COUNTED}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore counts that `state` returned."""
        for name in _COUNTED:
            setattr(self, f"_{name}", state[name].numpy().copy())

    def _shortened(self, delays: Iterations, own: int | None) -> Iterations:
        """Return the delays, limited to the longest bin; add what they exceed it by to `_excess`."""
        used = np.where(delays < FOREVER, delays, 0)
        used[:, [] if own is None else own] = 0
        self._longest = np.maximum(self._longest, used.max(axis=0))
        self._excess += np.maximum(used - self._longest_bin, 0).sum(axis=0, dtype=np.int64)
        shortened: Iterations = np.where(delays < FOREVER, np.minimum(delays, self._longest_bin), delays)
        return shortened

    def _summary(self, client: int) -> DelaySummary:
        counts, never = self._counts[client, 2:], int(self._counts[client, 1])
        uses = int(counts.sum())
        longest = max(int(self._longest[client]), int(np.flatnonzero(counts)[-1])) if uses else 0
        total = int(counts @ np.arange(len(counts))) + int(self._excess[client])
        median, late = np.searchsorted(np.cumsum(counts), [0.50 * uses, 0.99 * uses]).tolist()
        over = 0 if self._bound is None else int(counts[self._bound + 1 :].sum()) + never
        return DelaySummary(
            uses=uses * self._every,
            max=longest,
            mean=total / uses if uses else 0.0,
            p50=median,
            p99=late,
            never=never * self._every,
            over_bound=over * self._every,
            sampled=self._every,
        )
