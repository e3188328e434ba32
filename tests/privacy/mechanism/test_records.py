"""Per-record gradients, compared with one backward pass per record, which is too slow for a run."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from vafl.models.embeddings import SequenceEncoder, cnn, mlp
from vafl.privacy.mechanism.layers import HiddenNoise
from vafl.privacy.mechanism.noise import Noise
from vafl.privacy.mechanism.records import NoisyUpdates
from vafl.privacy.settings import PrivacySettings


class Skips(nn.Module):
    """Only linear layers, but one of them is used twice, so there is no closed form."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, features):
        return self.layer(torch.tanh(self.layer(features))) + features


class Backwards(nn.Module):
    """Uses its layers in another order than their attributes."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, values):
        return self.last(self.first(values).tanh())


class Squashed(nn.Linear):
    """More than an affine map, although it is derived from nn.Linear."""

    def forward(self, values):
        return super().forward(values).tanh()


class Tied(nn.Module):
    """Two layers share one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight

    def forward(self, values):
        return self.last(self.first(values).tanh())


class EachStep(nn.Module):
    """Applies the same layers to every step of a record, with all steps of all records in one matrix."""

    def __init__(self):
        super().__init__()
        self.each = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))

    def forward(self, series):
        return self.each(series.flatten(0, 1)).view(*series.shape[:2], 2).sum(1)


MODELS = {
    "linear": (lambda: nn.Linear(4, 2), (4,), 2),
    "mlp": (lambda: mlp((4,), 3, (5, 6)), (4,), 3),
    "cnn": (lambda: nn.Sequential(*list(cnn((1, 6, 6), 3, (2, 2)))[:-3]), (1, 6, 6), None),
    "lstm": (lambda: SequenceEncoder(3, 4, 2), (5, 3), 2),
    "used twice": (Skips, (3,), 3),
    "backwards": (Backwards, (4,), 4),
    "tied": (Tied, (3,), 3),
    "in place": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)),
        (4,),
        2,
    ),
    "each step": (EachStep, (5, 2), 2),
    "derived": (lambda: Squashed(4, 2), (4,), 2),
    "weight norm": (lambda: weight_norm(nn.Linear(4, 2)), (4,), 2),
}


def sums_by_hand(model, inputs, slopes, clip):
    totals = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for row, slope in zip(inputs, slopes * len(inputs), strict=True):
        gradients = torch.autograd.grad((model(row[None])[0] * slope).sum(), list(model.parameters()))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        factor = min(1.0, clip / norm)
        totals = [total + factor * own for total, own in zip(totals, gradients, strict=True)]
    return totals


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("clip", [0.5, 1e6])
def test_clipped_sums_are_those_of_each_record_by_itself(name, clip):
    torch.manual_seed(0)
    make, shape, _ = MODELS[name]
    model = make()
    features, rows = torch.randn(100, *shape), torch.randperm(100)[:70].numpy()
    inputs = features[rows]
    updates = NoisyUpdates(model, list(model.parameters()), clip, 1e-9, Noise(), features=features)
    outputs, pull_back = updates(inputs, rows)
    slopes = torch.randn_like(outputs) / len(inputs)
    expected = sums_by_hand(model, inputs, slopes, clip)
    for found, total in zip(pull_back(slopes), expected, strict=True):
        torch.testing.assert_close(found * len(inputs), total, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["linear", "mlp", "used twice"])
def test_no_record_moves_the_sum_by_more_than_the_clip(name):
    make, shape, _ = MODELS[name]
    model = make()
    updates = NoisyUpdates(model, list(model.parameters()), 0.5, 1e-9, Noise())
    inputs = torch.randn(6, *shape)
    inputs[0] *= 1e8
    slopes = torch.randn(6, updates(inputs)[0].shape[1])
    sums = []
    for scale in (1.0, 0.0):  # with the record's own slope, and without
        own = slopes.clone()
        own[0] *= scale * 1e8
        sums.append(torch.cat([each.flatten() * 6 for each in updates(inputs)[1](own)]))
    assert (sums[0] - sums[1]).norm() <= 0.5 * (1 + 1e-3)


FLOAT32_MAX, SMALLEST = float(np.finfo(np.float32).max), 2.0**-149
magnitudes = st.one_of(
    st.sampled_from([SMALLEST, 1e-38, 1.0, 1e20, 1e30, FLOAT32_MAX]),
    st.floats(-149, 127).map(lambda exponent: 2.0**exponent),
)


@st.composite
def extremes(draw):
    """Draw a clip, a batch size, and the magnitudes of one record's slope and features.

    The clip factor, or the clipped slope, often is a denormal float32 with few bits."""
    clip = 10.0 ** draw(st.floats(-8, 4))
    batch = draw(st.sampled_from([1, 2, 64, 65, 600]))
    slope, feature = draw(magnitudes), draw(magnitudes)
    few_bits = draw(st.floats(0.5, 4)) * SMALLEST
    which = draw(st.sampled_from(["any", "clip factor", "clip factor, other models", "scaled slope"]))
    if which == "clip factor":
        feature = min(FLOAT32_MAX, clip / (few_bits * batch * slope))
    if which == "clip factor, other models":
        slope, feature = FLOAT32_MAX / (batch * draw(st.sampled_from([1.0, 10.0, 100.0]))), 1.0
        clip = slope * batch * few_bits * draw(st.sampled_from([1, 4, 16, 64]))
    if which == "scaled slope":
        feature = min(FLOAT32_MAX, clip / (few_bits * batch))
    return clip, batch, slope, feature


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["linear", "mlp", "cnn", "lstm"])
@given(extremes=extremes(), weight=st.sampled_from([1.0, 1e-6, 1e6]), seed=st.integers(0, 999))
def test_no_finite_slope_or_feature_gets_a_record_past_the_clip(name, extremes, weight, seed):
    """Only one record of the batch has a slope, so the sum is that record's contribution."""
    clip, batch, slope, feature = extremes
    torch.manual_seed(seed)
    make, shape, _ = MODELS[name]
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(weight)
    updates = NoisyUpdates(model, list(model.parameters()), clip, 0.0, Noise())
    inputs, place = torch.randn(batch, *shape), seed % batch
    inputs[place] = feature * torch.rand(shape).sub(0.5).sign()
    outputs, pull_back = updates(inputs)
    slopes = torch.zeros_like(outputs)
    slopes[place] = slope * torch.rand(outputs.shape[1:]).sub(0.5).sign()
    added = torch.cat([each.flatten() for each in pull_back(slopes)]).double() * batch
    assert added.norm().item() <= clip * 1.000001


