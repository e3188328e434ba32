"""When a networked run is evaluated and when it ends, tested without a network."""

import time
from types import SimpleNamespace

import numpy as np
import torch

from vafl.config.run_settings import EvaluationSettings, StopSettings
from vafl.models.losses import LOSSES
from vafl.models.metrics import Metrics
from vafl.protocol.losslog import LossLog
from vafl.protocol.requests import Poll
from vafl.run.controller import Ending, RunController
from vafl.run.network_driver import NetworkDriver


class Federation:
    """A server with two clients that answer immediately; the head's input is the next of `values`.

    Attributes:
        asked: the rows, best count and restore flag of each evaluation asked for.
        answering: the clients that answer; a poll is open until each one asked has answered or expired.
        unsent: the clients that have never sent the rows.
    """

    def __init__(self, values):
        self.began, self.updates, self.now, self.traffic, self.parties = 0.0, 0, 0.0, [], ["a", "b"]
        self.asked, self.reason, self._values = [], "", iter(values)
        self.answering, self.unsent, self.expired = {0, 1}, set(), []
        self.connections = {}
        self.bytes_moved = (0, 0)
        self.judged, self.silent = [], []
        self.vitals = SimpleNamespace(
            evaluated=lambda loss, without: self.judged.append((loss, without)),
            silent=lambda client, seconds: self.silent.append(client),
        )
        self.server = SimpleNamespace(
            absent=set(),
            overdue=set(),
            activations=[0, 0],
            durable=[0, 0],
            iteration=0,
            head=lambda outputs: outputs,
            table=SimpleNamespace(
                read_filled=self._read, without=lambda client, rows, inputs: inputs - client
            ),
            losses=LossLog(),
            over=False,
            end_steps=self._end_steps,
            may_poll=True,
            may_stand_in=True,
            open_requests=set(),
            poll=self._ask,
            expire=self._expire,
            made_durable=lambda counts: [],
            waiting_for=lambda names: "uploads",
        )

    def _read(self, rows):
        inputs = np.full((len(rows), 1), next(self._values), np.float32)
        return inputs, dict.fromkeys(self.unsent, rows)

    def _ask(self, rows, best, *, restore):
        self.asked.append((rows.tolist(), best, restore))
        present = {0, 1} - self.server.absent - self.server.overdue
        self.server.open_requests = present - self.answering
        self._poll = Poll([SimpleNamespace()] * len(present), set(self.server.open_requests))
        self._poll.answered |= present & self.answering
        return self._poll

    def _expire(self, numbers):
        self.expired += numbers
        self.server.overdue |= set(numbers)
        self.server.open_requests = set()
        self._poll.waiting.clear()
        return []

    def _end_steps(self):
        self.last_step = self.updates

    def finish(self, reason, *, failed):
        self.reason, self.failed = reason, failed


def driver(points, stop, evaluation, best=None):
    metrics = Metrics.of("binary", 1, headline="accuracy", select="accuracy")
    return NetworkDriver(
        controller=RunController(stop, evaluation, metrics, has_test_rows=True, checkpoint_every=1000),
        best=best,
        held_out=np.array([4, 5]),
        labels=torch.ones(2),
        metrics=metrics,
        loss=LOSSES["binary"],
        observe=points.append,
        checkpoint=list,
        answer_timeout=60.0,
        tests=np.array([6, 7, 8]),
        test_labels=torch.ones(3),
    )


def test_without_new_updates_evaluations_keep_their_distance():
    points, federation = [], Federation([1.0] * 10)
    drive = driver(points, StopSettings(updates=100), EvaluationSettings(every_seconds=1.0))
    for moment in (0.0, 0.1, 0.2, 0.3, 1.2, 1.3, 1.4, 2.5, 2.6):
        federation.now = moment
        drive(federation)
    assert federation.asked == [([4, 5], -1, False)] * 3
    assert len(points) == 3


