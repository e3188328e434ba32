"""How far an alignment is: a bar on a terminal, a few plain lines where there is none."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

_LINES = 10


class AlignmentProgress:
    """Shows the ids dealt with. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("ids"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bars = Bars(*columns, console=console) if console.is_terminal else None
        self._task: TaskID | None = None
        self._total = self._done = self._printed = 0
        self._began = time.monotonic()

    def __enter__(self) -> "AlignmentProgress":
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars:
            self._bars.stop()

    def begin(self, ids: int) -> None:
        """So many ids are to be dealt with, from now on."""
        self._total, self._done, self._printed = ids, 0, 0
        self._began = time.monotonic()
        if self._bars:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._task = self._bars.add_task("", total=ids)
        else:
            self._console.print(f"{ids:,} ids to compute")

    def advance(self, ids: int) -> None:
        """So many more have been dealt with."""
        self._done += ids
        if self._bars and self._task is not None:
            self._bars.advance(self._task, ids)
        elif self._done * _LINES >= self._total * (self._printed + 1):
            self._printed = self._done * _LINES // self._total
            rate = self._done / max(time.monotonic() - self._began, 1e-9)
            share = self._done / self._total
            self._console.print(f"  {share:4.0%}  {self._done:,} ids, {rate:,.0f}/s")
