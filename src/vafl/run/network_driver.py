"""Drives a networked run: polls clients, writes checkpoints, and logs what the run waits for.

The run controller decides when to evaluate, test, save and end. The server's worker calls the driver after it
has handled messages, and every so often without any. The clients answer an evaluation in parts:

    no poll ──EVALUATE or TEST──> poll open ──all asked have answered or expired──> poll closed
       ^                              ^                                              │      │
       │                              └──────────── another part is left ────────────┘      │
       └────────────────────────────────── all parts were asked: measure ───────────────────┘

Invariants:

- An evaluation always comes to an end: every request expires after `answer_timeout` seconds.
- It uses what each client sent last, or the client's mean embedding where it has not sent these rows. Each
  client that did not answer is named in the evaluation (`Evaluation.unanswered`).
- The server makes no step once the controller has set `end`, so the models that are saved are those that were
  evaluated last.
- A run that has made updates keeps its models, measured or not.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from vafl.arrays import Matrix, RowIds
from vafl.models.losses import Loss, evenly
from vafl.models.metrics import Figures, Metrics, as_text
from vafl.models.probabilities import Calibration
from vafl.observe.evaluation import Evaluation
from vafl.protocol.messages import ServerMessage
from vafl.protocol.requests import Poll
from vafl.protocol.rows import NO_ROWS, in_parts
from vafl.protocol.server import Server, listed
from vafl.protocol.settings import LARGEST_WINDOW
from vafl.run.best import Best
from vafl.run.controller import End, Ending, Phase, RunController, Step
from vafl.transport.grpc.server import FederationServer

log = logging.getLogger("vafl.server")

_SILENCE = 15.0  # seconds without an update before the server says what it waits for
_TESTED_ROWS = 32_768  # asked for at a time
_JUDGED_ROWS, _JUDGED_CLIENTS = 2000, 8  # at one evaluation: it must stay cheap beside the evaluation itself


@dataclass
class NetworkDriver:
    """Does what the run controller decides, with the server and the clients of a federation.

    Args:
        controller: decides when to evaluate, test, save and end.
        held_out: the rows that are evaluated during the training, [rows].
        labels: their labels.
        metrics: measured on them, with the embeddings that clients send for an `Evaluate`.
        loss: the run's loss. The driver uses it to judge what each client contributes.
        observe: called with every evaluation.
        checkpoint: saves the server's state; returns how many uploads of each client it holds.
        answer_timeout: seconds a client has to answer a request.
        best: keeps the head of the best evaluation, as the clients keep their models; None keeps nothing.
        tests: the rows that are measured only at the end; empty if the test rows are those in `held_out`.
        test_labels: their labels.
        most_rows: the most rows in one request: the answers must fit into messages.
        undo: undoes the effect of class weights on the outputs before they are measured.
        clock: seconds, for deadlines.

    Attributes:
        outputs: "validation" or "test" -> the head's outputs on these rows when they were last measured.
            `best` brings back those of the best evaluation, if it is given the same dictionary.
        tested: the metrics on the test rows, at the end; None if they are not known.
        waiting: what the run waits for, if it has made no update for a while; otherwise empty.
    """

    controller: RunController

    held_out: RowIds
    labels: Tensor
    metrics: Metrics
    loss: Loss
    observe: Callable[[Evaluation], None]
    checkpoint: Callable[[], list[int]]
    answer_timeout: float
    best: Best | None = None
    tests: RowIds = field(default_factory=lambda: NO_ROWS)
    test_labels: Tensor = field(default_factory=lambda: torch.empty(0))
    most_rows: int = 1 << 30
    undo: Calibration = field(default_factory=Calibration)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    tested: Figures | None = None
    waiting: str = ""
    clock: Callable[[], float] = time.monotonic
    _poll: Poll | None = None  # of the part of an evaluation that is under way
    _to_ask: list[RowIds] = field(default_factory=list)
    _answered: set[int] | None = None  # clients that have answered every part so far
    _last_update: tuple[int, float] = (0, 0.0)
    _asked_at: dict[int, float] = field(default_factory=dict)  # when each open request was first seen
    _joining_since: float | None = None
    _judged: int = 0  # the client to be judged next
    _reported: set[str] = field(default_factory=set)  # clients that the last evaluations lacked

    @property
    def measured(self) -> RowIds:
        """The rows measured last, by the models that the run ends with."""
        return self.tests if self.tested is not None else self.held_out

    def __call__(self, federation: FederationServer[Server]) -> list[ServerMessage]:
        """Do everything that is due now; return messages to send."""
        controller = self.controller
        if controller.phase is Phase.ENDED or (federation.began is None and not controller.interrupted):
            return []
        self._watch(federation)
        messages = self._expire(federation)
        if controller.is_checkpoint_due(federation.updates, self._lag(federation.server)):
            messages += self._save(federation)
        if self._poll is not None:
            if self._poll.is_open:
                return messages
            self._note_answers(self._poll)
            if self._to_ask:
                return messages + self._ask_next(federation)
            self._complete(federation)
        step = controller.next(federation, self._blocked(federation))
        if controller.end is not None:  # what is evaluated last is what is saved
            federation.server.end_steps()
            if step is Step.SAVE:
                messages += self._save(federation)
                controller.saved()
                self._finish(federation, controller.end)
        if step in (Step.EVALUATE, Step.TEST):
            messages += self._begin(federation, step)
        return messages

    def _finish(self, federation: FederationServer[Server], end: End) -> None:
        """End the run. Without a single update there is nothing to keep; otherwise the models are kept."""
        if not self.controller.has_result:
            federation.finish(f"{end.text}, but nothing was measured", failed=federation.updates == 0)
        else:
            federation.finish(end.text, failed=end.is_in_vain(federation.updates))

    def _blocked(self, federation: FederationServer[Server]) -> End | None:
        """Return why no step can be made any more; None if steps are possible."""
        server = federation.server
        if not server.over:
            return None
        if server.overdue:
            return End.of(Ending.CLIENTS_SILENT, clients=listed(server.overdue, federation.parties))
        return End.of(Ending.BUDGETS_SPENT)

    # --- an evaluation ---

    def _begin(self, federation: FederationServer[Server], step: Step) -> list[ServerMessage]:
        """Ask every client for the held-out rows, or for the test rows by the best models, if those are kept.

        If that must wait, return nothing: the controller returns the same step at the next call.
        """
        if self._must_wait_for_joins(federation):
            return []
        server, controller = federation.server, self.controller
        if not server.may_poll and controller.end is None:
            return []  # the clients of a secure sum are agreeing on keys
        self._answered = None
        if step is Step.TEST:
            controller.test_begun()
            if self.best is not None:
                self.best.restore()
            # The models no longer change, so many small answers give what one large answer would, and a
            # client needs less memory. During training, one poll must take as little time as possible.
            self._to_ask = in_parts(self.tests, min(self.most_rows, _TESTED_ROWS))
        else:
            controller.evaluation_begun()
            self._to_ask = in_parts(self.held_out, self.most_rows)
        if server.may_poll:
            return self._ask_next(federation)
        self._answered = set()
        self._complete(federation)
        return []

    def _must_wait_for_joins(self, federation: FederationServer[Server]) -> bool:
        """Return whether to wait for a client that is connected and about to join, so that it can answer."""
        if not federation.connections.keys() & federation.server.absent:
            self._joining_since = None
            return False
        now = self.clock()
        self._joining_since = now if self._joining_since is None else self._joining_since
        return now - self._joining_since < self.answer_timeout

    def _ask_next(self, federation: FederationServer[Server]) -> list[ServerMessage]:
        count = -1 if self.best is None else self.best.count
        self._poll = federation.server.poll(self._to_ask.pop(0), count, restore=self._is_testing)
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
        messages = server.expire(late)
        if silent := server.overdue - before:
            log.warning(
                "%s did not answer a request for %g s (network.answer_timeout): going on without",
                listed(silent, federation.parties),
                self.answer_timeout,
            )
            for client in silent:
                federation.vitals.silent(client, self.answer_timeout)
        return messages

    def _complete(self, federation: FederationServer[Server]) -> None:
        """Measure what was asked for, and report it to the controller."""
        if self._is_testing:
            self.tested, _ = self._measure(federation, self.tests, self.test_labels)
            self.controller.tested()
            return
        figures, unanswered = self._measure(federation, self.held_out, self.labels)
        if figures is None:
            self.controller.evaluated(federation, None)
            return
        bytes_up, bytes_down = federation.bytes_moved
        evaluation = Evaluation(
            seconds=federation.now,
            updates=federation.updates,
            bytes_up=bytes_up,
            bytes_down=bytes_down,
            train_loss=federation.server.losses.take_mean(),
            metric=figures[self.metrics.headline.name],
            metrics=figures,
            unanswered=unanswered,
        )
        was_ending = self.controller.end is not None
        if self.controller.evaluated(federation, evaluation) and self.best is not None:
            self.best.keep(evaluation)
        if (end := self.controller.end) and not was_ending:
            self._log_end(evaluation, end)
        self.observe(evaluation)

    @property
    def _is_testing(self) -> bool:
        return self.controller.phase is Phase.TESTING

    def _log_end(self, last: Evaluation, end: End) -> None:
        """Log why the run ends, and the figures of the models that are kept, which may not be the last."""
        kept = last if self.best is None or self.best.evaluation is None else self.best.evaluation
        rows = "validation" if len(self.tests) else "test"
        log.info(
            "the run ends: %s. It keeps the models of update %d of %d: %s %s",
            *(end.text, kept.updates, last.updates, rows, as_text(kept.metrics)),
        )

    @torch.no_grad()
    def _measure(
        self, federation: FederationServer[Server], rows: RowIds, labels: Tensor
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
        if server.may_stand_in and not self._is_testing:
            self._judge_clients(federation, rows[:_JUDGED_ROWS], inputs[:_JUDGED_ROWS], labels[:_JUDGED_ROWS])
        outputs = server.head(torch.from_numpy(inputs))
        self.outputs["validation" if len(self.tests) and not self._is_testing else "test"] = outputs
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
        self, federation: FederationServer[Server], rows: RowIds, inputs: Matrix, labels: Tensor
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

    def _lag(self, server: Server) -> int:
        """Return how many uploads of one client the last checkpoint lacks, at most.

        A skipped upload makes no update. What a crash loses must stay bounded all the same: a restored server
        accepts a client's claim of that many uploads and no more. LARGEST_WINDOW uploads of a client can be
        waiting for a step, and no checkpoint holds those.
        """
        lags = (made - kept for made, kept in zip(server.activations, server.durable, strict=True))
        return max(lags) - LARGEST_WINDOW

    def _save(self, federation: FederationServer[Server]) -> list[ServerMessage]:
        self.controller.checkpointed(federation.updates)
        return list(federation.server.made_durable(self.checkpoint()))

    def _watch(self, federation: FederationServer[Server]) -> None:
        """Log what the run waits for if it has made no update for a while: it must not hang silently."""
        updates, since = self._last_update
        now = self.clock()
        if federation.updates != updates or not since:
            self._last_update, self.waiting = (federation.updates, now), ""
        elif now - since > _SILENCE:
            self.waiting = federation.server.waiting_for(federation.parties)
            log.warning("no update for %.0f s: waiting for %s", now - since, self.waiting)
            self._last_update = (updates, now)
