"""Theorem 2: F strongly convex, delays bounded, eta^k = 4 / (mu q_min (k + K0)) gives F - F* = O(1/K).

The problem is softmax regression, all of it regularised (the head's bias, too), so its constants are
known: mu is the regulariser's, L a bound on the Hessian's largest eigenvalue, q_min the activation
probability of the slowest client. F* comes from L-BFGS in float64 on the same objective.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from experiments.objective import Objective
from experiments.runs import make_run, parameters_of, point_of, visit
from vafl.arrays import Doubles
from vafl.run.assembly import Run
from vafl.simulation.simulator import Simulator

TOML = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Problem:
    """Theorem 2's constants, named as in the paper, and the solution.

    Attributes:
        changes: changes to strongly_convex.toml, as `section.key=value`. L_record: a bound on the smoothness
        of every single record. The proof needs it to bound the effect of stale
            embeddings, although assumption 2 requires only the smoothness of F.
        accuracy: on the test rows, at the minimum.
        slack: the solver's error: F(found) - F* <= |grad F|^2 / (2 mu).
    """

    changes: tuple[str, ...]
    L: float
    L_record: float
    mu: float
    D: int
    q_min: float
    minimum: float
    accuracy: float
    slack: float

    @property
    def K0(self) -> float:  # noqa: N802
        """Return the offset of theorem 2's step size."""
        return self._inverse_first_step * 4 / (self.mu * self.q_min)

    @property
    def _inverse_first_step(self) -> float:
        return 4 * (self.D + 1) * self.L + 2 * self.mu * self.q_min * self.D

    def step_size(self) -> tuple[str, ...]:
        """Return theorem 2's step size, as changes to the configuration."""
        constants = f"{{L={self.L!r}, mu={self.mu!r}, D={self.D}, q_min={self.q_min!r}}}"
        return ("optimiser.schedule=strongly-convex-bounded", f"optimiser.constants={constants}")

    def practical_step_size(self, first: float) -> tuple[str, ...]:
        """Return a step size a / (k + K0) that starts at `first`, with the smallest a that keeps the rate."""
        numerator = 1 / (self.mu * self.q_min)
        constants = f"{{numerator={numerator!r}, offset={numerator / first!r}}}"
        return ("optimiser.schedule=harmonic", f"optimiser.constants={constants}")

    def bound(self, iterations: Doubles, start: float, variances: Doubles, shares: Doubles) -> Doubles:
        """Return theorem 2's bound at each K for F(start) - F* = `start`: the last line of the proof.

        Its second term has q_min^2 instead of q_min, because the square of the step size adds one more.

        Args:
            variances: sigma_0^2, then sigma_m^2 of each client.
            shares: q_m of each client.
        """
        gamma = 2 * self.D**2 * self.L**2 / self._inverse_first_step
        noise = self.L * variances[0] + (2 * gamma + self.L) * float(shares @ variances[1:])
        later = iterations + self.K0 - 1
        forgotten = ((self.K0 - 1) / later) ** 2 * start
        noisy: Doubles = 16 * noise * iterations / (self.mu * self.q_min * later) ** 2
        return forgotten + noisy


@dataclass(frozen=True)
class Job:
    """One run: its step size, length and seed."""

    problem: Problem
    step_size: tuple[str, ...]
    updates: int
    seed: int


@dataclass(frozen=True)
class Descended:
    """The results of one run.

    Attributes:
        gaps: F - F* at each of `iterations`.
        variances: the largest sigma_0^2, ..., sigma_M^2 along the run, for single records.
        shares: each client's share of the activations.
        requests: fresh embeddings that the server had to request, per step.
    """

    iterations: list[int]
    gaps: list[float]
    variances: list[float]
    shares: list[float]
    longest_delay: int
    requests: float


def pose(changes: tuple[str, ...] = ()) -> Problem:
    """Return the problem's constants and its solution."""
    run = make_run(TOML, changes, seed=0)
    objective = Objective(run)
    solution = objective.minimise(point_of(run))
    minimum, gradient = objective(solution)
    vector_to_parameters(solution.float(), parameters_of(run))  # for the evaluator
    mu = float(run.config.optimiser.options["weight_decay"])
    inputs = _inputs(run)
    largest = float(torch.linalg.eigvalsh(inputs.T @ inputs / len(inputs))[-1])
    rates = [1 / number for number in range(1, len(run.models) + 1)]
    return Problem(
        changes=changes,
        # The Hessian of the softmax loss in its outputs is diag(p) - p p^T, which is at most 1/2.
        L=largest / 2 + mu,
        L_record=float(inputs.square().sum(1).max()) / 2 + mu,
        mu=mu,
        D=run.config.rule.delay_bound,
        q_min=rates[-1] / sum(rates),
        minimum=minimum,
        accuracy=run.evaluator()["accuracy"] or 0.0,
        slack=float(gradient @ gradient) / (2 * mu),
    )


def descend(job: Job) -> Descended:
    """Run the algorithm, and measure F - F* at iteration 0 and about 30 times per decade."""
    run = make_run(TOML, [*job.problem.changes, *job.step_size], job.seed)
    objective = Objective(run)
    spread = np.geomspace(1, job.updates, 30 * len(str(job.updates)))
    looks = [0, *np.unique(spread.astype(int)).tolist()]
    gaps, variances = [], []
    for point in visit(run, looks):
        gaps.append(objective(point)[0] - job.problem.minimum)
        variances.append(_variances(run, objective.outputs(point)))
    assert isinstance(run.runtime, Simulator)
    server = run.runtime.server
    return Descended(
        iterations=looks,
        gaps=gaps,
        variances=np.max(variances, axis=0).tolist(),
        shares=(np.array(server.activations) / sum(server.activations)).tolist(),
        longest_delay=max(summary.max for summary in run.delays()),
        requests=server.requests.made / server.iteration,
    )


def _inputs(run: Run) -> Tensor:
    """Return the inputs of the outputs: all features, a 1 for each client's bias, a 1 for the head's."""
    features = [party.features[run.data.train].double() for party in run.data.parties]
    ones = torch.ones(run.data.rows, len(features) + 1, dtype=torch.float64)
    return torch.cat([*features, ones], dim=1)


def _variances(run: Run, outputs: Tensor) -> list[float]:
    """Return E|g - grad F|^2 of one record's gradient: for the head, then for each client."""
    labels = run.data.labels[run.data.train]
    residuals = torch.softmax(outputs, 1) - F.one_hot(labels, outputs.shape[1])
    ones = torch.ones(len(labels), 1, dtype=torch.float64)
    blocks = [
        ones,
        *(torch.cat([party.features[run.data.train].double(), ones], 1) for party in run.data.parties),
    ]
    sizes = residuals.square().sum(1)
    means = [residuals.T @ block / len(labels) for block in blocks]
    return [
        float((sizes * block.square().sum(1)).mean() - mean.square().sum())
        for block, mean in zip(blocks, means, strict=True)
    ]
