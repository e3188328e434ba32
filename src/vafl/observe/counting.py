"""How far something countable is: a bar on a terminal, a few plain lines where there is none."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars


class Tenths:
    """Where there is no terminal, a line at each tenth of the way is enough."""

    def __init__(self) -> None:
        self._told = -1

    def is_due(self, share: float) -> bool:
        """Whether a line is due at this share of the way; the first always is."""
        due = int(share * 10) > self._told
        self._told = max(self._told, int(share * 10))
        return due


class CountProgress:
    """Shows how many have been dealt with. Use as a context manager.

    Args:
        what: is counted: ids, records.
    """

    def __init__(self, console: Console, what: str) -> None:
        self._console, self._what = console, what
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bars = Bars(*columns, console=console) if console.is_terminal else None
        self._task: TaskID | None = None
        self._total = self._done = 0

    def __enter__(self) -> "CountProgress":
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars:
            self._bars.stop()

    def begin(self, count: int) -> None:
        """So many are to be dealt with, from now on."""
        self._total, self._done, self._tenths = count, 0, Tenths()
        self._began = time.monotonic()
        if self._bars:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._task = self._bars.add_task("", total=count)
        elif self._tenths.is_due(0.0):
            self._console.print(f"{count:,} {self._what} to go through")

    def reach(self, done: int, total: int) -> None:
        """Show how many of all have been dealt with, whichever number was shown before."""
        if self._task is None and self._total != total:
            self.begin(total)
        if done > self._done:
            self.advance(done - self._done)

    def advance(self, count: int) -> None:
        """So many more have been dealt with."""
        self._done += count
        share = self._done / self._total
        if self._bars and self._task is not None:
            self._bars.advance(self._task, count)
        elif self._tenths.is_due(share):
            rate = self._done / max(time.monotonic() - self._began, 1e-9)
            self._console.print(f"  {share:4.0%}  {self._done:,} {self._what}, {rate:,.0f}/s")
