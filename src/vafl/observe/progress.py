"""The live display of a run on a terminal, and plain lines where there is none."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vafl.observe.counting import Tenths
from vafl.runtime.simulator import Traffic
from vafl.runtime.training import Clock, Point


@dataclass(frozen=True)
class ClientStatus:
    """One client as the display shows it."""

    name: str
    activations: int
    delay_mean: float
    delay_max: int
    traffic: Traffic
    gone: bool = False


@dataclass
class Progress:
    """Shows a run while it goes on. Use as a context manager; hand `observe` to the run.

    Args:
        console: where to show it.
        title: what is running.
        metric: the metric's name.
        runtime: its counters are read a few times a second, from the display's thread.
        share_done: how far the run is towards its limits, 0 to 1; read there too.
        clients: the clients' state; read at evaluations only, in the run's own thread.
    """

    console: Console
    title: str
    metric: str
    runtime: Clock
    share_done: Callable[[], float]
    clients: Callable[[], list[ClientStatus]]
    _point: Point | None = None
    _shown: list[ClientStatus] = field(default_factory=list)
    _live: Live | None = None
    _began: float = field(default_factory=time.monotonic)
    _tenths: Tenths = field(default_factory=Tenths)

    def __enter__(self) -> "Progress":
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=4)
            self._live.start()
        else:
            self.console.print(self.title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def observe(self, point: Point) -> None:
        """Takes note of an evaluation."""
        self._point = point
        if self._live is not None:
            self._shown = self.clients()
        elif self._tenths.is_due(share := self.share_done()):
            self.console.print(f"  {share:4.0%}  {self._line()}")

    def _line(self) -> str:
        updates = self.runtime.updates
        rate = updates / max(time.monotonic() - self._began, 1e-9)
        parts = [f"{updates:,} updates", f"{rate:,.0f}/s", f"clock {self.runtime.now:,.1f} s"]
        if self._point and self._point.train_loss is not None:
            parts.append(f"loss {self._point.train_loss:.4f}")
        if self._point:
            parts.append(f"{self.metric} {self._point.metric:.4f}")
        return "  ".join(parts)

    def _render(self) -> RenderableType:
        bar = ProgressBar(total=1.0, completed=self.share_done(), width=60)
        lines = Table.grid()  # a bar alone would not end its line
        for part in (Text(self.title, style="bold"), bar, Text(self._line())):
            lines.add_row(part)
        return Group(lines, _client_table(self._shown)) if self._shown else lines


def _client_table(clients: list[ClientStatus]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("client", "activations", "delay mean", "delay max", "MB up", "MB down"):
        table.add_column(heading, justify="left" if heading == "client" else "right")
    for client in clients:
        table.add_row(
            f"{client.name} (gone)" if client.gone else client.name,
            f"{client.activations:,}",
            f"{client.delay_mean:.1f}",
            f"{client.delay_max:,}",
            f"{client.traffic.bytes_up / 1e6:,.2f}",
            f"{client.traffic.bytes_down / 1e6:,.2f}",
        )
    return table
