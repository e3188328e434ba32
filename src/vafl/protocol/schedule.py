"""Which rows a client picks at its i-th activation, and which other rows it refreshes.

A schedule is a pure function of (seed, stream, activation), so every party that knows the seed can
compute what any client will pick next. Look-ahead refresh rests on that. A client that is to keep its
schedule to itself has a seed of its own.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from vafl.errors import ConfigError
from vafl.protocol.rows import Rows

ScheduleKind = Literal["epochs", "iid"]
_BATCHES = 128  # of an epoch, where the size is left open
_SMALLEST_BATCH, _LARGEST_BATCH = 64, 1024
_EPOCHS, _LEAST_EPOCHS, _MANY_ROWS = 40.0, 4.0, 100_000


@dataclass(frozen=True)
class ScheduleSettings:
    """How minibatches are drawn.

    Attributes:
        kind: `epochs` deals every row once per reshuffled epoch; `iid` draws each batch afresh.
        batch_size: rows in a minibatch; 1 is the single-record algorithm. 0 is a size by the number of
            training rows, 64 to 1024.
        epochs: how often each client passes over the training rows, on average, where stop.updates = 0 leaves
            the number of updates open. 0 is 40 epochs, fewer for more than 100,000 rows.
        seed: `shared` lets every party compute every client's batches (look-ahead needs it);
            `private` draws each client's batches and random refreshes from a seed that the client has from
            its operating system and keeps with its checkpoint, so that they are known when they are uploaded
            and not before. Not for the sync rule, whose batches are everybody's. A simulation has no
            secrets: all of its batches follow from the run's seed.
        refresh: which other rows a client uploads: `none`, `random:R`, `all` or `lookahead`.
    """

    kind: ScheduleKind = "epochs"
    batch_size: int = 32
    epochs: float = 0.0
    seed: Literal["shared", "private"] = "shared"
    refresh: str = "lookahead"

    def __post_init__(self) -> None:
        if self.batch_size < 0:
            raise ConfigError(
                "VFL-4091",
                f"schedule.batch_size must be 1 or more, or 0 for automatic. Found {self.batch_size}.",
            )
        if not 0 <= self.epochs < math.inf:
            raise ConfigError(
                "VFL-4092", f"schedule.epochs must be above 0, or 0 for automatic. Found {self.epochs}."
            )
        parse_refresh(self.refresh)
        if self.seed == "private" and self.refresh == "lookahead":
            raise ConfigError(
                "VFL-4093",
                'schedule.refresh = "lookahead" computes the other clients\' next batches, so it needs '
                'schedule.seed = "shared". Found "private". Use refresh = "none", "random:R" or "all".',
            )

    def sized(self, rows: int) -> "ScheduleSettings":
        """With a batch size and a number of epochs for so many training rows, where they are left open."""
        size = 2 ** round(math.log2(max(1, rows / _BATCHES)))
        batch = self.batch_size or min(rows, max(_SMALLEST_BATCH, min(_LARGEST_BATCH, size)))
        epochs = self.epochs or min(_EPOCHS, max(_LEAST_EPOCHS, _EPOCHS * _MANY_ROWS / rows))
        return replace(self, batch_size=batch, epochs=epochs)

    def check_rows(self, rows: int) -> None:
        if self.batch_size > rows:
            raise ConfigError(
                "VFL-4094",
                f"schedule.batch_size must be at most the number of training rows, {rows}. "
                f"Found {self.batch_size}.",
            )


def parse_refresh(text: str) -> tuple[str, int]:
    """`random:3000` -> ("random", 3000); the other policies have no number."""
    name, _, number = text.partition(":")
    if name == "random" and number.isdigit() and int(number) > 0:
        return name, int(number)
    if name in ("none", "all", "lookahead") and not number:
        return name, 0
    raise ConfigError(
        "VFL-4095", f'schedule.refresh must be none, random:R, all or lookahead. Found "{text}".'
    )


class Sleeper(Protocol):
    """When does a client that is done at `now` wake up next?"""

    def wakes_at(self, now: float) -> float: ...


class BatchSchedule:
    """The minibatches of one client (or the common ones of all): `batch(i)` for any i.

    Args:
        rows: number of records N.
        batch_size: rows in a minibatch; the last one of an epoch may be smaller.
        seed: the run's, or the client's own.
        stream: tells the clients' schedules apart; equal streams give equal batches.
    """

    _REMEMBERED = 4  # look-ahead reads across the seam of two epochs

    def __init__(self, kind: ScheduleKind, rows: int, batch_size: int, seed: int, stream: int) -> None:
        self.rows, self.seed = rows, seed
        self._kind, self._batch_size, self._stream = kind, batch_size, stream
        self._drawn: OrderedDict[int, npt.NDArray[np.int32]] = OrderedDict()

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.rows // self._batch_size)

    def batch(self, activation: int) -> Rows:
        """The distinct rows of activation `activation`, counted from 0, in rising order."""
        if self._kind == "iid":
            generator = self._generator(activation)
            return np.sort(generator.choice(self.rows, self._batch_size, replace=False, shuffle=False))
        epoch, position = divmod(activation, self.batches_per_epoch)
        start = position * self._batch_size
        return self._epoch(epoch)[start : start + self._batch_size].astype(np.int64)

    def _epoch(self, epoch: int) -> npt.NDArray[np.int32]:
        if epoch not in self._drawn:
            order = self._generator(epoch).permutation(self.rows).astype(np.int32)
            whole = self.rows // self._batch_size * self._batch_size
            order[:whole].reshape(-1, self._batch_size).sort(axis=1)
            order[whole:].sort()
            self._drawn[epoch] = order
            if len(self._drawn) > self._REMEMBERED:
                self._drawn.popitem(last=False)
        return self._drawn[epoch]

    def _generator(self, index: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, self._stream, index))))


class Refresh(Protocol):
    """Chooses the rows a client refreshes at the end of an activation."""

    def rows(self, activations: Sequence[int]) -> Rows | None:
        """Distinct rows, or None for all of them; `activations` counts each client's so far."""


