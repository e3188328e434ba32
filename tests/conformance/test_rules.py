"""Every update rule, order, delay bound and refresh policy trains a model and keeps its guarantees."""

import pytest

from tests.federation import parameters, same
from vafl.config import from_document
from vafl.data.partition import partition
from vafl.data.public import load
from vafl.data.settings import DataSettings, PartitionSettings
from vafl.data.split import Split
from vafl.run.assembly import Run, build

pytestmark = pytest.mark.no_cover  # many runs of the same lines
CLIENTS = 3
GOOD = 0.85  # logistic regression on digits ends near 0.95; ten classes, so guessing gives 0.1
DIGITS, HALF = load(DataSettings()), DataSettings(test_fraction=0.5)
DATA = partition(DIGITS, Split.of_dataset(DIGITS, HALF, 0), PartitionSettings(clients=CLIENTS))


def digits(rule, refresh, **delays) -> Run:
    return build(
        from_document(
            {
                "rule": rule,
                "schedule": {"batch_size": 100, "refresh": refresh},
                "optimiser": {"step_size": 1.0},
                "delays": {"kind": "poisson", **delays},
                "stop": {"updates": 400, "metric": GOOD},
                "evaluation": {"every": 10},
            }
        ),
        DATA,
    )


@pytest.mark.parametrize("refresh", ["none", "random:200", "all", "lookahead"])
@pytest.mark.parametrize("bound", [0, 8])
@pytest.mark.parametrize("order", ["upload-first", "query-first"])
@pytest.mark.parametrize("name", ["async", "t-sync", "sync"])
def test_digits_are_learnt(name, order, bound, refresh):
    run = digits({"name": name, "order": order, "delay_bound": bound}, refresh)
    points = run.train()
    assert points[0].metric < 0.4
    assert points[-1].metric >= GOOD
    assert points[-1].train_loss < points[1].train_loss
    if bound:
        assert max(summary.max for summary in run.delays()) <= bound
        assert sum(summary.never + summary.over_bound for summary in run.delays()) == 0


@pytest.mark.parametrize("policy", ["wait", "skip", "use"])
@pytest.mark.parametrize("name", ["async", "t-sync", "sync"])
def test_digits_are_learnt_though_clients_come_and_go(name, policy):
    rule = {"name": name, "delay_bound": 8, "when_unanswered": policy}
    windows = [{"client": 1, "start": 2.0, "end": 6.0}, {"client": 3, "start": 8.0, "end": 10.0}]
    run = digits(rule, "lookahead", latency=0.01, dropouts=windows)
    assert run.train()[-1].metric >= GOOD
    assert policy == "use" or max(summary.max for summary in run.delays()) <= 8


@pytest.mark.parametrize("rule", [{"start": "upload"}, {"local_steps": 3}], ids=str)
def test_digits_are_learnt_with_the_other_switches(rule):
    run = digits(rule, "lookahead")
    assert run.train()[-1].metric >= GOOD
    if "start" in rule:
        assert sum(summary.never for summary in run.delays()) <= 100 * CLIENTS * 2


def test_the_ceiling():
    run = digits({"name": "centralised"}, "none")
    assert run.train()[-1].metric >= GOOD


def test_a_history_repeats_itself():
    runs = [digits({"name": "async"}, "lookahead") for _ in range(2)]
    assert runs[0].train() == runs[1].train()
    assert same(parameters(runs[0]), parameters(runs[1]))
