"""When a run in one process is evaluated, and its final models."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.federation import parameters, run_of, same, vertical_data
from vafl.config.run_settings import EvaluationSettings, StopSettings
from vafl.data.split import Parts
from vafl.errors import ConfigError, Stalled
from vafl.models.metrics import Metrics
from vafl.protocol.losslog import LossLog
from vafl.run.controller import Ending, Phase
from vafl.run.evaluator import Evaluator
from vafl.run.simulation_driver import CentralisedRuntime, SimulationDriver
from vafl.transport.traffic import Traffic


class Script:
    """A runtime that follows a script: a list of (seconds, updates) to reach."""

    def __init__(self, *moments):
        self.now, self.updates, self.losses = 0.0, 0, LossLog()
        self.traffic = [Traffic(), Traffic()]
        self.settled, self.over, self.stalled = [], False, ""
        self._moments = iter(moments)

    def advance(self):
        self.now, self.updates = next(self._moments)
        self.losses.note(float(self.updates))
        self.traffic[0].bytes_up += 10
        self.traffic[1].bytes_down += 1

    def settle(self):
        self.settled.append(self.updates)


def history(runtime, stop, evaluation, values=None, name="accuracy"):
    """Return the (seconds, updates) at which a run was evaluated; `values` are the metrics it measures."""
    values = iter(values) if values else iter(lambda: 0.5, None)
    seen, metrics = [], Metrics.of("softmax", 3, name, name)
    driver = SimulationDriver(
        runtime, lambda: {metrics.headline.name: next(values)}, metrics, stop, evaluation, seen.append
    )
    driver.train()
    assert driver.controller.phase is Phase.ENDED
    assert seen == driver.evaluations
    return seen


def driven(runtime, evaluate, observe=lambda evaluation: None, best=None):
    """Return a driver for 6 updates with an evaluation every 3."""
    stop, metrics = StopSettings(updates=6), Metrics.of("softmax", 3)
    return SimulationDriver(runtime, evaluate, metrics, stop, EvaluationSettings(every=3), observe, best)


def moments(points):
    return [(point.seconds, point.updates) for point in points]


def counting(updates):
    return Script(*[(float(k), k) for k in range(1, updates + 1)])


def test_a_run_is_measured_at_the_start_at_intervals_and_at_the_end():
    found = history(counting(100), StopSettings(updates=7), EvaluationSettings(every=3))
    assert moments(found) == [(0, 0), (3, 3), (6, 6), (7, 7)]


def test_the_last_measure_is_not_taken_twice():
    found = history(counting(100), StopSettings(updates=6), EvaluationSettings(every=3))
    assert moments(found) == [(0, 0), (3, 3), (6, 6)]


def test_the_last_measure_is_taken_once_everything_has_settled():
    script, seen = counting(100), []

    def measured():
        seen.append((script.updates, list(script.settled)))
        return {"accuracy": 0.5, "log_loss": 0.5}

    driven(script, measured).train()
    assert seen == [(0, []), (3, []), (6, [6])]


def test_steps_that_come_many_at_once_do_not_shift_the_intervals():
    script = Script((1.0, 2), (2.0, 5), (3.0, 5), (4.0, 6), (5.0, 8), (6.0, 9))
    found = history(script, StopSettings(updates=9), EvaluationSettings(every=3))
    assert moments(found) == [(0, 0), (2, 5), (4, 6), (6, 9)]


def test_intervals_may_be_seconds():
    script = Script((0.4, 1), (0.9, 2), (1.1, 3), (1.9, 4), (3.5, 5), (3.6, 6))
    found = history(script, StopSettings(updates=6), EvaluationSettings(every_seconds=1.0))
    assert moments(found) == [(0, 0), (1.1, 3), (3.5, 5), (3.6, 6)]


def test_a_run_stops_by_the_clock():
    found = history(counting(100), StopSettings(updates=50, seconds=4.0), EvaluationSettings(every=100))
    assert moments(found) == [(0, 0), (4, 4)]


@pytest.mark.parametrize(
    ("name", "values", "target"),
    [("accuracy", [0.1, 0.5, 0.8, 0.9], 0.8), ("loss", [3.0, 2.0, 0.5, 0.1], 0.5)],
)
def test_a_run_stops_when_it_is_good_enough(name, values, target):
    stop = StopSettings(updates=100, metric=target)
    found = history(counting(100), stop, EvaluationSettings(every=10), values, name)
    assert moments(found) == [(0, 0), (10, 10), (20, 20)]
    assert found[-1].metric == target


def test_what_was_good_enough_is_what_the_run_ends_with():
    """At that time, answers are under way that would change the models once more."""
    seen: list[list[torch.Tensor]] = []
    delays = {"kind": "fixed", "seconds": [1.0, 1.0], "latency": 0.3}
    run = run_of(delays=delays, evaluation={"every": 1}, stop={"updates": 50, "metric": 0.5})
    points = run.train(lambda point: seen.append(parameters(run)))
    assert 1 < len(points) < 50
    assert same(parameters(run), seen[-1])


@pytest.mark.parametrize(
    ("name", "values"),
    [("accuracy", [0.1, 0.5, 0.5, 0.4, 0.6, 0.2, 0.6, 0.3, 0.9]), ("loss", [9, 5, 5, 6, 4, 7, 4, 8, 1])],
)
def test_a_run_stops_after_so_many_evaluations_that_are_no_better(name, values):
    stop = StopSettings(updates=100, patience=3)
    found = history(counting(100), stop, EvaluationSettings(every=10), values, name)
    assert [point.metric for point in found] == values[:-1]  # as good as the best is no better


@pytest.mark.parametrize("rule", ["async", "sync", "centralised"])
def test_patience_keeps_the_models_of_the_best_evaluation(rule):
    run = run_of(rule={"name": rule}, evaluation={"every": 5}, stop={"updates": 1000})
    data = replace(run.config.data, validation_fraction=0.1)
    run.config = replace(run.config, data=data, stop=StopSettings(updates=1000, patience=2))
    seen: list[list[torch.Tensor]] = []
    points = run.train(lambda point: seen.append(parameters(run)))
    best = min(range(len(points)), key=lambda place: points[place].metrics["log_loss"])
    assert best == len(points) - 3
    assert run.best.evaluation is points[best]
    assert same(parameters(run), seen[best])
    assert not same(seen[-1], seen[best])


class Interrupted(Script):
    """A runtime that Ctrl-C stops before its fifth update."""

    def advance(self):
        if self.updates == 4:
            raise KeyboardInterrupt
        super().advance()


FIGURES = {"accuracy": 0.5, "log_loss": 0.5}


def test_an_interrupted_run_is_evaluated_once_more_without_waiting_for_messages():
    script, seen = Interrupted(*[(float(k), k) for k in range(1, 7)]), []
    driver = driven(script, lambda: FIGURES, seen.append)
    with pytest.raises(KeyboardInterrupt):
        driver.train()
    assert moments(seen) == [(0, 0), (3, 3), (4, 4)]
    assert script.settled == []
    assert driver.controller.end.reason is Ending.INTERRUPTED


def test_an_interrupted_evaluation_is_made_again():
    calls = []

    def evaluate():
        calls.append(True)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return FIGURES

    driver = driven(counting(6), evaluate)
    with pytest.raises(KeyboardInterrupt):
        driver.train()
    assert moments(driver.evaluations) == [(0, 0), (3, 3)]
    assert driver.controller.phase is Phase.ENDED


def test_a_second_interrupt_ends_a_run_without_another_evaluation():
    def evaluate():
        raise KeyboardInterrupt

    driver = driven(counting(6), evaluate)
    with pytest.raises(KeyboardInterrupt):
        driver.train()
    assert driver.evaluations == []
    assert driver.controller.end.reason is Ending.INTERRUPTED


def test_a_run_that_stalls_has_failed():
    script = counting(6)
    script.stalled = "all clients are gone"
    driver = driven(script, lambda: FIGURES)
    with pytest.raises(Stalled, match=r"VFL-7051.*all clients are gone"):
        driver.train()
    assert driver.controller.end.reason is Ending.FAILED


def test_a_run_whose_clients_have_spent_their_budgets_ends():
    script = counting(6)
    script.over = True
    driver = driven(script, lambda: FIGURES)
    driver.train()
    assert driver.controller.end.reason is Ending.BUDGETS_SPENT
    assert script.settled == [0]


def test_a_point_holds_losses_and_bytes_so_far():
    found = history(counting(100), StopSettings(updates=4), EvaluationSettings(every=2))
    assert [point.train_loss for point in found] == [None, 1.5, 3.5]
    assert [(point.bytes_up, point.bytes_down) for point in found] == [(0, 0), (20, 2), (40, 4)]


# --- the evaluator ---


@pytest.mark.parametrize("summed", [True, False])
def test_the_evaluator_measures_the_whole_model_on_the_test_rows(summed):
    models = [nn.Linear(2, 3), nn.Linear(4, 3)]
    features = [torch.randn(5, 2), torch.randn(5, 4)]
    head = nn.Linear(3 if summed else 6, 2)
    labels = torch.tensor([0, 1, 0, 1, 1])
    evaluator = Evaluator(
        models, features, head, labels, Metrics.of("softmax", 2), Parts(0, test=len(labels)), summed=summed
    )
    parts = [model(own) for model, own in zip(models, features, strict=True)]
    expected = head(parts[0] + parts[1] if summed else torch.cat(parts, 1))
    assert torch.allclose(evaluator.outputs(features), expected)
    assert not evaluator.outputs(features).requires_grad
    assert evaluator()["accuracy"] == pytest.approx((expected.argmax(1) == labels).float().mean().item())
    assert evaluator()["log_loss"] == pytest.approx(cross_entropy(expected, labels).item())


def test_modules_are_evaluated_without_dropout_and_train_on_with_it():
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.9))
    head, features = nn.Identity(), [torch.randn(50, 2)]
    evaluator = Evaluator(
        [model], features, head, torch.zeros(50), Metrics.of("softmax", 3), Parts(0, test=50), summed=True
    )
    assert torch.equal(evaluator.outputs(features), model[0](features[0]))
    assert model.training
    assert head.training


def test_the_centralised_clock_stands_still():
    run = run_of(vertical_data(), rule={"name": "centralised"}, stop={"updates": 15})
    points = run.train()
    assert isinstance(run.runtime, CentralisedRuntime)
    assert [(point.seconds, point.updates, point.bytes_up) for point in points] == [
        (0, 0, 0),
        (0, 10, 0),
        (0, 15, 0),
    ]
    assert points[1].train_loss is not None
    assert run.delays() == []


# --- settings ---


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_times_are_numbers(value):
    with pytest.raises(ConfigError, match=rf"stop.seconds must be above 0, or 0 for no limit. Found {value}"):
        StopSettings(seconds=value)
    with pytest.raises(ConfigError, match=rf"evaluation.every_seconds must be 0 or more. Found {value}"):
        EvaluationSettings(every_seconds=value)


def test_counts_are_positive():
    with pytest.raises(ConfigError, match=r"VFL-1002.*\-1"):
        StopSettings(updates=-1)
    with pytest.raises(ConfigError, match=r"VFL-1005.*\-1"):
        EvaluationSettings(every=-1)


def test_a_target_is_a_number():
    with pytest.raises(ConfigError, match=r"VFL-1004.*nan"):
        StopSettings(metric=math.nan)
