"""Show the progress of a count: a bar on a terminal, or a few plain lines elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars


class Tenths:
    """Limits progress lines to one per tenth, for output that is not a terminal."""

    def __init__(self) -> None:
        self._told = -1

    def is_due(self, share: float) -> bool:
        """Return whether to print a line at this share, 0 to 1. The first call always returns True."""
        due = int(share * 10) > self._told
        self._told = max(self._told, int(share * 10))
        return due


class CountProgress:
    """Shows how many items have been processed. Use it as a context manager.

    Args:
        what: the name of the items, such as "ids" or "records".
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
        """Start to count from 0 to `count`."""
        self._total, self._done, self._tenths = count, 0, Tenths()
        self._began = time.monotonic()
        if self._bars:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._task = self._bars.add_task("", total=count)
        elif self._tenths.is_due(0.0):
            self._console.print(f"{count:,} {self._what} to process")

    def reach(self, done: int, total: int) -> None:
        """Set the number of processed items and the total."""
        if self._task is None and self._total != total:
            self.begin(total)
        if done > self._done:
            self.advance(done - self._done)

    def advance(self, count: int) -> None:
        """Add `count` processed items."""
        self._done += count
        share = self._done / self._total
        if self._bars and self._task is not None:
            self._bars.advance(self._task, count)
        elif self._tenths.is_due(share):
            rate = self._done / max(time.monotonic() - self._began, 1e-9)
            self._console.print(f"  {share:4.0%}  {self._done:,} {self._what}, {rate:,.0f}/s")
