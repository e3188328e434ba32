"""The expected usage of a configuration against its simulation."""

import pytest

from tests.federation import run_of, vertical_data
from vafl.commands.expected_usage import expected_activations, expected_usages
from vafl.config import from_document
from vafl.errors import ConfigError
from vafl.run.plan import make_plan


@pytest.mark.no_cover
@pytest.mark.parametrize("rule", [{"name": "async"}, {"name": "t-sync", "t": 2}, {"name": "sync"}])
@pytest.mark.parametrize(
    "delays",
    [
        {"kind": "poisson"},
        {"kind": "exponential"},
        {"kind": "none"},
        {"kind": "fixed", "seconds": [1.0, 2.0, 8.0]},
    ],
)
def test_activations_are_shared_out_as_the_simulator_does(rule, delays):
    run = run_of(
        vertical_data(60, 3, (2,)),
        rule=rule,
        delays=delays,
        stop={"updates": 300},
        evaluation={"every": 10**6},
    )
    run.train()
    expected = expected_activations(run.config, 3)
    for counted, planned in zip(run.runtime.server.activations, expected, strict=True):
        assert planned == pytest.approx(counted, rel=0.25, abs=2)


def test_a_limit_of_seconds_counts_if_it_comes_first():
    run = run_of(
        vertical_data(60, 3, (2,)), delays={"kind": "fixed"}, stop={"updates": 10**6, "seconds": 120.0}
    )
    run.train()
    assert expected_activations(run.config, 3) == pytest.approx([120, 60, 40])
    assert run.runtime.server.activations == pytest.approx([120, 60, 40], abs=1)


def plan(**sections):
    return make_plan(from_document({"data": {"name": "iris"}, "partition": {"clients": 2}, **sections}))


def test_epochs_are_taken_at_their_word():
    found = expected_usages(plan(schedule={"batch_size": 16}), epochs=5)
    assert [course.activations for course in found] == [35, 35]  # 112 rows are 7 batches
    assert found[0].others == (35,)


def test_the_rest_of_the_configuration_arrives():
    rule = {"start": "upload", "delay_bound": 4, "local_steps": 2}
    schedule = {"batch_size": 16, "refresh": "random:20", "kind": "iid"}
    one, _ = expected_usages(
        plan(rule=rule, schedule=schedule, stop={"updates": 100}, evaluation={"every": 25})
    )
    assert (one.full_start, one.delay_bound, one.local_steps) == (True, True, 2)
    assert (one.refresh, one.refresh_rows, one.kind) == ("random", 20, "iid")
    assert (one.rows, one.held_out, one.evaluations) == (112, 38, 5)  # at 0, 25, 50, 75 and 100


def test_validation_rows_are_what_is_evaluated():
    data = {"name": "iris", "validation_fraction": 0.1}
    assert expected_usages(plan(data=data, schedule={"batch_size": 16}))[0].held_out == 15


def test_nothing_is_refreshed_in_sync():
    one, _ = expected_usages(plan(rule={"name": "sync"}, stop={"updates": 100}))
    assert (one.refresh, one.activations) == ("none", 100)


def test_evaluations_by_the_clock():
    sections = {"delays": {"kind": "fixed"}, "evaluation": {"every_seconds": 5.0}}
    one, _ = expected_usages(plan(stop={"updates": 150}, **sections))
    assert one.evaluations == 22  # 150 activations at 1.5 a second
    one, _ = expected_usages(plan(stop={"updates": 10**6, "seconds": 50.0}, **sections))
    assert one.evaluations == 12


def test_a_centralised_run_uploads_nothing():
    with pytest.raises(ConfigError, match="VFL-9041"):
        expected_usages(plan(rule={"name": "centralised"}))
