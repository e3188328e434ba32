"""Flat parameters become a configuration, sized to the data."""

from dataclasses import replace

import numpy as np
import pytest

from vafl import ConfigError, VerticalClassifier
from vafl.config import from_document
from vafl.estimator.settings import make_config
from vafl.run.plan import sized


def config(rows=100, clients=4, **parameters):
    parameters = {**VerticalClassifier(embedding="linear").get_params(), **parameters}
    return sized(make_config(parameters, seed=7, rows=rows, held_out=False), rows, clients)


@pytest.mark.parametrize(
    ("parameters", "updates"),
    [
        ({"rule": "async"}, 3 * 4 * 4),
        ({"rule": "t-sync", "t": 2}, 3 * 4 * 4 // 2),
        ({"rule": "sync"}, 3 * 4),
        ({"rule": "centralised"}, 3 * 4),
        ({"rule": "async", "batch_size": 1000}, 3 * 4),
        ({"rule": "sync", "epochs": 0.1}, 1),
    ],
)
def test_epochs_become_updates_by_the_rule(parameters, updates):
    assert config(**{"epochs": 3, **parameters}).stop.updates == updates


def test_a_batch_is_at_most_all_rows():
    assert config(rows=5).schedule.batch_size == 5


def test_parameters_reach_their_sections():
    made = config(
        rule="sync", delay_bound=5, refresh="random:3", hidden=[8], optimiser="sgd", step_size=1, l2=0
    )
    assert made.seed == 7
    assert (made.rule.name, made.rule.delay_bound) == ("sync", 5)
    assert (made.schedule.refresh, made.embedding.hidden) == ("random:3", (8,))
    assert (made.optimiser.name, made.optimiser.step_size, made.optimiser.l2) == ("sgd", 1.0, 0.0)


def test_delays_are_a_kind_or_a_section():
    assert config(delays="exponential").delays.kind == "exponential"
    section = {"kind": "fixed", "seconds": [1, 1, 1, 10], "latency": 0.5}
    assert config(delays=section).delays.seconds == (1.0, 1.0, 1.0, 10.0)


def test_numbers_of_numpy_are_numbers():
    made = config(batch_size=np.int64(8), step_size=np.float32(0.5), epochs=np.int64(2))
    assert (made.schedule.batch_size, made.optimiser.step_size, made.stop.updates) == (8, 0.5, 2 * 13 * 4)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rule": "asynch"}, "VFL-1037"),
        ({"rule": "t-sync", "t": 5}, r"VFL-4196.*4"),
        ({"head": "bais"}, "VFL-1037"),
        ({"batch_size": "32"}, r"VFL-1034.*schedule\.batch_size.*a whole number"),
        ({"delays": {"knd": "fixed"}}, r'VFL-1032.*delays\.knd.*Did you mean "kind"\?'),
        ({"optimiser": "adam"}, r"VFL-4052.*Adam"),
        ({"epochs": -1}, r"VFL-8521.*\-1"),
        ({"epochs": "many"}, "VFL-8521"),
    ],
)
def test_a_wrong_parameter_is_named(parameters, message):
    with pytest.raises(ConfigError, match=message):
        config(**parameters)


def test_the_defaults_are_those_of_a_run_on_a_table():
    made = make_config(VerticalClassifier().get_params(), seed=7, rows=1000, held_out=True)
    table = from_document({"seed": 7, "data": {"name": "csv", "path": "X", "label": "y"}})
    assert table.embedding.model == "auto"  # that is "tabular" for a table
    assert made == replace(table, embedding=made.embedding)
    assert made.embedding == replace(table.embedding, model="tabular")


def test_another_optimiser_takes_none_of_the_options_of_the_default():
    made = config(embedding="tabular", optimiser="sgd", step_size=0.1)
    assert (made.optimiser.name, made.optimiser.options) == ("sgd", {})
    assert made.optimiser.schedule == "cosine"