def test_a_client_that_does_not_answer_holds_up_no_evaluation(caplog):
    """Its request expires. Its last embeddings or its default are used, and the evaluation records this."""
    caplog.set_level("INFO")
    points, federation = [], Federation([1.0] * 10)
    drive = driver(points, StopSettings(updates=100), EvaluationSettings(every=10))
    moment, federation.answering, federation.unsent = [0.0], {0}, {1}
    drive.clock = lambda: moment[0]
    drive(federation)
    moment[0] = 59.0
    drive(federation)
    assert (points, federation.expired) == ([], [])
    moment[0] = 61.0
    drive(federation)
    assert federation.expired == [1]
    assert [point.unanswered for point in points] == [{"b": "default"}]
    assert "b did not answer a request for 60 s" in caplog.text
    assert federation.silent == [1]
    federation.updates, federation.unsent = 10, set()
    for _ in range(2):  # not asked again before it answers, so nothing waits for it
        drive(federation)
    assert points[-1].unanswered == {"b": "last"}
    federation.updates, federation.answering, federation.server.overdue = 20, {0, 1}, set()
    for _ in range(2):
        drive(federation)
    assert points[-1].unanswered == {}
    assert [point.updates for point in points] == [0, 10, 20]
    assert "every client answers evaluations again from update 20 on" in caplog.text
    assert "nobody" not in caplog.text


def test_evaluations_measure_the_loss_with_and_without_each_client():
    federation = Federation([1.0] * 10)
    drive = driver([], StopSettings(updates=100), EvaluationSettings(every=10))
    for _ in range(2):
        drive(federation)
    ((loss, without),) = federation.judged
    assert without.keys() == {0, 1}
    assert without[0] == loss < without[1]  # client 1 of the fake adds 1 to the head's input


def test_a_client_that_is_gone_holds_up_no_evaluation():
    points, federation = [], Federation([1.0] * 10)
    drive = driver(points, StopSettings(updates=100), EvaluationSettings(every=10))
    federation.server.absent, federation.unsent = {1}, {1}
    for _ in range(2):
        drive(federation)
    assert [point.unanswered for point in points] == [{"b": "default"}]


def test_a_run_with_updates_keeps_its_models_though_nothing_could_be_measured():
    points, federation = [], Federation([1.0] * 10)
    drive = driver(points, StopSettings(updates=30), EvaluationSettings(every=10))
    federation.updates, federation.unsent, federation.server.absent = 30, {0, 1}, {0, 1}
    for _ in range(6):
        drive(federation)
    assert drive.controller.end.reason is Ending.UPDATES
    assert not drive.controller.has_result
    assert not federation.failed
    assert points == []


def test_a_run_without_updates_and_evaluations_has_failed():
    federation = Federation([1.0] * 10)
    drive = driver([], StopSettings(seconds=5.0), EvaluationSettings(every=10))
    federation.now, federation.unsent, federation.server.absent = 6.0, {0, 1}, {0, 1}
    for _ in range(6):
        drive(federation)
    assert federation.failed


def test_a_secure_sum_that_lacks_a_client_is_not_measured():
    points, federation = [], Federation([1.0] * 10)
    drive = driver(points, StopSettings(updates=100), EvaluationSettings(every=10))
    federation.server.may_poll = federation.server.may_stand_in = False
    for _ in range(3):
        drive(federation)
    assert federation.asked == []  # keys are being agreed on
    federation.server.may_poll, federation.unsent, federation.answering = True, {1}, {0}
    drive(federation)
    drive.clock = lambda: time.monotonic() + 61.0
    drive(federation)
    assert points == []


def test_a_run_that_a_silent_client_has_stopped_ends_and_names_it():
    points, federation = [], Federation([1.0] * 10)
    drive = driver(points, StopSettings(updates=30), EvaluationSettings(every=10))
    federation.updates, federation.server.over, federation.server.overdue = 12, True, {1}
    for _ in range(6):
        drive(federation)
    assert drive.controller.end.reason is Ending.CLIENTS_SILENT
    assert federation.reason == drive.controller.end.text
    assert " b " in federation.reason
    assert not federation.failed


