"""Refresh policies: the rows that a client uploads for the next steps of the other clients.

A refresh is in time if the server stores it before the steps that use its rows. Between a client's answer and
that moment, other clients go on: uploads are in flight, queued, or travel together. `Lookahead` therefore
learns the lead from acknowledgements. Each `Gradient` tells which refresh the server has stored last, and how
many uploads every client had made at that moment:

    client m               server                       counts of client j
       | <----- Gradient ---- |                         10   the refresh is made
       | ------ Refresh ----> |  stored                 14   lead 4
       | <----- Gradient ---- |  "stored at count 14"   17
       | ------ Refresh ----> |  stored                 21   lead 4

So the second refresh has the batches of client j from 17 + 4 on, until the third one will be stored.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from vafl.arrays import RowIds
from vafl.protocol.rows import NO_ROWS
from vafl.protocol.schedule import BatchSchedule

_REMEMBERED = 3  # acknowledgements that the lead is estimated from
_UNACKNOWLEDGED = 32  # refreshes to remember until they are acknowledged


class RefreshTime(Protocol):
    """Limits the time that a client spends on refreshes."""

    def rows(self) -> int | None:
        """Return how many rows may be refreshed now; None sets no limit."""

    def refreshing(self, rows: int) -> AbstractContextManager[None]:
        """Measure how long it takes to embed this number of rows."""


class UnlimitedTime:
    """Sets no limit: time costs nothing in a simulation."""

    def rows(self) -> int | None:
        return None

    def refreshing(self, rows: int) -> AbstractContextManager[None]:
        return nullcontext()


class RefreshPolicy:
    """Chooses the rows that a client refreshes at the end of an activation. This one chooses none.

    Attributes:
        time: limits how much is refreshed.
        uses, covered: how many batches of other clients the server has used since this client's first
            acknowledged refresh, and how many of them a refresh had covered in time.
    """

    time: RefreshTime = UnlimitedTime()
    uses = covered = 0

    def rows(self, activations: Sequence[int]) -> RowIds | None:
        """Return distinct rows, or None for all; `activations` has each client's number of uploads so far."""
        return NO_ROWS

    def sent(self, sequence: int) -> None:
        """The rows chosen last were sent. `sequence` is the number of the last message with them."""

    def stored(self, sequence: int, activations: Sequence[int]) -> None:
        """The server has stored a refresh, when the clients had made `activations` uploads."""

    def restart(self) -> None:
        """A new connection begins. Refreshes of the last one are no longer acknowledged."""


class NoRefresh(RefreshPolicy):
    """Refreshes nothing: Algorithm 1 as written."""


class RefreshAll(RefreshPolicy):
    """Refreshes all rows at every activation: the extreme case of the paper's footnote."""

    def rows(self, activations: Sequence[int]) -> RowIds | None:
        return None


class RandomRefresh(RefreshPolicy):
    """Refreshes `count` random rows at every activation."""

    def __init__(self, rows: int, count: int, generator: np.random.Generator) -> None:
        self._rows, self._count, self._generator = rows, min(count, rows), generator

    def rows(self, activations: Sequence[int]) -> RowIds | None:
        return np.sort(self._generator.choice(self._rows, self._count, replace=False, shuffle=False))


@dataclass
class _Other:
    """What a client knows about the progress of another one.

    Attributes:
        schedule: its batches.
        leads: how many uploads it made while each of the last refreshes was on its way.
        counted: the number of its uploads up to which uses are counted; -1 before the first acknowledgement.
        stored: the batches, first and end, that each of the last stored refreshes covered.
    """

    schedule: BatchSchedule
    leads: deque[int] = field(default_factory=lambda: deque([0], _REMEMBERED))
    counted: int = -1
    stored: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    @property
    def complete(self) -> int:
        """Return how many consecutive batches contain a complete epoch, and so all rows."""
        return 2 * self.schedule.batches_per_epoch - 1

    def next_batches(self, now: int, last: int) -> tuple[int, int]:
        """Return the batches, first and end, that are used between the storing of this refresh and the next.

        `now` and `last` are the numbers of uploads at this client's last two activations.
        """
        first, count = now + min(self.leads), max(self.leads) - min(self.leads) + now - last + 1
        return first, first + min(count, self.complete)

    def covers(self, batch: int) -> bool:
        """Return whether a stored refresh has this batch."""
        return any(first <= batch < end for first, end in self.stored)


