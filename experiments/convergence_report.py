"""The results of the convergence experiment: verdicts, the plot, and all figures for results.json."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from experiments import nonconvex, strongly_convex
from experiments.figures import BLUE, GREEN, GREY, ORANGE, band
from experiments.rates import slope
from experiments.results import Verdict
from vafl.arrays import Doubles


@dataclass(frozen=True)
class Scale:
    """The size of the experiment, and its targets.

    Attributes:
        changes: changes to the configuration of both problems.
        convexity: mu, the strongly convex problem's regulariser.
        updates, practical_updates: K with theorem 2's step size, and with practical constants.
        lengths: the K of theorem 1's runs; the slope is fitted over `fit_from` and longer.
        convex_slopes: lowest and highest slope accepted for O(1/K).
        nonconvex_slope: the highest slope accepted for O(1/sqrt(K)).
    """

    changes: tuple[str, ...]
    convexity: float
    updates: int
    practical_updates: int
    seeds: int
    lengths: tuple[int, ...]
    fit_from: int
    pilot: int
    convex_slopes: tuple[float, float]
    nonconvex_slope: float


@dataclass(frozen=True)
class Convex:
    """All runs of theorem 2."""

    problem: strongly_convex.Problem
    runs: list[strongly_convex.Descended]
    practical: list[strongly_convex.Descended]

    @property
    def bound(self) -> Doubles:
        """Return theorem 2's bound for these runs, with the noise that they met."""
        start = float(np.mean([run.gaps[0] for run in self.runs]))
        variances = np.max([run.variances for run in self.runs], axis=0)
        shares = np.mean([run.shares for run in self.runs], axis=0)
        return self.problem.bound(iterations(self.runs), start, variances, shares)


@dataclass(frozen=True)
class Nonconvex:
    """All runs of theorem 1: one row of `runs` for each K, one column for each seed."""

    L: float
    lengths: tuple[int, ...]
    runs: list[list[nonconvex.Descended]]

    @property
    def mean_squares(self) -> Doubles:
        """[seeds, lengths]."""
        return np.array([[run.mean_square for run in row] for row in self.runs]).T


def iterations(runs: Sequence[strongly_convex.Descended]) -> Doubles:
    return np.array(runs[0].iterations, dtype=float)


def mean_gaps(runs: Sequence[strongly_convex.Descended]) -> Doubles:
    gaps: Doubles = np.mean([run.gaps for run in runs], axis=0)
    return gaps


def judge_convex(convex: Convex, scale: Scale) -> list[Verdict]:
    low, high = scale.convex_slopes
    problem, target = convex.problem, f"{low} to {high}"
    verdicts = []
    for name, runs in (
        ("theorem 2's step size", convex.runs),
        ("same form, practical constants", convex.practical),
    ):
        found = slope(iterations(runs), mean_gaps(runs), runs[0].iterations[-1] / 10)
        verdicts.append(Verdict(f"slope of F - F*, {name}", f"{found:.3f}", target, low <= found <= high))
    # The bound is about the mean. Three seeds estimate it badly over the first steps, so compare from K0 on.
    late = iterations(convex.runs) >= problem.K0
    tightest = float(np.max((mean_gaps(convex.runs) / convex.bound)[late]))
    longest = max(run.longest_delay for run in (*convex.runs, *convex.practical))
    rarest = min(min(run.shares) for run in (*convex.runs, *convex.practical))
    return [
        *verdicts,
        Verdict(
            "largest (F - F*) / theorem 2's bound, from K0 on", f"{tightest:.4f}", "at most 1", tightest <= 1
        ),
        Verdict("longest delay used (convex)", str(longest), f"D = {problem.D}", longest <= problem.D),
        Verdict(
            "rarest client's share of steps",
            f"{rarest:.3f}",
            f"q_min = {problem.q_min:.3f}",
            rarest >= problem.q_min,
        ),
    ]


def judge_nonconvex(found: Nonconvex, scale: Scale) -> list[Verdict]:
    runs = [run for row in found.runs for run in row]
    steepest = max(run.steepest for run in runs)
    longest = max(run.longest_delay for run in runs)
    fitted = slope(found.lengths, found.mean_squares.mean(axis=0), scale.fit_from)
    return [
        Verdict(
            "slope of mean |grad F|^2, theorem 1's step size",
            f"{fitted:.3f}",
            f"at most {scale.nonconvex_slope}",
            fitted <= scale.nonconvex_slope,
        ),
        Verdict("steepest secant on the paths", f"{steepest:.3f}", f"L = {found.L:.3f}", steepest <= found.L),
        Verdict("longest delay used (nonconvex)", str(longest), f"D = {runs[0].D}", longest <= runs[0].D),
    ]


def draw_convex(axes: Axes, convex: Convex) -> None:
    ks, offset = iterations(convex.runs), convex.problem.K0
    axes.plot(ks, convex.bound, color=GREY, linestyle="--", label="theorem 2's bound")
    band(axes, ks, [np.array(run.gaps) for run in convex.runs], BLUE, "theorem 2's step size")
    gaps = [np.array(run.gaps) for run in convex.practical]
    band(axes, iterations(convex.practical), gaps, ORANGE, "same form, practical constants")
    guide = ks[ks >= ks[-1] / 10]
    axes.plot(guide, 2.5 * mean_gaps(convex.runs)[-1] * ks[-1] / guide, "k:", linewidth=1, label="slope $-1$")
    axes.axvline(offset, color=BLUE, linewidth=0.6, alpha=0.6)
    axes.annotate(
        "$K_0$", (offset, 0.97), (3, 0), xycoords=("data", "axes fraction"), textcoords="offset points",
        color=BLUE, va="top",
    )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="global iteration $K$", ylabel=r"$F(\theta^K) - F^*$")
    axes.set_title("(a) strongly convex: logistic regression")
    axes.legend(loc="lower left")


def draw_nonconvex(axes: Axes, found: Nonconvex) -> None:
    ks = np.array(found.lengths, dtype=float)
    band(axes, ks, list(found.mean_squares), GREEN, "theorem 1's step size", marker="o", markersize=3)
    last = found.mean_squares.mean(axis=0)[-1]
    axes.plot(ks, 1.3 * last * np.sqrt(ks[-1] / ks), "k:", linewidth=1, label=r"slope $-1/2$")
    axes.set(xscale="log", yscale="log", xlabel="iterations of the run $K$")
    axes.set_ylabel(r"$\frac{1}{K}\sum_k \|\nabla F(\theta^k)\|^2$")
    axes.set_title("(b) nonconvex: perceptrons, linear head")
    axes.legend(loc="lower left")


def summary(convex: Convex, found: Nonconvex, scale: Scale) -> dict[str, Any]:
    """Return all measured figures, for results.json."""
    problem = convex.problem
    tail = problem.K0 + iterations(convex.runs)
    return {
        "strongly_convex": {
            "problem": {**asdict(problem), "K0": problem.K0},
            "slope_against_K_plus_K0": slope(tail, mean_gaps(convex.runs), tail[-1] / 10),
            "bound": convex.bound.tolist(),
            "theorem": [asdict(run) for run in convex.runs],
            "practical": [asdict(run) for run in convex.practical],
        },
        "nonconvex": {
            "L": found.L,
            "lengths": list(found.lengths),
            "fit_from": scale.fit_from,
            "runs": [[asdict(run) for run in row] for row in found.runs],
        },
    }
