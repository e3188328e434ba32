import math

import numpy as np
import pytest
import torch
from scipy.stats import beta

from tests.federation import Exchange, run_of, vertical_data
from vafl.errors import ConfigError
from vafl.privacy.mechanism.labels import GradientMask, randomise
from vafl.privacy.settings import LabelSettings, keep_probability
from vafl.protocol.messages import Gradient

ROWS = 200_000


def counts(epsilon, classes):
    """Return how often class i was drawn for true class j, [j, i]."""
    true = torch.arange(ROWS) % classes
    drawn = randomise(true, classes, epsilon)
    table = np.zeros((classes, classes), dtype=int)
    np.add.at(table, (true.numpy(), drawn.numpy()), 1)
    return table


def interval(hits, trials):
    """Return Clopper and Pearson's interval at 1 - 1e-6: with real entropy, the tests almost never fail."""
    return beta.ppf(5e-7, hits, trials - hits + 1), beta.ppf(1 - 5e-7, hits + 1, trials - hits)


@pytest.mark.parametrize(("epsilon", "classes"), [(1.0, 2), (1.0, 10), (2.0, 3), (4.0, 10)])
def test_labels_are_kept_as_often_as_promised_and_flipped_evenly(epsilon, classes):
    table = counts(epsilon, classes)
    keep = math.exp(epsilon) / (math.exp(epsilon) + classes - 1)
    for true, row in enumerate(table):
        for drawn, hits in enumerate(row):
            low, high = interval(hits, row.sum())
            assert low <= (keep if drawn == true else (1 - keep) / (classes - 1)) <= high


@pytest.mark.parametrize(("epsilon", "classes"), [(0.5, 2), (1.0, 10), (3.0, 4)])
def test_no_label_is_more_than_e_to_the_epsilon_times_as_probable_for_one_class_as_for_another(
    epsilon, classes
):
    keep = keep_probability(epsilon, classes)
    assert keep / ((1 - keep) / (classes - 1)) <= math.exp(epsilon) * (1 + 1e-12)
    table = counts(epsilon, classes)
    bounds = [[interval(hits, row.sum()) for hits in row] for row in table]
    for drawn in range(classes):
        certain = max(bounds[true][drawn][0] for true in range(classes))
        assert certain <= math.exp(epsilon) * min(bounds[true][drawn][1] for true in range(classes))


def test_drawing_keeps_the_kind_of_number_and_never_repeats():
    labels = torch.zeros(1000)
    first, second = randomise(labels, 2, 1.0), randomise(labels, 2, 1.0)
    assert first.dtype == torch.float32
    assert not torch.equal(first, second)
    assert torch.equal(randomise(labels, 2, 700.0), labels)


def test_the_seed_does_not_decide_the_labels():
    data = vertical_data(rows=500)
    first, second = (run_of(data, labels={"epsilon": 1.0}).data.labels for _ in range(2))
    assert not torch.equal(first, second)


def test_the_server_trains_on_drawn_labels_and_is_measured_on_true_ones():
    data = vertical_data(rows=500)
    run = run_of(data, labels={"epsilon": 1.0})
    assert np.array_equal(run.runtime.server._evaluate._labels, run.data.labels[run.data.train])
    assert not torch.equal(run.data.labels[data.train], data.labels[data.train])
    assert torch.equal(run.data.labels[data.test], data.labels[data.test])


@pytest.mark.parametrize("rule", [{"name": "async"}, {"name": "t-sync", "t": 2}, {"name": "sync"}])
@pytest.mark.parametrize("model", [{}, {"head": "mlp", "combine": "concat", "width": 4}])
def test_no_row_of_a_returned_gradient_is_longer_than_the_clip(rule, model):
    clip = 0.05
    answers = gradients(run_of(rule=rule, model=model, labels={"gradient_clip": clip}))
    plain = gradients(run_of(rule=rule, model=model))
    assert max(np.linalg.norm(answer, axis=1).max() for answer in answers) <= clip * (1 + 1e-6)
    assert max(np.linalg.norm(answer, axis=1).max() for answer in plain) > clip


class Seen(Exchange):
    """Keeps every gradient that the server sends."""

    def __init__(self, run):
        super().__init__(run)
        self.gradients = []

    def _dispatch(self, replies):
        self.gradients += [reply.gradients for reply in replies if isinstance(reply, Gradient)]
        super()._dispatch(replies)


def gradients(run):
    """Return all gradients that the server sends while every client is active twenty times."""
    exchange = Seen(run)
    for _ in range(20):
        for client in exchange.clients:
            exchange.play(("wake", client.index))
        exchange.deliver()
    return exchange.gradients


def test_clients_of_a_round_get_one_and_the_same_noise():
    first, second, *_ = gradients(run_of(rule={"name": "sync"}, labels={"gradient_noise": 1.0}))
    assert np.array_equal(first, second)


def test_noise_has_the_deviation_asked_for():
    noise = GradientMask(0.0, 0.3)(np.zeros((100_000, 2), np.float32))
    assert float(noise.std()) == pytest.approx(0.3, rel=0.02)


def test_short_rows_are_not_stretched():
    rows = np.array([[0.3, 0.4], [0.0, 0.0], [3.0, 4.0]], np.float32)
    expected = np.array([[0.3, 0.4], [0.0, 0.0], [0.6, 0.8]], np.float32)
    assert np.allclose(GradientMask(1.0, 0.0)(rows), expected, rtol=1e-4)


def test_a_regression_is_refused():
    with pytest.raises(ConfigError, match=r"VFL-5110.*1\.0"):
        run_of(vertical_data(classes=0), labels={"epsilon": 1.0})


@pytest.mark.parametrize("name", ["epsilon", "gradient_clip", "gradient_noise"])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ConfigError, match=rf"labels.{name} must be 0 or more. Found {value}"):
        LabelSettings(**{name: value})


def test_a_file_without_epsilon_is_refused():
    with pytest.raises(ConfigError, match="VFL-5109"):
        LabelSettings(file="labels.safetensors")


def test_the_report_tells_the_guarantee_from_the_heuristics():
    report = LabelSettings(epsilon=2.0, gradient_clip=0.1).report(10)
    assert report["epsilon"] == 2.0
    assert report["kept_with_probability"] == pytest.approx(0.4509, abs=1e-4)
    assert report["heuristics"] == {"gradient_clip": 0.1, "gradient_noise": 0.0}
    assert LabelSettings().report(0) == {
        "epsilon": None,
        "kept_with_probability": 1.0,
        "file": None,
        "heuristics": {"gradient_clip": 0.0, "gradient_noise": 0.0},
    }