class NoRefresh:
    """Algorithm 1 as written: nothing but the batch is ever uploaded."""

    def rows(self, activations: Sequence[int]) -> Rows | None:
        return np.empty(0, dtype=np.int64)


class RefreshAll:
    """The footnote taken to its end: the whole column, every time."""

    def rows(self, activations: Sequence[int]) -> Rows | None:
        return None


class RandomRefresh:
    """`count` rows drawn afresh each time."""

    def __init__(self, rows: int, count: int, generator: np.random.Generator) -> None:
        self._rows, self._count, self._generator = rows, min(count, rows), generator

    def rows(self, activations: Sequence[int]) -> Rows | None:
        return np.sort(self._generator.choice(self._rows, self._count, replace=False, shuffle=False))


class Lookahead:
    """The rows the other clients will pick before this client is active again.

    For each other client j: its next L batches, where L is how many activations j made between this
    client's last two, plus one. So each row is uploaded about once per use, as fresh as
    intermittence allows: the communication of the sync rule without its waiting.
    """

    def __init__(self, client: int, schedules: Sequence[BatchSchedule]) -> None:
        self._others = [(j, schedule) for j, schedule in enumerate(schedules) if j != client]
        self._last: Sequence[int] | None = None

    def rows(self, activations: Sequence[int]) -> Rows | None:
        last, self._last = self._last or activations, activations
        ahead = [(schedule, activations[j], activations[j] - last[j] + 1) for j, schedule in self._others]
        if any(count >= 2 * schedule.batches_per_epoch - 1 for schedule, _, count in ahead):
            return None  # a whole epoch lies in that many batches, wherever they begin
        batches = [schedule.batch(first + i) for schedule, first, count in ahead for i in range(count)]
        return _union(batches) if batches else np.empty(0, dtype=np.int64)


def _union(batches: Sequence[Rows]) -> Rows:
    """Distinct rows in rising order: numpy.unique hashes them, which takes ten times as long."""
    rows = np.sort(np.concatenate(batches))
    return rows[np.diff(rows, prepend=-1) > 0]
