"""Theorem 1: F not convex, delays bounded, eta = min{1 / (4(1+D)L), c / sqrt(K)} for K steps gives a mean
squared gradient of O(1 / sqrt(K)). The step size depends on K, so each K needs a separate run.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.objective import Objective
from experiments.runs import make_run, visit
from vafl.config import read_config

TOML = Path(__file__).with_suffix(".toml")
LOOKS = 200  # evenly spread iterates over which the mean of a run is taken


@dataclass(frozen=True)
class Job:
    """One run of K steps with theorem 1's step size; L was estimated, c_eta is free."""

    L: float
    K: int
    seed: int
    changes: tuple[str, ...] = ()
    c_eta: float = 1.0


@dataclass(frozen=True)
class Descended:
    """The results of one run.

    Attributes:
        mean_square: of the gradient of F, over the iterates.
        steepest: the largest secant of the gradient between two of these iterates. It is at most L if the
            estimate of L holds along the run.
        last: F at the end.
        longest_delay: of the used embeddings; must be at most D.
    """

    step_size: float
    mean_square: float
    steepest: float
    last: float
    longest_delay: int
    D: int


def estimate_smoothness(changes: tuple[str, ...], updates: int) -> float:
    """Return L, estimated as the largest secant near the path of a pilot run with another seed."""
    run = make_run(TOML, [*changes, "optimiser.step_size=0.05"], seed=1000)
    objective = Objective(run)
    looks = np.linspace(0, updates, 11).astype(int).tolist()
    return max(objective.curvature(point) for point in visit(run, looks))


def descend(job: Job) -> Descended:
    """Make K steps of the algorithm, and compute the full gradient at regular intervals."""
    delay_bound = read_config(TOML, list(job.changes)).rule.delay_bound
    constants = f"{{L={job.L!r}, D={delay_bound}, K={job.K}, c_eta={job.c_eta!r}}}"
    step_size = ("optimiser.schedule=nonconvex-bounded", f"optimiser.constants={constants}")
    run = make_run(TOML, [*job.changes, *step_size], job.seed)
    objective = Objective(run)
    looks = np.unique(np.linspace(0, job.K - 1, LOOKS).astype(int)).tolist()
    squares, secants, value = [], [], 0.0
    before = None
    for point in visit(run, looks):
        value, gradient = objective(point)
        squares.append(float(gradient @ gradient))
        if before is not None:
            moved = float((point - before[0]).norm())
            secants.append(float((gradient - before[1]).norm()) / moved if moved else 0.0)
        before = (point, gradient)
    return Descended(
        step_size=min(1 / (4 * (1 + delay_bound) * job.L), job.c_eta / job.K**0.5),
        mean_square=float(np.mean(squares)),
        steepest=max(secants),
        last=value,
        longest_delay=max(summary.max for summary in run.delays()),
        D=delay_bound,
    )
