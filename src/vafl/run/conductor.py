"""What a networked run does besides training: evaluate, checkpoint, report what it waits for, stop.

The server's worker calls the conductor after it has handled messages, and every so often without any. One
evaluation at a time is under way:

    idle ──due──> polling ──all parts answered or expired──> measured ──> idle
                                                                 └─the run is over──> tested ──> done

Invariants:

- An evaluation always comes to an end: every request expires after `answer_timeout` seconds.
- It uses what each client sent last, or the client's mean embedding where it has not sent these rows. Each
  client that did not answer is named in the evaluation (`Evaluation.unanswered`).
- What is measured last is what is saved: no step is made once the run is to end.
- A run that has made updates keeps its models, measured or not.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from vafl.config.run_settings import EvaluationSettings, StopSettings
from vafl.models.losses import Loss, evenly
from vafl.models.metrics import Figures, Metrics, as_text
from vafl.models.probabilities import Calibration
from vafl.observe.evaluation import Evaluation
from vafl.protocol.messages import ServerMessage
from vafl.protocol.requests import Poll
from vafl.protocol.rows import NO_ROWS, Matrix, Rows, in_parts
from vafl.protocol.server import Server, listed
from vafl.protocol.settings import LARGEST_WINDOW
from vafl.run.controller import Watch, is_in_vain, why_over
from vafl.transport.grpc.server import FederationServer

log = logging.getLogger("vafl.server")

_SILENCE = 15.0  # seconds without an update before the server says what it waits for
_TESTED_ROWS = 32_768  # asked for at a time
_JUDGED_ROWS, _JUDGED_CLIENTS = 2000, 8  # at one evaluation: it must stay cheap beside the evaluation itself


@dataclass
class RunController:
    """Keeps a networked run going and brings it to its end.

    Args:
        held_out: the table's rows that the training is watched by, [rows].
        labels: their labels.
        metrics: measured on them, with the embeddings clients send for them when asked.
        loss: the run's loss, by which the conductor judges what each client contributes.
        watch: sees every evaluation, may say that it was the last, and has the head of the best one kept, as
            the clients keep their models.
        observe: takes every evaluation.
        checkpoint: saves the server's state; gives how many uploads of each client it holds.
        checkpoint_every: updates between two checkpoints.
        answer_timeout: seconds a client has to answer a request.
        tests: rows that are measured at the end only; none if those are the ones watched.
        test_labels: their labels.
        most_rows: rows to ask clients for at a time: answers must fit into messages.
        has_result: whether there is an evaluation.
        undo: undoes the effect of class weights on the outputs before they are measured.

    Attributes:
        outputs: "validation" or "test" -> the head's outputs on these rows when they were last measured.
            `watch.best` brings back those of the best evaluation, if it is given the same dictionary.
        tested: the metrics on the test rows, at the end; None if they are not known.
        waiting: what has kept the run from its next update for a while; empty while it goes on.
    """

    held_out: Rows
    labels: Tensor
    metrics: Metrics
    loss: Loss
    stop: StopSettings
    watch: Watch
    evaluation: EvaluationSettings
    observe: Callable[[Evaluation], None]
    checkpoint: Callable[[], list[int]]
    checkpoint_every: int
    answer_timeout: float
    tests: Rows = field(default_factory=lambda: NO_ROWS)
    test_labels: Tensor = field(default_factory=lambda: torch.empty(0))
    most_rows: int = 1 << 30
    has_result: bool = False
    undo: Calibration = field(default_factory=Calibration)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    tested: Figures | None = None
    waiting: str = ""
    interrupted: bool = False
    clock: Callable[[], float] = time.monotonic
    _poll: Poll | None = None  # of the part of an evaluation that is under way
    _to_ask: list[Rows] = field(default_factory=list)
    _answered: set[int] | None = None  # clients that have answered every part so far
    _evaluated_at: int = -1
    _due: float = 0.0
    _saved: int = 0
    _last_update: tuple[int, float] = (0, 0.0)
    _ending: str = ""
    _testing: bool = False
    _tried: bool = False
    _asked_at: dict[int, float] = field(default_factory=dict)  # when each open request was first seen
    _joining_since: float | None = None
    _judged: int = 0  # the client to be judged next
    _reported: set[str] = field(default_factory=set)  # clients that the last evaluations lacked
    _done: bool = False

    @property
    def measured(self) -> Rows:
        """The rows measured last, by the models that the run ends with."""
        return self.tests if self.tested is not None else self.held_out

    def __call__(self, federation: FederationServer[Server]) -> list[ServerMessage]:
        """Do whatever is due now; return messages to send."""
        if self._done or (federation.began is None and not self.interrupted):
            return []
        self._watch(federation)
        said = self._expire(federation)
        if self._must_save(federation):
            said += self._save(federation)
        if self._poll is not None:
            if self._poll.is_open:
                return said
            self._note_answers(self._poll)
            if self._to_ask:
                return said + self._ask_next(federation)
            self._evaluate(federation)
        self._ending = self._ending or self._over(federation)
        if self._ending:  # what is evaluated last is what is saved
            federation.server.last_iteration = federation.updates
        if self._ending and self._measured(federation):
            said += self._save(federation)
            self._done, self.watch.ended = True, self._ending
            self._finish(federation)
        elif self._ending or self._progress(federation) >= self._due:
            said += self._begin_evaluation(federation)
        return said

    def _finish(self, federation: FederationServer[Server]) -> None:
        """End the run. Without a single update there is nothing to keep; otherwise the models are kept."""
        if not self.has_result:
            reason = f"{self._ending}, but nothing was measured"
            federation.finish(reason, failed=federation.updates == 0)
        else:
            federation.finish(self._ending, failed=is_in_vain(self._ending, federation.updates))

    def _over(self, federation: FederationServer[Server]) -> str:
        """Return why the run ends now; empty while it goes on."""
        if self.interrupted:
            return "the server was told to stop"
        server = federation.server
        if server.over and server.overdue:
            return f"no step can be made: {listed(server.overdue, federation.parties)} did not answer in time"
        return why_over(federation, self.stop, spent=server.over)

    def _measured(self, federation: FederationServer[Server]) -> bool:
        """Whether nothing is left to measure of the model as it is."""
        return self._evaluated_at == federation.updates and (self._tried or not len(self.tests))

    def _progress(self, federation: FederationServer[Server]) -> float:
        return federation.now if self.evaluation.every_seconds else federation.updates

    # --- an evaluation ---

    def _begin_evaluation(self, federation: FederationServer[Server]) -> list[ServerMessage]:
        """Ask every client for its embeddings of the rows held out, or at last of the test rows by the best
        models, if those are kept."""
        if self._must_wait_for_joins(federation):
            return []
        server, best = federation.server, self.watch.best
        if not server.may_poll and not self._ending:
            return []  # a secure sum whose keys are being agreed on: asked again at the next call
        self._testing = bool(self._ending) and self._evaluated_at == federation.updates
        if best is not None and self._testing:
            best.restore()
        self._answered = None
        # The models no longer change, so many small answers give what one large answer would, and a client
        # needs less memory. An evaluation during the training is of as few moments as possible.
        size = min(self.most_rows, _TESTED_ROWS) if self._testing else self.most_rows
        self._to_ask = in_parts(self.tests if self._testing else self.held_out, size)
        if server.may_poll:
            return self._ask_next(federation)
        self._answered = set()
        self._evaluate(federation)
        return []

    def _must_wait_for_joins(self, federation: FederationServer[Server]) -> bool:
        """Whether a client is connected and about to join: asked a moment later, it can answer too."""
        if not federation.connections.keys() & federation.server.absent:
            self._joining_since = None
            return False
        now = self.clock()
        self._joining_since = now if self._joining_since is None else self._joining_since
        return now - self._joining_since < self.answer_timeout

    def _ask_next(self, federation: FederationServer[Server]) -> list[ServerMessage]:
        count = -1 if self.watch.best is None else self.watch.best.count
        self._poll = federation.server.poll(self._to_ask.pop(0), count, restore=self._testing)
        self._asked_at |= dict.fromkeys(self._poll.waiting, self.clock())
        return list(self._poll.requests)

    def _note_answers(self, poll: Poll) -> None:
        self._answered = poll.answered if self._answered is None else self._answered & poll.answered
        self._poll = None

    def _expire(self, federation: FederationServer[Server]) -> list[ServerMessage]:
        """Give up requests that were open for `answer_timeout` seconds: no client may hold up the run."""
        server, now = federation.server, self.clock()
        open_ = server.open_requests
        if not open_:
            self._asked_at.clear()
            return []
        self._asked_at = {number: self._asked_at.get(number, now) for number in open_}
        late = [number for number, since in self._asked_at.items() if now - since > self.answer_timeout]
        if not late:
            return []
        before = set(server.overdue)
        said = server.expire(late)
        if silent := server.overdue - before:
            log.warning(
                "%s did not answer a request for %g s (network.answer_timeout): going on without",
                listed(silent, federation.parties),
                self.answer_timeout,
            )
            for client in silent:
                federation.vitals.silent(client, self.answer_timeout)
        return said

    def _evaluate(self, federation: FederationServer[Server]) -> None:
        if self._testing:
            self._tried = True
            self.tested, _ = self._measure(federation, self.tests, self.test_labels)
            return
        self._evaluated_at = federation.updates
        interval = self.evaluation.every_seconds or self.evaluation.every
        self._due = (self._progress(federation) // interval + 1) * interval
        measured, unanswered = self._measure(federation, self.held_out, self.labels)
        if measured is None:
            return
        bytes_up, bytes_down = federation.bytes_moved
        point = Evaluation(
            seconds=federation.now,
            updates=federation.updates,
            bytes_up=bytes_up,
            bytes_down=bytes_down,
            train_loss=federation.server.losses.take_mean(),
            metric=measured[self.metrics.headline.name],
            metrics=measured,
            unanswered=unanswered,
        )
        if (reason := self.watch.sees(point)) and not self._ending:
            self._log_end(point, reason)
        self._ending, self.has_result = self._ending or reason, True
        self.observe(point)

    def _log_end(self, last: Evaluation, reason: str) -> None:
        """Log why the run ends, and the figures of the models that are kept, which may not be the last."""
        best = self.watch.best
        kept = last if best is None or best.point is None else best.point
        rows = "validation" if len(self.tests) else "test"
        figures = as_text(kept.metrics)
        log.info(
            "the run ends: %s. It keeps the models of update %d of %d: %s %s",
            *(reason, kept.updates, last.updates, rows, figures),
        )

    @torch.no_grad()
    def _measure(
        self, federation: FederationServer[Server], rows: Rows, labels: Tensor
    ) -> tuple[Figures | None, dict[str, Literal["last", "default"]]]:
        """Return the metrics, and what was used of each client that did not answer.

        The metrics are None where no client has ever sent these rows, and under a secure sum that lacks a
        client: no stand-in can be added to a sum.
        """
        server, parties = federation.server, federation.parties
        inputs, gaps = server.table.read_filled(rows)
        silent = set(range(len(parties))) - (self._answered or set())
        if len(gaps) == len(parties) or (gaps and not server.may_stand_in):
            who = listed(silent, parties)
            log.warning("nothing is measured at update %d: no answer from %s", federation.updates, who)
            return None, {}
        unanswered: dict[str, Literal["last", "default"]] = {
            parties[client]: "default" if client in gaps else "last" for client in sorted(silent)
        }
        if unanswered.keys() != self._reported:  # once, not at every evaluation while a client is gone
            self._reported = set(unanswered)
            self._log_unanswered(federation.updates, unanswered)
        if server.may_stand_in and not self._testing:
            self._judge_clients(federation, rows[:_JUDGED_ROWS], inputs[:_JUDGED_ROWS], labels[:_JUDGED_ROWS])
        outputs = server.head(torch.from_numpy(inputs))
        self.outputs["validation" if len(self.tests) and not self._testing else "test"] = outputs
        return self.metrics.measure(self.undo(outputs), labels), unanswered

    def _log_unanswered(self, updates: int, unanswered: Mapping[str, Literal["last", "default"]]) -> None:
        if not unanswered:
            log.info("every client answers evaluations again from update %d on", updates)
            return
        instead = {
            "last": "its last embeddings are used",
            "default": "the mean of its embeddings is used, or zeros if it has sent none",
        }
        used = ", ".join(f"{name} ({instead[what]})" for name, what in unanswered.items())
        log.warning("evaluations from update %d on lack an answer from: %s", updates, used)

    def _judge_clients(
        self, federation: FederationServer[Server], rows: Rows, inputs: Matrix, labels: Tensor
    ) -> None:
        """Measure the loss with and without some of the clients: all of them in turn, a few at a time."""
        server, count = federation.server, len(federation.parties)
        if count == 1:
            return  # without its only client a model has nothing to compare with

        def loss_of(seen: Matrix) -> float:
            outputs = server.head(torch.from_numpy(seen)).numpy()
            return self.loss(outputs, labels.numpy(), evenly(len(labels)))[0]

        judged = [(self._judged + place) % count for place in range(min(count, _JUDGED_CLIENTS))]
        self._judged = (judged[-1] + 1) % count
        without = {client: loss_of(server.table.without(client, rows, inputs)) for client in judged}
        federation.vitals.evaluated(loss_of(inputs), without)

    # --- checkpoints and what the run waits for ---

    def _must_save(self, federation: FederationServer[Server]) -> bool:
        """Whether a checkpoint is due, by updates or by the uploads of any client.

        A skipped upload makes no update. What a crash loses must stay bounded all the same: a restored server
        takes a client's word for that many uploads and no more.
        """
        server = federation.server
        lag = max(taken - kept for taken, kept in zip(server.activations, server.durable, strict=True))
        return (
            federation.updates - self._saved >= self.checkpoint_every
            or lag >= self.checkpoint_every + LARGEST_WINDOW  # as many may wait, and no checkpoint holds them
        )

    def _save(self, federation: FederationServer[Server]) -> list[ServerMessage]:
        self._saved = federation.updates
        return list(federation.server.made_durable(self.checkpoint()))

    def _watch(self, federation: FederationServer[Server]) -> None:
        """Nothing hangs silently: log what the run waits for, every so often."""
        updates, since = self._last_update
        now = self.clock()
        if federation.updates != updates or not since:
            self._last_update, self.waiting = (federation.updates, now), ""
        elif now - since > _SILENCE:
            self.waiting = federation.server.waiting_for(federation.parties)
            log.warning("no update for %.0f s: waiting for %s", now - since, self.waiting)
            self._last_update = (updates, now)