def test_no_record_moves_the_sum_by_more_through_the_rounding_of_others():
    """A record moves a float32 sum across a power of two, above which all later terms are rounded up."""
    model = nn.Linear(8, 8, bias=False)
    updates = NoisyUpdates(model, [model.weight], 1.0, 0.0, Noise())
    inputs, slopes, sums = torch.zeros(600, 8), torch.zeros(600, 8), []
    inputs[:, 0] = 1.0
    slopes[:302, 0] = 1.0
    slopes[302:, 0] = 0.76 * 2.0**-15
    for own in (1.0, -1.0):
        slopes[0, 0] = own
        (mean,) = updates(inputs)[1](slopes / 600)
        sums.append(mean.double() * 600)
    assert (sums[0] - sums[1]).norm() <= 2.0


def test_a_record_beyond_all_numbers_is_clipped_to_nothing():
    model = nn.Linear(3, 2)
    updates = NoisyUpdates(model, list(model.parameters()), 1.0, 1e-9, Noise())
    inputs = torch.full((2, 3), 1e30)
    for slopes in (torch.zeros(2, 2), torch.ones(2, 2)):
        assert all(each.isfinite().all() and each.norm() <= 1 for each in updates(inputs)[1](slopes))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", MODELS)
def test_slopes_that_overflow_stop_nobody_and_pass_no_clip(name):
    """A client that failed because of one record would tell the server about it without noise."""
    torch.manual_seed(0)
    make, shape, _ = MODELS[name]
    model = make()
    updates = NoisyUpdates(model, list(model.parameters()), 1.0, 1e-9, Noise())
    outputs, pull_back = updates(1 + torch.rand(4, *shape))
    slopes = torch.full_like(outputs, 3e38)
    slopes[1:] = 1e-3
    found = torch.cat([each.flatten() for each in pull_back(slopes)])
    assert found.isfinite().all()
    assert found.norm() <= 1


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", MODELS)
def test_a_record_that_is_no_number_counts_as_zero_and_spoils_no_other(name, value):
    torch.manual_seed(0)
    make, shape, _ = MODELS[name]
    model, features = make(), torch.randn(4, *shape)
    features[2].flatten()[0] = value
    updates = NoisyUpdates(model, list(model.parameters()), 1.0, 1e-9, Noise(), features=features)
    outputs, pull_back = updates(features, np.arange(4))
    slopes = torch.randn_like(outputs) / 4
    others = torch.tensor([0, 1, 3])
    expected = sums_by_hand(model, features[others], slopes[others] * 4 / 3, 1.0)
    for found, total in zip(pull_back(slopes), expected, strict=True):
        torch.testing.assert_close(found * 4, total, rtol=1e-3, atol=1e-4)


def test_a_bias_may_be_trained_where_its_weight_is_frozen():
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    inputs = torch.randn(5, 3)
    updates = NoisyUpdates(model, [model.bias], 1e6, 1e-9, Noise(), features=inputs)
    (gradient,) = updates(inputs, np.arange(5))[1](torch.ones(5, 2))
    torch.testing.assert_close(gradient, torch.full((2,), 5.0), rtol=1e-4, atol=0)


def test_the_sum_has_the_noise_asked_for_whatever_the_batch():
    model = nn.Linear(100, 50)
    for rows in (1, 20):
        updates = NoisyUpdates(model, list(model.parameters()), 1.0, 3.0, Noise())
        outputs, pull_back = updates(torch.zeros(rows, 100))
        noised = torch.cat([each.flatten() * rows for each in pull_back(torch.zeros_like(outputs))])
        assert noised.std().item() == pytest.approx(3.0, rel=0.05)


def test_frozen_parameters_are_left_out():
    model = mlp((4,), 3, (5,))
    model[0].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    updates = NoisyUpdates(model, trained, 1e6, 1e-9, Noise())
    inputs = torch.randn(8, 4)
    outputs, pull_back = updates(inputs)
    slopes = torch.randn_like(outputs)
    expected = torch.autograd.grad(model(inputs), trained, slopes)
    for found, own in zip(pull_back(slopes), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_gradients_are_those_of_the_noised_function(name):
    """The gradient contains the hidden noise of the upload, not a new draw."""
    torch.manual_seed(0)
    make, shape, _ = MODELS[name]
    model, noise = make(), Noise()
    hidden = HiddenNoise(model, PrivacySettings(mode="embed_only", noise=1.0, layers=(1.0,)), noise)
    updates = NoisyUpdates(model, list(model.parameters()), 1e6, 1e-9, noise, hidden)
    inputs = torch.randn(8, *shape)
    outputs, pull_back = updates(inputs)
    slopes = torch.randn_like(outputs)
    hidden.replayed = hidden.drawn
    expected = torch.autograd.grad(model(inputs), list(model.parameters()), slopes)
    hidden.replayed = None
    for found, own in zip(pull_back(slopes), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-3, atol=1e-4)
