"""When a networked run is looked at, and when it ends, without a network."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vafl.models.losses import metric
from vafl.protocol.losslog import LossLog
from vafl.protocol.table import FOREVER
from vafl.runtime.grpc.conductor import Conductor
from vafl.runtime.settings import EvaluationSettings, StopSettings
from vafl.runtime.training import BUDGETS_SPENT, Watch


class Federation:
    """A server whose clients answer at once; its metric is what `table` says."""

    def __init__(self, values):
        self.began, self.updates, self.now, self.traffic, self.parties = 0.0, 0, 0.0, [], ["a", "b"]
        self.asked, self.reason, self._values = [], "", iter(values)
        self.seen, self.heard, self.looks = {0, 1}, [True, True], 0
        self.connections = {}
        table = SimpleNamespace(
            read=lambda rows: np.full((len(rows), 1), next(self._values), np.float32),
            delays=self._delays,
        )
        self.server = SimpleNamespace(
            absent=set(),
            activations=[0, 0],
            iteration=0,
            head=lambda outputs: outputs,
            table=table,
            losses=LossLog(),
            over=False,
            last_iteration=0,
            ask_everyone=self._ask,
            has_answers=lambda requests: True,
            made_durable=lambda counts: [],
        )

    def _delays(self, rows, _):
        self.looks += 1
        return np.where(self.heard, 5, FOREVER)[None].repeat(len(rows), 0)

    def _ask(self, rows, best, *, back):
        self.asked.append((rows.tolist(), best, back))
        return [SimpleNamespace()]

    def finish(self, reason, *, failed):
        self.reason, self.failed = reason, failed


def conductor(points, stop, evaluation, best=None):
    measured = metric("accuracy", "binary")
    return Conductor(
        held_out=np.array([4, 5]),
        labels=torch.ones(2),
        metric=measured,
        stop=stop,
        watch=Watch(stop, measured, best),
        evaluation=evaluation,
        observe=points.append,
        checkpoint=list,
        checkpoint_every=1000,
        tests=np.array([6, 7, 8]),
        test_labels=torch.ones(3),
    )


def test_without_new_updates_evaluations_keep_their_distance():
    points, federation = [], Federation([1.0] * 10)
    conduct = conductor(points, StopSettings(updates=100), EvaluationSettings(every_seconds=1.0))
    for moment in (0.0, 0.1, 0.2, 0.3, 1.2, 1.3, 1.4, 2.5, 2.6):
        federation.now = moment
        conduct(federation)
    assert federation.asked == [([4, 5], -1, False)] * 3
    assert len(points) == 3


def test_a_client_that_has_said_nothing_yet_is_not_measured_by_zeros(caplog):
    """Nobody is asked while it is gone; what it could not answer is not recorded, and the run goes on."""
    points, federation = [], Federation([1.0] * 10)
    conduct = conductor(points, StopSettings(updates=30), EvaluationSettings(every=10))
    federation.heard, federation.server.absent = [True, False], {1}
    for _ in range(3):
        assert conduct(federation) == []
    assert caplog.text.count("no evaluation before b is here") == 1
    assert federation.looks == 1  # each costs what there are rows held out
    federation.server.absent = set()
    conduct(federation)  # asked, and then it leaves without an answer
    conduct(federation)
    assert (len(federation.asked), points) == (1, [])
    assert "no answer from b" in caplog.text
    federation.heard, federation.server.absent, federation.updates = [True, True], {1}, 10
    for _ in range(2):  # gone, but what it said last is known
        conduct(federation)
    assert [point.updates for point in points] == [10]


@pytest.mark.parametrize(
    ("seen", "activations", "measured"), [({0, 1}, 0, False), ({0}, 3, False), ({0}, 0, True)]
)
def test_a_run_ends_without_a_result_unless_those_who_lack_never_came(seen, activations, measured):
    points, federation = [], Federation([1.0] * 10)
    conduct = conductor(points, StopSettings(updates=30), EvaluationSettings(every=10))
    federation.heard, federation.server.absent, federation.updates = [True, False], {1}, 30
    federation.seen, federation.server.activations = seen, [9, activations]
    for _ in range(6):
        conduct(federation)
    assert federation.reason == f"30 updates were made{'' if measured else ', but nothing was measured'}"
    assert (len(points), conduct.tested is not None, federation.failed) == (measured, measured, not measured)


def test_budgets_that_allow_no_step_are_no_result():
    points, federation = [], Federation([1.0] * 10)
    conduct = conductor(points, StopSettings(updates=30), EvaluationSettings(every=10))
    federation.server.over = True
    for _ in range(6):
        conduct(federation)
    assert (len(points), federation.reason, federation.failed) == (1, BUDGETS_SPENT, True)


def test_a_run_resumed_at_its_end_is_measured_with_those_who_are_about_to_join(caplog):
    points, federation = [], Federation([1.0] * 10)
    conduct = conductor(points, StopSettings(updates=30), EvaluationSettings(every=10))
    federation.heard, federation.server.absent, federation.updates = [True, False], {1}, 30
    federation.connections[1] = "its stream, on which it has yet to join"
    for _ in range(3):
        conduct(federation)
    assert not caplog.text
    federation.heard, federation.server.absent = [True, True], set()
    for _ in range(6):
        conduct(federation)
    assert (len(points), federation.reason) == (1, "30 updates were made")


class Kept:
    """Takes note of what is kept, and of what was measured when it was taken up again."""

    def __init__(self):
        self.point, self.count, self.restored = None, 0, 0

    def keep(self, point):
        self.point, self.count = point, self.count + 1

    def restore(self):
        self.restored += 1


def test_patience_ends_a_run_and_only_then_are_the_test_rows_asked_for_by_the_best_models(caplog):
    caplog.set_level("INFO")
    points, best, federation = [], Kept(), Federation([-1.0, 1.0, 1.0, -1.0, 1.0])
    conduct = conductor(points, StopSettings(updates=100, patience=2), EvaluationSettings(every=10), best)
    for updates in (0, 10, 20, 30):
        federation.updates = updates
        for _ in range(3):
            conduct(federation)
    counts = [count for _, count, _ in federation.asked]
    assert counts == [0, 1, 2, 2, 2]
    assert [(rows, back) for rows, _, back in federation.asked] == [([4, 5], False)] * 4 + [([6, 7, 8], True)]
    assert [point.metric for point in points] == [0.0, 1.0, 1.0, 0.0]
    assert (best.point, best.restored) == (points[1], 1)
    assert federation.server.last_iteration == 30
    assert conduct.tested == 1.0
    assert federation.reason == "accuracy has not been better for 2 evaluations"
    assert "the run ends with accuracy 0.0000" in caplog.text


def test_clients_are_told_no_figure_of_the_held_out_labels(caplog):
    caplog.set_level("INFO")
    points, federation = [], Federation([1.0, 1.0])
    conduct = conductor(points, StopSettings(updates=100, metric=0.3), EvaluationSettings(every=10))
    for _ in range(3):
        conduct(federation)
    assert points[-1].metric == 1.0
    assert federation.reason == "accuracy is what stop.metric asks for"
    assert "the run ends with accuracy 1.0000" in caplog.text
