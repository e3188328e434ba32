"""How stale the embeddings were that the steps really used: the whole distribution, per client."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vafl.protocol.table import FOREVER, Delays

EXACT_BELOW = 65_536  # longer delays share one bin; their mean and maximum stay exact
_FLUSH_CELLS = 1 << 18  # counted at once, while they fit a processor's cache
_LEFT_OUT, _NEVER = -2, -1  # stand for a delay; two bins more
_COUNTED = ("counts", "longest", "excess")


@dataclass(frozen=True)
class DelaySummary:
    """Delays, in global iterations, of one client's cells when they were used.

    Attributes:
        max, mean, p50, p99: of the uses that were looked at. Where not all were, a delay longer than `max`
            may have been missed: to know it, each step would have to look at every client's cells.
        never: uses of cells that had never been uploaded (infinitely stale, not in the figures).
        over_bound: uses beyond the delay bound, under the policy that allows them.
        sampled: one use in so many was looked at and stands for that many in `uses` and `never`; 1 is all.
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
    """Counts used delays. `record` is O(1) on the hot path; counting is done for many steps at once.

    Args:
        every: of all rows that steps use, one after the other, `sample` takes one in so many.
    """

    def __init__(self, clients: int, bound: int | None = None, every: int = 1) -> None:
        self._bound, self._every, self._skipping = bound, every, 0
        self._longest_bin = max(EXACT_BELOW, (bound or 0) + 1)
        self._counts = np.zeros((clients, 64), dtype=np.int64)  # left out, never, 0, 1, ...: grows as needed
        self._longest = np.zeros(clients, dtype=np.int64)
        self._excess = np.zeros(clients, dtype=np.int64)  # of delays over the longest bin
        self._pending: list[tuple[Delays, int | None]] = []
        self._pending_cells = 0

    def sample(self, rows: Tensor) -> Tensor:
        """Those of the rows of the next step whose delays are to be recorded; none, maybe."""
        if self._every == 1:
            return rows
        sampled = rows[self._skipping :: self._every].contiguous()
        self._skipping = (self._skipping - len(rows)) % self._every
        return sampled

    def record(self, delays: Delays, own: int | None) -> None:
        """Notes [batch, clients] delays of one step; the column `own` (just uploaded) is left out."""
        self._pending.append((delays, own))
        self._pending_cells += delays.size
        if self._pending_cells >= _FLUSH_CELLS:
            self._flush()

    def summaries(self) -> list[DelaySummary]:
        self._flush()
        return [self._summary(client) for client in range(len(self._counts))]

    def state(self) -> dict[str, Tensor]:
        """All that was counted, for a checkpoint."""
        self._flush()
        return {name: torch.from_numpy(getattr(self, f"_{name}").copy()) for name in _COUNTED}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Goes on counting from a checkpoint."""
        for name in _COUNTED:
            setattr(self, f"_{name}", state[name].numpy().copy())

    def _flush(self) -> None:
        if self._pending:
            self._count(self._take_pending())

    def _take_pending(self) -> Delays:
        """All delays put aside, [uses, clients], without what is to be left out."""
        delays = np.concatenate([part for part, _ in self._pending])
        start = 0
        for part, own in self._pending:
            if own is not None:
                delays[start : start + len(part), own] = _LEFT_OUT
            start += len(part)
        self._pending.clear()
        self._pending_cells = 0
        return delays

    def _count(self, delays: Delays) -> None:
        if delays.max() >= FOREVER:
            delays[delays >= FOREVER] = _NEVER
        longest = int(delays.max())
        if longest > self._longest_bin:
            self._longest = np.maximum(self._longest, delays.max(axis=0))
            self._excess += np.maximum(delays - self._longest_bin, 0).sum(axis=0, dtype=np.int64)
            longest = self._longest_bin
            np.minimum(delays, longest, out=delays)
        clients, bins = delays.shape[1], longest - _LEFT_OUT + 1
        delays += np.arange(clients, dtype=np.int32) * np.int32(bins) - np.int32(_LEFT_OUT)
        counts = torch.bincount(torch.from_numpy(delays).view(-1), minlength=clients * bins)
        if bins > self._counts.shape[1]:
            self._counts = np.pad(self._counts, ((0, 0), (0, bins)))
        self._counts[:, :bins] += counts.numpy().reshape(clients, bins)

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
