"""Show a run while it trains: a live display on a terminal, or plain lines elsewhere.

The run's status also goes to status.json in its folder, which other processes can read.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vafl.models.metrics import figure
from vafl.observe.counting import Tenths
from vafl.observe.evaluation import Clock, Evaluation
from vafl.observe.status import Baselines, ClientStatus, Status
from vafl.protocol.staleness import DelaySummary

_EVERY = 0.5  # seconds between two updates of the display
_PACE = 20  # updates of the display over which the run's speed is averaged


@dataclass(frozen=True)
class ShownFigures:
    """Facts about the metrics of a run, for its display.

    Attributes:
        metric: the name of the headline metric.
        rows: the rows that evaluations use, "validation" or "test".
        baselines: baseline -> rows -> metric -> value.
    """

    metric: str
    rows: str
    baselines: Baselines = field(default_factory=dict)


@dataclass
class Progress:
    """Shows a run while it trains. Use it as a context manager, and pass `observe` to the run.

    A background thread calls `runtime`, `share_done`, `clients` and `waiting` twice a second, so they must be
    safe to call while the run continues. `delays` is called only by `observe`, in the run's thread.

    Args:
        console: the console for the display.
        folder: the folder for status.json.
        title: the first line of the display.
        figures: facts about the run's metrics.
        runtime: the run's clock and update counter.
        share_done: returns the completed share of the run, 0 to 1.
        clients: returns the state of every client, without delays.
        delays: returns the delays of every client.
        waiting: returns what the run waits for; empty while it makes progress.
    """

    console: Console
    folder: Path
    title: str
    figures: ShownFigures
    runtime: Clock
    share_done: Callable[[], float]
    clients: Callable[[], list[ClientStatus]]
    delays: Callable[[], Sequence[DelaySummary]]
    waiting: Callable[[], str] = lambda: ""
    _evaluation: Evaluation | None = None
    _delays: Sequence[DelaySummary] = ()
    _measured: float = 0.0
    _pace: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_PACE))
    _over: Event = field(default_factory=Event)
    _tenths: Tenths = field(default_factory=Tenths)

    def __enter__(self) -> "Progress":
        self._pace.append((time.monotonic(), self.runtime.updates))
        self._take_note()
        self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=2)
        if self.console.is_terminal:
            self._live.start()
        else:
            self.console.print(self.title)
        self._thread = Thread(target=self._look_on, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self.console.is_terminal:
            self._live.stop()

    def observe(self, evaluation: Evaluation) -> None:
        """Show an evaluation. Call this in the run's thread."""
        self._evaluation = evaluation
        if (now := time.monotonic()) - self._measured > _EVERY:
            self._measured, self._delays = now, self.delays()
        if not self.console.is_terminal and self._tenths.is_due(share := self.share_done()):
            self.console.print(f"  {share:4.0%}  {self._line(self._look())}")

    def _look_on(self) -> None:
        over = False
        while not over:  # record the final status once after the run has ended
            over = self._over.wait(_EVERY)
            self._take_note()

    def _take_note(self) -> None:
        self._seen = self._look()
        with suppress(OSError):  # the run reports a full disk itself
            self._seen.write(self.folder)

    def _look(self) -> Status:
        now, updates = time.monotonic(), self.runtime.updates
        (then, before), clients = self._pace[0], self.clients()
        if updates == before:
            # Measure the speed from the moment the run starts or continues. Replace the deque instead of
            # clearing it: two threads read it, and neither may find it empty.
            self._pace = deque([(now, updates)], _PACE)
        else:
            self._pace.append((now, updates))
        for number, delay in enumerate(self._delays):
            clients[number] = replace(clients[number], delay_mean=delay.mean, delay_max=delay.max)
        return Status(
            title=self.title,
            metric=self.figures.metric,
            rows=self.figures.rows,
            baselines=self.figures.baselines,
            share=self.share_done(),
            seconds=self.runtime.now,
            updates=updates,
            rate=(updates - before) / max(now - then, 1e-3),
            waiting=self.waiting(),
            clients=clients,
        )

    def _line(self, seen: Status) -> str:
        parts = [f"{seen.updates:,} updates", f"{seen.rate:,.0f}/s", f"clock {seen.seconds:,.1f} s"]
        if self._evaluation and self._evaluation.train_loss is not None:
            parts.append(f"training loss {figure(self._evaluation.train_loss)}")
        if self._evaluation:
            parts.append(f"{self.figures.rows} {self.figures.metric} {figure(self._evaluation.metric)}")
        return "  ".join(parts)

    def _render(self) -> RenderableType:
        seen = self._seen
        bar = ProgressBar(total=1.0, completed=seen.share, width=60)
        lines = Table.grid()  # without a grid, the bar would not end its line
        for part in (Text(self.title, style="bold"), bar, Text(self._line(seen))):
            lines.add_row(part)
        if seen.waiting:
            lines.add_row(Text(f"waiting for {seen.waiting}", style="yellow"))
        for client in seen.clients:
            for alarm in client.alarms:
                lines.add_row(Text(f"alarm: {client.name}: {alarm}", style="bold red"))
        return Group(lines, _client_table(seen.clients)) if seen.clients else lines


def _name(client: ClientStatus) -> str:
    if client.gone:
        return f"{client.name} (gone)"
    return f"{client.name} (silent for {client.silent:.0f} s)" if client.silent else client.name


def _client_table(clients: Sequence[ClientStatus]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("client", "uploads", "delay mean", "delay max", "MB up", "MB down"):
        table.add_column(heading, justify="left" if heading == "client" else "right")
    for client in clients:
        table.add_row(
            _name(client),
            f"{client.activations:,}",
            f"{client.delay_mean:.1f}",
            f"{client.delay_max:,}",
            f"{client.bytes_up / 1e6:,.2f}",
            f"{client.bytes_down / 1e6:,.2f}",
        )
    return table
