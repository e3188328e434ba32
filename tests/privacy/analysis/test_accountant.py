"""The closed forms against two independent implementations: dp-accounting, and mpmath with 60 digits."""

import math

import dp_accounting
import mpmath
import pytest
from dp_accounting import pld
from hypothesis import given
from hypothesis import strategies as st

from vafl.errors import ConfigError
from vafl.privacy.analysis import accountant

CASES = [
    (uploads, ratio, delta)
    for uploads in (1, 20, 400)
    for ratio in (1.0, 5.0, 30.0)
    for delta in (1e-3, 1e-5, 1e-9)
]


def exact_delta(mu, epsilon):
    with mpmath.workdps(60):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        gain = mpmath.ncdf(-epsilon / mu + mu / 2)
        return gain - mpmath.exp(epsilon) * mpmath.ncdf(-epsilon / mu - mu / 2)


@pytest.mark.parametrize(("uploads", "ratio", "delta"), CASES)
def test_epsilon_is_that_of_dp_accounting(uploads, ratio, delta):
    found = accountant.epsilon(accountant.compose([1 / ratio] * uploads), delta)
    assert found == pytest.approx(
        dp_accounting.get_epsilon_gaussian(ratio / math.sqrt(uploads), delta), abs=1e-6
    )


@pytest.mark.parametrize(("uploads", "ratio", "delta"), [(20, 5.0, 1e-5), (20, 5.0, 1e-7), (7, 2.0, 1e-5)])
def test_epsilon_is_that_of_privacy_loss_distributions(uploads, ratio, delta):
    event = dp_accounting.GaussianDpEvent(ratio)
    numeric = pld.PLDAccountant(value_discretization_interval=1e-4).compose(event, uploads)
    found = accountant.epsilon(math.sqrt(uploads) / ratio, delta)
    assert found == pytest.approx(numeric.get_epsilon(delta), abs=1e-6)


def test_the_reference_value():
    assert accountant.epsilon(math.sqrt(20) / 5, 1e-5) == pytest.approx(3.8486, abs=5e-5)


@pytest.mark.parametrize("mu", [1e-9, 1e-4, 0.0999, 0.1001, 1.0, 20.0, 1e4])
@pytest.mark.parametrize("share", [-1.0, 0.0, 2.0, 6.0, 20.0])
def test_delta_keeps_its_digits_however_small_or_large_mu_is(mu, share):
    epsilon = max(0.0, mu * (share + mu / 2))
    exact = exact_delta(mu, epsilon)
    assert abs(accountant.delta(mu, epsilon) / exact - 1) < 1e-9


@given(
    mu=st.floats(1e-6, 1e5),
    power=st.floats(-60, -0.1),
)
def test_epsilon_and_delta_are_inverse(mu, power):
    delta = 10.0**power
    epsilon = accountant.epsilon(mu, delta)
    if epsilon > 0:
        assert accountant.delta(mu, epsilon) == pytest.approx(delta, rel=1e-6)
    else:
        assert accountant.delta(mu, 0) <= delta


@given(epsilon=st.floats(0, 1e6), power=st.floats(-30, -0.1))
def test_mu_is_the_largest_that_keeps_to_epsilon_and_delta(epsilon, power):
    delta = 10.0**power
    mu = accountant.mu(epsilon, delta)
    assert accountant.delta(mu, epsilon) == pytest.approx(delta, rel=1e-6)
    assert accountant.delta(mu * 1.001, epsilon) > delta


def test_guarantees_add_up_as_squares():
    assert accountant.compose([3.0, 4.0]) == 5.0
    assert accountant.compose([]) == 0.0
    assert accountant.compose([1e200, 1e200]) == pytest.approx(math.sqrt(2) * 1e200)


def test_the_ends_of_the_scale():
    assert accountant.epsilon(0.0, 1e-5) == 0.0
    assert accountant.epsilon(math.inf, 1e-5) == math.inf
    assert accountant.delta(0.0, 1.0) == 0.0
    assert accountant.delta(math.inf, 1.0) == 1.0
    assert accountant.delta(1.0, math.inf) == 0.0
    assert accountant.mu(math.inf, 1e-5) == math.inf
    assert accountant.epsilon(1e-6, 1e-5) == 0.0  # delta alone covers so little


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_delta_must_be_a_probability(delta):
    with pytest.raises(ConfigError, match="VFL-5002"):
        accountant.epsilon(1.0, delta)
    with pytest.raises(ConfigError, match="VFL-5002"):
        accountant.mu(1.0, delta)


def test_negative_budgets_are_refused():
    with pytest.raises(ConfigError, match=r"VFL-5001.*mu"):
        accountant.delta(-1.0, 1.0)
    with pytest.raises(ConfigError, match=r"VFL-5001.*epsilon"):
        accountant.mu(math.nan, 1e-5)
