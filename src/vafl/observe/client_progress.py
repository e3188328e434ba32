"""Shows a client's training: a line on its terminal, and a status file in its state folder.

A client knows what it sends and receives. It is not told the loss or any other figure of the labels.
"""

import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event, Thread
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from vafl.files import write_atomically
from vafl.observe.status import STATUS

_EVERY = 0.5  # seconds between two looks at the client
_LINE_EVERY = 30.0  # seconds between two lines where there is no terminal
_PACE = 20  # looks that the speed of the server is taken over


@dataclass(frozen=True)
class ClientView:
    """A client as it stands.

    Attributes:
        connected: whether the server has welcomed it, and the connection is open.
        uploads: minibatches that it has sent, over all processes of the run.
        epochs: how often it has sent each training row, on average.
        updates: steps of the server that it knows of.
        most_updates: steps after which the run ends at the latest, by this party's configuration.
        delay_mean, delay_max: steps that the server made while an upload was under way.
        bytes_up, bytes_down: of this process.
        seconds: since this process began to train.
        seconds_left: at most, at the present speed; None if that is unknown.
        finished: why it makes no more uploads; empty while it does.
    """

    party: str
    connected: bool
    uploads: int
    epochs: float
    updates: int
    most_updates: int
    delay_mean: float
    delay_max: int
    bytes_up: int
    bytes_down: int
    finished: str = ""
    seconds: float = 0.0
    seconds_left: float | None = None
    at: float = field(default_factory=time.time)

    def line(self, *, over: bool = False) -> str:
        """Return the same in words, on one line.

        Args:
            over: whether the training has ended, so that no time is left and no connection is needed.
        """
        parts = [
            f"{self.uploads:,} uploads ({self.epochs:,.1f} epochs)",
            f"server update {self.updates:,} of at most {self.most_updates:,}",
            f"delay {self.delay_mean:.1f} (max {self.delay_max:,})",
            f"{self.bytes_up / 1e6:,.2f} MB up, {self.bytes_down / 1e6:,.2f} MB down",
        ]
        if not (self.connected or over):
            parts.append("not connected")
        if self.finished:
            parts.append(f"no more uploads: {self.finished}")
        elif self.seconds_left is not None and not over:
            parts.append(f"at most {_duration(self.seconds_left)} left")
        return "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"


@dataclass
class ClientProgress:
    """Shows a client while it trains. Use as a context manager.

    Args:
        folder: where status.json is written.
        look: gives the client as it stands. It is called from a thread.
    """

    console: Console
    folder: Path
    look: Callable[[], ClientView]
    _pace: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_PACE))
    _over: Event = field(default_factory=Event)

    def __enter__(self) -> "ClientProgress":
        self._began = self._told = time.monotonic()
        self._seen = self.look()
        self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=2)
        if self.console.is_terminal:
            self._live.start()
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        # Nothing was trained: the error is all there is to show.
        shown = error is None or self._seen.uploads > 0
        if self.console.is_terminal:
            self._live.transient = not shown
            self._live.stop()
        elif shown:
            self.console.print(f"  {self._seen.line(over=True)}")

    def _watch(self) -> None:
        over = False
        while not over:  # the last look is at how the training ended
            over = self._over.wait(_EVERY)
            self._note()
            now = time.monotonic()
            if not (over or self.console.is_terminal) and now - self._told > _LINE_EVERY:
                self._told = now
                self.console.print(f"  {self._seen.line()}")

    def _note(self) -> None:
        seen, now = self.look(), time.monotonic()
        self._pace.append((now, seen.updates))
        timing = {"seconds": now - self._began, "seconds_left": self._seconds_left(seen)}
        self._seen = ClientView(**asdict(seen) | timing)
        with suppress(OSError):  # the training itself reports a full disk
            content = json.dumps(asdict(self._seen)).encode()
            write_atomically(self.folder / STATUS, content, durable=False)

    def _seconds_left(self, seen: ClientView) -> float | None:
        (then, before), (now, updates) = self._pace[0], self._pace[-1]
        left = seen.most_updates - updates
        if updates <= before or left < 0:
            return None
        return left * (now - then) / (updates - before)

    def _render(self) -> Text:
        return Text(f"{self._seen.party}: {self._seen.line()}")
