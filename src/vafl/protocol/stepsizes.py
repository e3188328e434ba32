"""Step sizes: constant, cosine, and the schedules of the paper's theorems (as corrected by its proofs).

A step size is a function of the global iteration k. The symbols are the paper's: L is the smoothness, mu the
strong convexity, D the delay bound and K the planned number of iterations. q_min is the smallest activation
probability, where the probabilities of all clients sum to the t clients of a step. Stochastic delays satisfy
P(tau = d) <= pbar rho^d.
"""

import math
from collections.abc import Callable, Sequence

from vafl.errors import ConfigError

StepSize = Callable[[int], float]


def constant(eta: float) -> StepSize:
    """Return a constant step size."""
    _require_positive(step_size=eta)
    return lambda k: eta


def harmonic(numerator: float, offset: float) -> StepSize:
    """Return numerator / (k + offset)."""
    _require_positive(numerator=numerator, offset=offset)
    return lambda k: numerator / (k + offset)


def cosine(eta: float, K: int, warmup: int) -> StepSize:  # noqa: N803
    """Rise from 0 to eta in `warmup` iterations, and fall to 0 at iteration K along half a cosine."""
    _require_positive(step_size=eta, K=K, warmup=warmup)

    def size(k: int) -> float:
        share = min(1.0, k / K)
        return eta * min(1.0, (k + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * share))

    return size


def nonconvex_bounded(L: float, D: int, K: int, c_eta: float = 1.0) -> StepSize:  # noqa: N803
    """Theorem 1: min{1 / (4(1+D)L), c_eta / sqrt(K)}."""
    _require_positive(L=L, K=K, c_eta=c_eta)
    _require_bound(D)
    return constant(min(1 / (4 * (1 + D) * L), c_eta / math.sqrt(K)))


def strongly_convex_bounded(L: float, mu: float, D: int, q_min: float) -> StepSize:  # noqa: N803
    """Theorem 2: 4 / (mu q_min (k + K0)), with q_min as in its proof."""
    _require_positive(L=L, mu=mu, q_min=q_min)
    _require_bound(D)
    offset = 4 * (4 * (D + 1) * L + 2 * mu * q_min * D) / (mu * q_min)
    return harmonic(4 / (mu * q_min), offset)


def nonconvex_stochastic(
    L: float,  # noqa: N803
    K: int,  # noqa: N803
    rho: float,
    pbar: Sequence[float],
    c_eta: float = 1.0,
) -> StepSize:
    """Theorem 3: min{1 / (4(1 + max_m sqrt(c_m))L), c_eta / sqrt(K)}, with max_m as in its proof."""
    _require_positive(L=L, K=K, c_eta=c_eta)
    return constant(min(_largest_stochastic_step(L, rho, pbar), c_eta / math.sqrt(K)))


def strongly_convex_stochastic(
    L: float,  # noqa: N803
    mu: float,
    q_min: float,
    rho: float,
    pbar: Sequence[float],
) -> StepSize:
    """Theorem 4: 2 / (nu (k + K0))."""
    _require_positive(L=L, mu=mu, q_min=q_min)
    largest = _largest_stochastic_step(L, rho, pbar)
    nu = min((1 - rho) / (16 * largest), mu * q_min / 2)
    return harmonic(2 / nu, 2 / (largest * nu))


def _largest_stochastic_step(L: float, rho: float, pbar: Sequence[float]) -> float:  # noqa: N803
    """etabar = 1 / (4(1 + max_m sqrt(c_m))L)."""
    if not 0 < rho < 1:
        raise ConfigError(
            "VFL-4211",
            f"rho, the decay rate of the delay probabilities, must be between 0 and 1. Found {rho}.",
        )
    if not (isinstance(pbar, Sequence) and pbar and min(pbar) > 0):
        raise ConfigError(
            "VFL-4212", f"pbar must be a list of positive numbers, one per client. Found {pbar}."
        )
    moment = rho / (1 - rho) ** 2 + 2 * rho**2 / (1 - rho) ** 3
    return 1 / (4 * (1 + math.sqrt(max(pbar) * moment)) * L)


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        if not (isinstance(value, int | float) and value > 0 and math.isfinite(value)):
            raise ConfigError("VFL-4213", f"{name} must be a positive number. Found {value}.")


def _require_bound(D: int) -> None:  # noqa: N803
    if not (isinstance(D, int) and D >= 0):
        raise ConfigError("VFL-4214", f"D, the delay bound, must be an integer, 0 or more. Found {D}.")


SCHEDULES: dict[str, Callable[..., StepSize]] = {
    "harmonic": harmonic,
    "nonconvex-bounded": nonconvex_bounded,
    "strongly-convex-bounded": strongly_convex_bounded,
    "nonconvex-stochastic": nonconvex_stochastic,
    "strongly-convex-stochastic": strongly_convex_stochastic,
}
