"""Batch schedules: the rows of a client's i-th minibatch.

A schedule is a pure function of (seed, stream, activation). Every party that knows the seed can compute which
rows any client picks next. Look-ahead refresh (refresh.py) depends on this. A private schedule has a seed
that only its client knows.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from vafl.arrays import RowIds
from vafl.errors import ConfigError

ScheduleKind = Literal["epochs", "iid"]
_BATCHES = 128  # batches per epoch, if the batch size is chosen automatically
_SMALLEST_BATCH, _LARGEST_BATCH = 64, 1024
_EPOCHS, _LEAST_EPOCHS, _MANY_ROWS = 40.0, 4.0, 100_000  # automatic epochs; fewer for more rows than the last


@dataclass(frozen=True)
class ScheduleSettings:
    """How minibatches are drawn.

    Attributes:
        kind: `epochs` shuffles the rows in each epoch and uses every row once; `iid` draws each batch
            independently.
        batch_size: rows in a minibatch. 1 is the single-record algorithm. 0 chooses a size from 64 to 1024 by
            the number of training rows.
        epochs: how often each client passes over the training rows, on average. Used if stop.updates = 0. 0
            chooses 40 epochs, or fewer for more than 100,000 rows.
        seed: `shared` lets every party compute every client's batches, which look-ahead needs. `private`
            draws each client's batches and random refreshes from a secret seed, so that the others learn the
            rows only from the uploads. The client gets the seed from its operating system and keeps it with
            its checkpoint. The sync rule needs `shared`, because all clients use the same batches. In a
            simulation all batches follow from the run's seed.
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
                "VFL-4092",
                f"schedule.epochs must be a positive number, or 0 for automatic. Found {self.epochs}.",
            )
        parse_refresh(self.refresh)
        if self.seed == "private" and self.refresh == "lookahead":
            raise ConfigError(
                "VFL-4093",
                'schedule.refresh = "lookahead" computes the next batches of the other clients, so it needs '
                'schedule.seed = "shared". Found "private". Use refresh = "none", "random:R" or "all".',
            )

    def sized(self, rows: int) -> "ScheduleSettings":
        """Return settings with the automatic batch size and number of epochs for this number of rows."""
        size = 2 ** round(math.log2(max(1, rows / _BATCHES)))
        batch = self.batch_size or min(rows, max(_SMALLEST_BATCH, min(_LARGEST_BATCH, size)))
        epochs = self.epochs or min(_EPOCHS, max(_LEAST_EPOCHS, _EPOCHS * _MANY_ROWS / rows))
        return replace(self, batch_size=batch, epochs=epochs)

    def check_rows(self, rows: int) -> None:
        """Raise ConfigError if a minibatch is larger than the number of training rows."""
        if self.batch_size > rows:
            raise ConfigError(
                "VFL-4094",
                f"schedule.batch_size must be at most the number of training rows, {rows}. "
                f"Found {self.batch_size}.",
            )


def parse_refresh(text: str) -> tuple[str, int]:
    """Return the name and number of a policy: `random:3000` -> ("random", 3000); `all` -> ("all", 0)."""
    name, _, number = text.partition(":")
    if name == "random" and number.isdigit() and int(number) > 0:
        return name, int(number)
    if name in ("none", "all", "lookahead") and not number:
        return name, 0
    raise ConfigError(
        "VFL-4095", f'schedule.refresh must be none, random:R, all or lookahead. Found "{text}".'
    )


class Sleeper(Protocol):
    """Decides when a client wakes up."""

    def wakes_at(self, now: float) -> float:
        """Return the time, in seconds, at which a client that goes to sleep at `now` wakes up."""


class BatchSchedule:
    """The minibatches of one client, or the common ones of all clients.

    Args:
        rows: the number of training records N.
        batch_size: rows in a minibatch. The last batch of an epoch may be smaller.
        seed: the seed of the run, or the client's private seed.
        stream: distinguishes the clients' schedules. Equal streams give equal batches.

    Attributes:
        batches_per_epoch: the number of batches in an epoch, including a smaller last one.
    """

    _REMEMBERED = 4  # epochs to cache; look-ahead reads across the boundary of two epochs

    def __init__(self, kind: ScheduleKind, rows: int, batch_size: int, seed: int, stream: int) -> None:
        self.rows, self.seed = rows, seed
        self.batches_per_epoch = -(-rows // batch_size)  # rounded up
        self._kind, self._batch_size, self._stream = kind, batch_size, stream
        self._drawn: OrderedDict[int, npt.NDArray[np.int32]] = OrderedDict()

    def batch(self, activation: int) -> RowIds:
        """Return the distinct rows of activation `activation`, counted from 0, in ascending order."""
        if self._kind == "iid":
            generator = self._generator(activation)
            return np.sort(generator.choice(self.rows, self._batch_size, replace=False, shuffle=False))
        epoch, position = divmod(activation, self.batches_per_epoch)
        start = position * self._batch_size
        return self._epoch(epoch)[start : start + self._batch_size].astype(np.int64)

    def _epoch(self, epoch: int) -> npt.NDArray[np.int32]:
        if epoch not in self._drawn:
            order = self._generator(epoch).permutation(self.rows).astype(np.int32)
            # Sort the rows within each batch: ascending rows are faster to check, gather and store.
            full = self.rows // self._batch_size * self._batch_size  # rows in batches of full size
            order[:full].reshape(-1, self._batch_size).sort(axis=1)
            order[full:].sort()
            self._drawn[epoch] = order
            if len(self._drawn) > self._REMEMBERED:
                self._drawn.popitem(last=False)
        return self._drawn[epoch]

    def _generator(self, index: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, self._stream, index))))
