import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from vafl.models.embeddings import SequenceEncoder, cnn, mlp
from vafl.privacy.mechanism.noise import Noise
from vafl.privacy.mechanism.release import Release, clip_rows, split_frozen, split_last


def test_long_rows_are_clipped_to_the_norm_and_short_ones_left():
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [-30.0, 40.0]])
    expected = torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0], [-0.6, 0.8]])
    torch.testing.assert_close(clip_rows(rows, 1.0), expected, rtol=1e-5, atol=1e-6)


@given(
    arrays("float32", (3, 5), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    st.floats(-8, 8).map(lambda exponent: 10.0**exponent),
    st.floats(-3, 12).map(lambda exponent: 10.0**exponent),
)
def test_no_value_however_large_is_longer_than_the_clip(values, norm, noise_over_clip):
    """Neither alone nor in an upload. The noise is left out here."""
    noise = Noise()
    noise.normals = lambda count, deviation: np.zeros(count)
    release = Release(norm, noise_over_clip * norm, nn.Identity(), noise)
    for clipped in (clip_rows(torch.from_numpy(values), norm), release(torch.from_numpy(values))):
        assert clipped.isfinite().all()
        assert (clipped.double().norm(dim=1) <= norm * 1.000001).all()


def test_the_way_back_through_the_clip_is_right_for_values_near_the_largest_float32():
    values = torch.tensor([[3e38, 3e38], [-2e38, 1e38], [3.0, 4.0]])
    _, pull_back = Release(1.0, 0.0, nn.Identity(), Noise()).with_way_back(values)
    slopes = torch.tensor([[1e38, 0.0], [1e38, 2e38], [1.0, 0.0]])
    leaf = values.double().requires_grad_()
    (expected,) = torch.autograd.grad(clip_rows(leaf, 1.0), leaf, slopes.double())
    torch.testing.assert_close(pull_back(slopes), expected.float(), rtol=1e-4, atol=1e-6)


def test_a_row_that_is_not_finite_becomes_zero_and_spoils_no_other():
    values = torch.tensor([[math.inf, 1.0], [math.nan, 1.0], [3.0, 4.0]])
    expected = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.6, 0.8]])
    torch.testing.assert_close(clip_rows(values, 1.0), expected, rtol=1e-4, atol=0)
    release = Release(1.0, 0.0, nn.Identity(), Noise())
    torch.testing.assert_close(release(values), expected, rtol=1e-4, atol=0)


def test_the_clip_holds_for_a_million_numbers():
    values = torch.full((1, 1_000_000), 4e-3)  # whose squares underflow when summed in float32
    assert clip_rows(values, 1.0).double().norm() <= 1


def test_adversarial_weights_cannot_pass_the_clip():
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.fill_(1e30)
    assert (clip_rows(model(torch.ones(2, 4)), 0.5).double().norm(dim=1) <= 0.5).all()


def test_the_gradient_passes_through_the_clip():
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(clip_rows(rows, 1.0)[:, 0].sum(), rows)
    along = torch.tensor([1 / 5 - 9 / 125, -12 / 125])  # of 3 / |(3, 4)|
    expected = torch.stack([along, torch.tensor([1.0, 0]), torch.tensor([1.0, 0])])
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "rest", [nn.Identity(), nn.Tanh(), nn.ReLU(inplace=True), nn.Sequential(nn.ReLU(), nn.Flatten())]
)
@pytest.mark.parametrize("clip", [0.0, 1.5])
def test_the_way_back_is_that_of_a_graph(rest, clip):
    values = torch.randn(50, 3) * torch.logspace(-2, 2, 50)[:, None]
    release = Release(clip, 0.0, rest, Noise())
    embeddings, pull_back = release.with_way_back(values)
    slopes = torch.randn_like(embeddings)
    leaf = values.clone().requires_grad_()
    expected = rest(clip_rows(leaf, clip) if clip else leaf.clone())
    torch.testing.assert_close(embeddings, expected.detach())
    (gradient,) = torch.autograd.grad(expected, leaf, slopes)
    torch.testing.assert_close(pull_back(slopes), gradient, rtol=1e-3, atol=1e-4)


def test_clipping_comes_before_the_noise_and_the_activation_after_it():
    release = Release(1.0, 0.01, nn.ReLU(), Noise())
    found = release(torch.full((2000, 1), 100.0))
    assert found.mean().item() == pytest.approx(1, abs=0.01)
    assert (found > 1).any()
    assert (release(torch.full((2000, 1), 0.0)) >= 0).all()


class Residual(nn.Sequential):
    """Looks like a chain only by its base class."""

    def forward(self, values):
        return values + super().forward(values)


@pytest.mark.parametrize("split", [split_last, split_frozen])
def test_what_is_derived_from_a_chain_is_one_piece(split):
    model = Residual(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
    model[0].requires_grad_(False)
    values = torch.randn(5, 3)
    assert torch.equal(nn.Sequential(*split(model))(values), model(values))


@pytest.mark.parametrize(
    ("model", "rest"),
    [
        (nn.Linear(3, 2), 0),
        (mlp((3,), 2, (4, 5)), 0),
        (cnn((1, 8, 8), 2, (3, 3)), 3),
        (SequenceEncoder(3, 4, 2), 0),
        (nn.Sequential(nn.Linear(3, 2), nn.Tanh()), 1),
    ],
)
def test_a_chain_is_cut_behind_its_last_layer(model, rest):
    body, tail = split_last(model)
    assert len(list(tail.children())) == rest
    assert [id(p) for p in body.parameters()] == [id(p) for p in model.parameters()]
    assert body.state_dict().keys() == model.state_dict().keys()
