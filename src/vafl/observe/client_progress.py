"""Show a client's training: a line on its terminal, and a status file in its state folder.

A client knows only what it sends and receives. The server does not send it the loss or any other value that
depends on the labels, except the gradients.
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

_EVERY = 0.5  # seconds between two updates of the display
_LINE_EVERY = 30.0  # seconds between two lines if the output is not a terminal
_PACE = 20  # updates of the display over which the server's speed is averaged


@dataclass(frozen=True)
class ClientView:
    """The current state of a client.

    Attributes:
        connected: whether the server has accepted the client and the connection is open.
        uploads: minibatches that the client has sent, including those before a restart.
        epochs: how often the client has sent each training row, on average.
        updates: server steps that the client knows of.
        most_updates: server steps after which the run ends at the latest, by this party's configuration.
        delay_mean, delay_max: server steps that were made while an upload was under way.
        bytes_up, bytes_down: bytes that this process has sent and received.
        finished: why the client sends no more uploads; empty while it does.
        seconds: time since this process started to train.
        seconds_left: the most time left, at the current speed; None if unknown.
        at: when this was recorded, in seconds since 1970.
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
        """Return the state as one line of text.

        Args:
            over: whether the training has ended. The line then omits the connection and the time left.
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
    """Shows a client while it trains. Use it as a context manager.

    Args:
        folder: the folder for status.json.
        look: returns the current state of the client. A background thread calls it.
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
        # If an error came before the first upload, show only the error.
        shown = error is None or self._seen.uploads > 0
        if self.console.is_terminal:
            self._live.transient = not shown
            self._live.stop()
        elif shown:
            self.console.print(f"  {self._seen.line(over=True)}")

    def _watch(self) -> None:
        over = False
        while not over:  # record the final state once after the training has ended
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
        with suppress(OSError):  # training reports a full disk itself
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
