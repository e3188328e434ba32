"""Values worked out by hand from the theorems, as corrected by the paper's proofs."""

import pytest

from vafl.errors import ConfigError
from vafl.protocol.stepsizes import (
    SCHEDULES,
    constant,
    cosine,
    harmonic,
    nonconvex_bounded,
    nonconvex_stochastic,
    strongly_convex_bounded,
    strongly_convex_stochastic,
)


def test_constant_and_harmonic():
    assert [constant(0.3)(k) for k in (0, 1, 10**6)] == [0.3, 0.3, 0.3]
    assert [harmonic(6, 2)(k) for k in (0, 1, 4)] == [3.0, 2.0, 1.0]


def test_theorem_1():
    """1 / (4 * (1 + 4) * 2) = 0.025, and c / sqrt(K) is 0.1 for K = 100, 0.01 for K = 10,000."""
    assert nonconvex_bounded(L=2, D=4, K=100)(0) == pytest.approx(0.025)
    assert nonconvex_bounded(L=2, D=4, K=100)(99) == pytest.approx(0.025)
    assert nonconvex_bounded(L=2, D=4, K=10_000)(7) == pytest.approx(0.01)
    assert nonconvex_bounded(L=2, D=4, K=10_000, c_eta=0.5)(7) == pytest.approx(0.005)
    assert nonconvex_bounded(L=2, D=0, K=1)(0) == pytest.approx(0.125)


def test_theorem_2():
    """mu q = 0.125, K0 = 4 (4 * 4 * 2 + 2 * 0.5 * 0.25 * 3) / 0.125 = 1048: 32 / (k + 1048)."""
    eta = strongly_convex_bounded(L=2, mu=0.5, D=3, q_min=0.25)
    assert [eta(k) for k in (0, 152, 1048)] == pytest.approx([32 / 1048, 32 / 1200, 32 / 2096])


def test_theorem_3():
    """rho = 1/2 gives 0.5 / 0.25 + 2 * 0.25 / 0.125 = 6; max c_m = 36; 1 / (4 * (1 + 6) * 1) = 1/28."""
    assert nonconvex_stochastic(L=1, K=100, rho=0.5, pbar=[1.5, 6])(3) == pytest.approx(1 / 28)
    assert nonconvex_stochastic(L=1, K=10**6, rho=0.5, pbar=[6, 1.5])(3) == pytest.approx(0.001)
    assert nonconvex_stochastic(L=1, K=10**6, rho=0.5, pbar=[6], c_eta=2)(3) == pytest.approx(0.002)


def test_theorem_4():
    """etabar = 1/28 as above; (1 - rho) / (16 etabar) = 0.875 against mu q / 2."""
    slow = strongly_convex_stochastic(L=1, mu=0.5, q_min=0.25, rho=0.5, pbar=[6])  # nu = 0.0625, K0 = 896
    assert [slow(k) for k in (0, 104)] == pytest.approx([32 / 896, 32 / 1000])
    fast = strongly_convex_stochastic(L=1, mu=20, q_min=1, rho=0.5, pbar=[6, 1])  # nu = 0.875, K0 = 64
    assert [fast(k) for k in (0, 36)] == pytest.approx([2 / (0.875 * 64), 2 / (0.875 * 100)])
    assert slow(0) == pytest.approx(1 / 28), "every schedule starts at the largest step allowed"
    assert fast(0) == pytest.approx(1 / 28)


@pytest.mark.parametrize("value", [0, -1.5, float("inf"), float("nan"), "0.1"])
def test_a_step_size_is_a_positive_number(value):
    with pytest.raises(ConfigError, match=r"VFL-4213.*step_size"):
        constant(value)


@pytest.mark.parametrize(
    ("name", "constants", "said"),
    [
        ("harmonic", {"numerator": 1, "offset": 0}, r"VFL-4213.*offset.*0"),
        ("nonconvex-bounded", {"L": -2, "D": 1, "K": 5}, r"VFL-4213.*L.*\-2"),
        ("nonconvex-bounded", {"L": 2, "D": -1, "K": 5}, r"VFL-4214.*\-1"),
        ("nonconvex-bounded", {"L": 2, "D": 1.5, "K": 5}, r"VFL-4214.*1\.5"),
        ("strongly-convex-bounded", {"L": 1, "mu": 0, "D": 1, "q_min": 0.5}, r"VFL-4213.*mu"),
        ("strongly-convex-bounded", {"L": 1, "mu": 1, "D": -2, "q_min": 0.5}, "VFL-4214"),
        (
            "nonconvex-stochastic",
            {"L": 1, "K": 5, "rho": 1.0, "pbar": [1]},
            r"VFL-4211.*1\.0",
        ),
        (
            "nonconvex-stochastic",
            {"L": 1, "K": 5, "rho": 0.5, "pbar": []},
            "VFL-4212",
        ),
        ("nonconvex-stochastic", {"L": 1, "K": 5, "rho": 0.5, "pbar": 1.0}, r"VFL-4212.*1\.0"),
        (
            "strongly-convex-stochastic",
            {"L": 1, "mu": 1, "q_min": 1, "rho": 0, "pbar": [1]},
            "VFL-4211",
        ),
        (
            "strongly-convex-stochastic",
            {"L": 1, "mu": 1, "q_min": 1, "rho": 0.5, "pbar": [1, -1]},
            "VFL-4212",
        ),
    ],
)
def test_constants_out_of_range_are_refused(name, constants, said):
    with pytest.raises(ConfigError, match=said):
        SCHEDULES[name](**constants)


def test_cosine_warms_up_and_ends_at_zero():
    size = cosine(0.1, 1000, 10)
    assert size(0) == pytest.approx(0.01)
    assert max(size(k) for k in range(1001)) == pytest.approx(0.1, rel=1e-3)
    assert size(500) == pytest.approx(0.05)
    assert size(1000) == pytest.approx(0, abs=1e-12)
    assert size(5000) == pytest.approx(0, abs=1e-12)
    falling = [size(k) for k in range(10, 1001)]
    assert falling == sorted(falling, reverse=True)