@dataclass(frozen=True)
class _Sent:
    """A refresh that was sent: the counts when it was made, and the batches of each client, first and end."""

    activations: Sequence[int]
    batches: Mapping[int, tuple[int, int]]


class Lookahead(RefreshPolicy):
    """Refreshes the rows that the other clients will use between the storing of this refresh and the next.

    For another client j, these are its batches from `lead` uploads ahead on. The lead is the number of
    uploads that j makes while a refresh is on its way. How many batches follow is the number of uploads that
    j made between the last two activations of this client, plus one. So each row is uploaded about once per
    use, and is as fresh as the pauses between activations allow.

    If the time does not suffice for all rows, the batches that are used first are refreshed.

    Args:
        client: the number of this client.
        schedules: the batches of all clients.
        time: limits the number of rows.
    """

    def __init__(
        self, client: int, schedules: Sequence[BatchSchedule], time: RefreshTime | None = None
    ) -> None:
        self._others = {j: _Other(schedule) for j, schedule in enumerate(schedules) if j != client}
        self.time = time or UnlimitedTime()
        self._last: Sequence[int] | None = None
        self._chosen: _Sent | None = None
        self._sent: dict[int, _Sent] = {}

    def rows(self, activations: Sequence[int]) -> RowIds | None:
        last, self._last = self._last or activations, activations
        wanted = {j: other.next_batches(activations[j], last[j]) for j, other in self._others.items()}
        self._chosen, most = _Sent(activations, wanted), self.time.rows()
        if most is None and any(
            end - first >= self._others[j].complete for j, (first, end) in wanted.items()
        ):
            return None
        batches, covered, total = [], {j: (first, first) for j, (first, _) in wanted.items()}, 0
        for j, number in _by_use(wanted):
            if most is not None and total >= most:
                break
            batch = self._others[j].schedule.batch(number)
            batches.append(batch)
            covered[j], total = (covered[j][0], number + 1), total + len(batch)
        self._chosen = _Sent(activations, covered)
        return _union(batches) if batches else NO_ROWS

    def sent(self, sequence: int) -> None:
        if self._chosen is not None:
            self._sent[sequence] = self._chosen
            if len(self._sent) > _UNACKNOWLEDGED:
                del self._sent[next(iter(self._sent))]

    def stored(self, sequence: int, activations: Sequence[int]) -> None:
        sent = self._sent.get(sequence)
        if sent is None:
            return
        for j, other in self._others.items():
            now = activations[j]
            other.leads.append(max(0, now - sent.activations[j]))
            if other.counted >= 0:
                used = range(other.counted, now)[-other.schedule.batches_per_epoch :]
                self.uses += len(used)
                self.covered += sum(map(other.covers, used))
            other.counted = now
            other.stored.append(sent.batches[j])
        for earlier in [number for number in self._sent if number <= sequence]:
            del self._sent[earlier]

    def restart(self) -> None:
        self._sent.clear()
        for other in self._others.values():
            other.counted = -1


def _by_use(wanted: Mapping[int, tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield client and number of the batches in the order of their use, if all clients progress evenly."""
    ahead = [
        ((number - first + 0.5) / (end - first), j, number)
        for j, (first, end) in wanted.items()
        for number in range(first, end)
    ]
    for _, j, number in sorted(ahead):
        yield j, number


def _union(batches: Sequence[RowIds]) -> RowIds:
    """Return the distinct rows in ascending order. numpy.unique hashes them, which is ten times slower."""
    rows = np.sort(np.concatenate(batches))
    return rows[np.diff(rows, prepend=-1) > 0]
