"""Gradients that are far larger than usual are scaled down; all others pass unchanged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vafl.protocol.gradient_limit import GradientLimit

norms = st.lists(st.floats(0, 2.0**127, width=32), min_size=1, max_size=30)


def gradient(norm):
    return np.array([[norm, 0.0], [0.0, 0.0]], np.float32)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e5])
def test_gradients_of_honest_training_pass_as_they_are(scale):
    limit, chance = GradientLimit(), np.random.default_rng(0)
    for step in range(500):
        own = (scale * 0.97**step * chance.lognormal(0, 1, (8, 3))).astype(np.float32)
        assert limit(own) is own
    assert limit.scaled == 0


@pytest.mark.parametrize("huge", [1e6, 1e30, 3e38])
def test_one_huge_gradient_is_scaled_down_and_counted(huge):
    limit = GradientLimit()
    for _ in range(3):
        limit(gradient(0.5))
    taken = limit(np.full((600, 10), huge, np.float32))
    assert np.linalg.norm(taken) == pytest.approx(50, rel=1e-3)
    assert limit.scaled == 1
    assert limit.largest == pytest.approx(huge * 6000**0.5, rel=1e-3)
    own = gradient(0.4)
    assert limit(own) is own  # an honest server is not scaled down afterwards


def test_many_huge_gradients_raise_the_limit_slowly():
    limit = GradientLimit()
    limit(gradient(0.5))
    for count in range(5):
        taken = limit(gradient(1e30))
        assert np.linalg.norm(taken) == pytest.approx(50 * 2**count)


def test_the_first_gradient_is_limited_too():
    assert np.linalg.norm(GradientLimit()(gradient(1e30))) == pytest.approx(1e6)


def test_gradients_of_zero_are_no_measure():
    limit = GradientLimit()
    for norm in (0.0, 0.0, 3.0):
        own = gradient(norm)
        assert limit(own) is own


@given(norms)
def test_no_gradient_grows_by_more_than_the_factor(sequence):
    limit, recent = GradientLimit(), 0.0
    for norm in sequence:
        taken = float(np.linalg.norm(limit(gradient(norm)).astype(np.float64)))
        assert np.isfinite(taken)
        assert taken <= (100 * recent or 1e6) * 1.0001
        recent = max(taken, recent)
