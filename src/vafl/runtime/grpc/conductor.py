"""What a networked run does besides training: evaluate, checkpoint, tell what it waits for, stop.

It is called by the server's worker, after messages were handled and every so often without any.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vafl.models.losses import Metric
from vafl.protocol.messages import Request, ServerMessage
from vafl.protocol.rows import NO_ROWS, Rows, in_parts
from vafl.protocol.server import Server, listed
from vafl.protocol.table import FOREVER
from vafl.runtime.grpc.server import FederationServer
from vafl.runtime.point import Point
from vafl.runtime.settings import EvaluationSettings, StopSettings
from vafl.runtime.training import Watch, is_in_vain, why_over

log = logging.getLogger("vafl.server")

_EVALUATION_TIMEOUT = 60.0
_SILENCE = 15.0  # seconds without an update before the server says what it waits for


@dataclass
class Conductor:
    """Keeps a networked run going and brings it to its end.

    Args:
        held_out: the table's rows that the training is watched by, [rows].
        labels: their labels.
        metric: measured on them, with the embeddings clients send for them when asked.
        watch: sees every evaluation, may say that it was the last, and has the head of the best one kept, as
            the clients keep their models.
        observe: takes every evaluation.
        checkpoint: saves the server's state; gives how many uploads of each client it holds.
        checkpoint_every: updates between two checkpoints.
        tests: rows that are measured at the end only; none if those are the ones watched.
        test_labels: their labels.
        most_rows: that clients are asked for at a time: answers must fit into messages.
        has_result: whether there is an evaluation; without, a run has none to end with.

    Attributes:
        tested: the metric on the test rows, at the end; None if it is not known.
        waiting: what has kept the run from its next update for a while; empty while it goes on.
    """

    held_out: Rows
    labels: Tensor
    metric: Metric
    stop: StopSettings
    watch: Watch
    evaluation: EvaluationSettings
    observe: Callable[[Point], None]
    checkpoint: Callable[[], list[int]]
    checkpoint_every: int
    tests: Rows = field(default_factory=lambda: NO_ROWS)
    test_labels: Tensor = field(default_factory=lambda: torch.empty(0))
    most_rows: int = 1 << 30
    has_result: bool = False
    tested: float | None = None
    waiting: str = ""
    interrupted: bool = False
    _asked: list[Request] = field(default_factory=list)
    _to_ask: list[Rows] = field(default_factory=list)
    _asked_at: float = 0.0
    _evaluated_at: int = -1
    _due: float = 0.0
    _saved: int = 0
    _last_update: tuple[int, float] = (0, 0.0)
    _ending: str = ""
    _testing: bool = False
    _tried: bool = False
    _put_off: set[int] = field(default_factory=set)  # clients that the rows asked for wait for
    _done: bool = False

    @property
    def measured(self) -> Rows:
        """The rows measured last, by the models that the run ends with."""
        return self.tests if self.tested is not None else self.held_out

    def __call__(self, federation: FederationServer[Server]) -> list[ServerMessage]:
        """Whatever is due now; gives messages to send."""
        if self._done or (federation.began is None and not self.interrupted):
            return []
        said: list[ServerMessage] = []
        self._watch(federation)
        if federation.updates - self._saved >= self.checkpoint_every:
            said += self._save(federation)
        if self._asked:
            answered = federation.server.has_answers(self._asked)
            if not (answered or self._is_late()):
                return said
            if answered and self._to_ask and (asked := self._ask_next(federation)):
                return said + asked
            self._evaluate(federation)
        self._ending = self._ending or self._over(federation)
        if self._ending:  # what is evaluated last is what is saved
            federation.server.last_iteration = federation.updates
        if self._ending and self._measured(federation):
            said += self._save(federation)
            self._done, self.watch.ended = True, self._ending
            self._finish(federation)
        elif self._ending or self._progress(federation) >= self._due:
            said += self._ask(federation)
            if not said and self._ending and not self._joining(federation):  # what the table holds must do
                self._evaluate(federation)
        return said

    def _finish(self, federation: FederationServer[Server]) -> None:
        if not self.has_result:
            federation.finish(f"{self._ending}, but nothing was measured", failed=True)
        else:
            federation.finish(self._ending, failed=is_in_vain(self._ending, federation.updates))

    def _over(self, federation: FederationServer[Server]) -> str:
        if self.interrupted:
            return "the server was told to stop"
        return why_over(federation, self.stop, spent=federation.server.over)

    def _measured(self, federation: FederationServer[Server]) -> bool:
        """Whether nothing is left to measure, or to try to, of the model as it is."""
        return self._evaluated_at == federation.updates and (self._tried or not len(self.tests))

    def _progress(self, federation: FederationServer[Server]) -> float:
        return federation.now if self.evaluation.every_seconds else federation.updates

    def _ask(self, federation: FederationServer[Server]) -> list[ServerMessage]:
        """Asks every client that is here for its embeddings of the rows held out; at last of the test rows,
        by the best models, if those are kept. Nobody is asked in vain, which costs private clients."""
        if self._put_off & federation.server.absent:  # to look for others would cost a look at every row
            return []
        self._testing = bool(self._ending) and self._evaluated_at == federation.updates
        rows, best = self.tests if self._testing else self.held_out, self.watch.best
        if best is not None and self._testing:
            best.restore()
        self._put_off = self._unheard(federation, rows) & federation.server.absent
        if self._put_off:
            self._asked_at = time.monotonic()
            if gone := self._put_off - federation.connections.keys():  # the others are about to join
                log.warning("no evaluation before %s is here", listed(gone, federation.parties))
            return []
        self._to_ask = in_parts(rows, self.most_rows)
        return self._ask_next(federation)

    def _ask_next(self, federation: FederationServer[Server]) -> list[ServerMessage]:
        self._asked_at = time.monotonic()
        count = -1 if self.watch.best is None else self.watch.best.count
        self._asked = federation.server.ask_everyone(self._to_ask.pop(0), count, back=self._testing)
        return list(self._asked)

    def _unheard(self, federation: FederationServer[Server], rows: Rows) -> set[int]:
        """Clients of the run that have yet to say what they make of these rows: without them nothing is
        measured. One that was gone since is measured by what it said last; one that never came has no part
        in the model."""
        server = federation.server
        unknown = server.table.delays(rows, server.iteration) >= FOREVER
        clients = np.flatnonzero(unknown.any(axis=0)).tolist()
        return {m for m in clients if m in federation.seen or server.activations[m]}

    def _joining(self, federation: FederationServer[Server]) -> bool:
        """Whether one that the last evaluation lacks is about to join, as when a run resumes at its end."""
        coming = any(client in federation.connections for client in self._put_off)
        return coming and federation.began is not None and not self._is_late()

    def _is_late(self) -> bool:
        return time.monotonic() - self._asked_at > _EVALUATION_TIMEOUT

    def _evaluate(self, federation: FederationServer[Server]) -> None:
        self._asked, self._to_ask, self._put_off = [], [], set()
        if self._testing:
            self._tried, self.tested = True, self._measure(federation, self.tests, self.test_labels)
            return
        self._evaluated_at = federation.updates
        interval = self.evaluation.every_seconds or self.evaluation.every
        self._due = (self._progress(federation) // interval + 1) * interval
        measured = self._measure(federation, self.held_out, self.labels)
        if measured is None:
            return
        point = Point(
            seconds=federation.now,
            updates=federation.updates,
            bytes_up=sum(traffic.bytes_up for traffic in federation.traffic),
            bytes_down=sum(traffic.bytes_down for traffic in federation.traffic),
            train_loss=federation.server.losses.take_mean(),
            metric=measured,
        )
        if (reason := self.watch.sees(point)) and not self._ending:
            log.info("the run ends with %s %.4f: %s", self.metric.name, point.metric, reason)
        self._ending, self.has_result = self._ending or reason, True
        self.observe(point)

    @torch.no_grad()
    def _measure(self, federation: FederationServer[Server], rows: Rows, labels: Tensor) -> float | None:
        """The metric; None where it would be of zeros that no client has said."""
        server = federation.server
        if missing := self._unheard(federation, rows):
            who = listed(missing, federation.parties)
            log.warning("nothing is measured at update %d: no answer from %s", federation.updates, who)
            return None
        return self.metric.measure(server.head(torch.from_numpy(server.table.read(rows))), labels)

    def _save(self, federation: FederationServer[Server]) -> list[ServerMessage]:
        self._saved = federation.updates
        return list(federation.server.made_durable(self.checkpoint()))

    def _watch(self, federation: FederationServer[Server]) -> None:
        """Nothing hangs silently."""
        updates, since = self._last_update
        now = time.monotonic()
        if federation.updates != updates or not since:
            self._last_update, self.waiting = (federation.updates, now), ""
        elif now - since > _SILENCE:
            self.waiting = federation.server.waiting_for(federation.parties)
            log.warning("no update for %.0f s: waiting for %s", now - since, self.waiting)
            self._last_update = (updates, now)
