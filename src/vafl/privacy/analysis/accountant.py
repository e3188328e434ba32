"""Gaussian differential privacy (GDP): compose guarantees, and convert mu to (epsilon, delta) and back.

A mechanism is mu-GDP if telling two neighbouring data sets apart is at least as hard as telling N(0, 1) from
N(mu, 1). All formulas are closed forms (privacy.md, section 4). The tests compare them with dp-accounting and
mpmath.
"""

import math
from collections.abc import Callable, Iterable

import numpy as np
from scipy.optimize import brentq
from scipy.special import erfcx, ndtr, ndtri

from vafl.arrays import Doubles
from vafl.errors import ConfigError

_NARROW = 0.1  # below this mu, the two terms of delta nearly cancel
_FAR = 39.0  # the normal tail beyond this underflows to 0 in float64
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)


def compose(mus: Iterable[float]) -> float:
    """Return the mu of all these releases together: the root of the sum of squares."""
    return math.hypot(*mus)


def delta(mu: float, epsilon: float) -> float:
    """Return the smallest delta for which mu-GDP implies (epsilon, delta)-DP.

    delta = Phi(-epsilon/mu + mu/2) - e^epsilon Phi(-epsilon/mu - mu/2).
    """
    _check_not_negative(mu=mu, epsilon=epsilon)
    if mu == 0 or epsilon == math.inf:
        return 0.0
    return _delta_at(epsilon / mu - mu / 2, mu) if mu < math.inf else 1.0


def epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon for which mu-GDP implies (epsilon, delta)-DP."""
    _check_not_negative(mu=mu)
    _check_delta(delta)
    if mu == math.inf:
        return math.inf
    if mu == 0 or _delta_at(-mu / 2, mu) <= delta:
        return 0.0
    # An upper end for the root search: there, the first term of delta alone equals the allowed delta.
    beyond = max(float(-ndtri(delta)), -mu / 2)
    threshold = _root(lambda place: _delta_at(place, mu) - delta, -mu / 2, beyond)
    return mu * (threshold + mu / 2)


def mu(epsilon: float, delta: float) -> float:
    """Return the largest mu for which mu-GDP implies (epsilon, delta)-DP."""
    _check_not_negative(epsilon=epsilon)
    _check_delta(delta)
    if epsilon == math.inf:
        return math.inf
    highest = 1.0
    while _excess(highest, epsilon, delta) < 0:
        highest *= 2
    return _root(lambda mu: _excess(mu, epsilon, delta), 0.0, highest)


def _excess(mu: float, epsilon: float, allowed: float) -> float:
    return -allowed if mu == 0 else _delta_at(epsilon / mu - mu / 2, mu) - allowed


def _delta_at(place: float, mu: float) -> float:
    """Return delta for epsilon = mu (place + mu/2), without overflow.

    With Mills' ratio R(t) = Phi(-t)/phi(t), the second term is phi(place) R(place + mu), so e^epsilon never
    appears.
    """
    if place > _FAR:
        return 0.0
    density = math.exp(-place * place / 2) / math.sqrt(2 * math.pi)
    if mu >= _NARROW:
        return float(ndtr(-place) - density * _mills(place + mu))
    # For a small mu the difference of the two terms loses all digits. Integrate its derivative instead, by
    # Gauss-Legendre quadrature: R(place) - R(place + mu) is the integral of -R'(t) = 1 - t R(t).
    inside = place + mu * (_NODES + 1) / 2
    return float(density * mu / 2 * (_WEIGHTS @ (1 - inside * _mills(inside))))


def _mills(place: float | Doubles) -> Doubles:
    """Return Mills' ratio Phi(-t) / phi(t), without overflow for large t."""
    return np.asarray(math.sqrt(math.pi / 2) * erfcx(np.asarray(place) / math.sqrt(2)))


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    return float(brentq(function, low, high, xtol=1e-300, rtol=1e-15, maxiter=2000))


def _check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ConfigError("VFL-5001", f"{name} must be 0 or more. Found {value}.")


def _check_delta(value: float) -> None:
    if not 0 < value < 1:
        raise ConfigError(
            "VFL-5002",
            f"delta must be between 0 and 1. Found {value}. Choose less than 1 / (number of records).",
        )