def test_uploads_that_make_no_step_call_for_a_checkpoint_too():
    """A crash must not lose more uploads of a client than a restored server accepts in its join."""
    federation, saved = Federation([1.0] * 10), []
    drive = driver([], StopSettings(updates=30), EvaluationSettings(every=10))
    drive.checkpoint = lambda: saved.append(True) or [0, 1100]
    federation.server.activations = [0, 1063]
    drive(federation)
    assert not saved
    federation.server.activations = [0, 1064]
    drive(federation)
    assert saved


def test_budgets_that_allow_no_step_are_no_result():
    points, federation = [], Federation([1.0] * 10)
    drive = driver(points, StopSettings(updates=30), EvaluationSettings(every=10))
    federation.server.over = True
    for _ in range(6):
        drive(federation)
    assert (len(points), drive.controller.end.reason) == (1, Ending.BUDGETS_SPENT)
    assert federation.failed


def test_a_run_resumed_at_its_end_is_measured_with_those_who_are_about_to_join(caplog):
    points, federation = [], Federation([1.0] * 10)
    drive = driver(points, StopSettings(updates=30), EvaluationSettings(every=10))
    federation.server.absent, federation.updates = {1}, 30
    federation.connections[1] = "its stream, on which it has yet to join"
    for _ in range(3):
        drive(federation)
    assert not caplog.text
    federation.server.absent = set()
    for _ in range(6):
        drive(federation)
    assert [point.unanswered for point in points] == [{}]
    assert (drive.controller.end.reason, federation.reason) == (Ending.UPDATES, "30 updates were made")


def test_a_stream_on_which_nobody_joins_holds_up_no_evaluation():
    points, federation, moment = [], Federation([1.0] * 10), [0.0]
    drive = driver(points, StopSettings(updates=30), EvaluationSettings(every=10))
    drive.clock = lambda: moment[0]
    federation.server.absent = {1}
    federation.connections[1] = "a stream on which nobody joins"
    drive(federation)
    assert points == []
    moment[0] = 61.0
    for _ in range(2):
        drive(federation)
    assert len(points) == 1


class Kept:
    """Records what is kept, and the evaluation when it was restored."""

    def __init__(self):
        self.evaluation, self.count, self.restored = None, 0, 0

    def keep(self, evaluation):
        self.evaluation, self.count = evaluation, self.count + 1

    def restore(self):
        self.restored += 1


def test_patience_ends_a_run_and_only_then_are_the_test_rows_asked_for_by_the_best_models(caplog):
    caplog.set_level("INFO")
    points, best, federation = [], Kept(), Federation([-1.0, 1.0, 1.0, -1.0, 1.0])
    drive = driver(points, StopSettings(updates=100, patience=2), EvaluationSettings(every=10), best)
    for updates in (0, 10, 20, 30):
        federation.updates = updates
        for _ in range(3):
            drive(federation)
    counts = [count for _, count, _ in federation.asked]
    assert counts == [0, 1, 2, 2, 2]
    assert [(rows, restore) for rows, _, restore in federation.asked] == [([4, 5], False)] * 4 + [
        ([6, 7, 8], True)
    ]
    assert [point.metric for point in points] == [0.0, 1.0, 1.0, 0.0]
    assert (best.evaluation, best.restored) == (points[1], 1)
    assert federation.last_step == 30
    assert drive.tested["accuracy"] == 1.0
    assert drive.controller.end.reason is Ending.NO_IMPROVEMENT
    (end,) = [each.getMessage() for each in caplog.records if "the run ends" in each.getMessage()]
    assert "update 10 of 30" in end
    assert "validation" in end
    assert "accuracy 1.0000" in end
    assert "0.0000" not in end  # the accuracy of the last models, which are not kept


def test_clients_are_told_no_figure_of_the_held_out_labels(caplog):
    caplog.set_level("INFO")
    points, federation = [], Federation([1.0, 1.0])
    drive = driver(points, StopSettings(updates=100, metric=0.3), EvaluationSettings(every=10))
    for _ in range(3):
        drive(federation)
    assert points[-1].metric == 1.0
    assert "update 0 of 0" in caplog.text
    assert drive.controller.end.reason is Ending.METRIC_REACHED
    assert not any(letter.isdigit() for letter in federation.reason)
    assert "accuracy 1.0000" in caplog.text
