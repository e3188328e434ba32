"""Check theorems 1 and 2 (bounded delay) by measurements on scikit-learn's digits.

    python -m experiments.convergence [--out DIR] [--quick] [--workers N]

Writes convergence.png, convergence.svg and results.json. Takes about ten minutes on two cores. --quick takes
seconds, on smaller problems with weaker targets. It needs no data folder.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import nonconvex, strongly_convex
from experiments.convergence_report import (
    Convex,
    Nonconvex,
    Scale,
    draw_convex,
    draw_nonconvex,
    judge_convex,
    judge_nonconvex,
    summary,
)
from experiments.figures import drawing
from experiments.jobs import in_groups, one_thread, run_all
from experiments.results import arguments, publish

FULL = Scale(
    changes=(),
    convexity=1.0,
    updates=200_000,
    practical_updates=50_000,
    seeds=3,
    lengths=(500, 1000, 2000, 4000, 8000, 16_000, 32_000),
    fit_from=2000,
    pilot=4000,
    convex_slopes=(-1.15, -0.85),
    nonconvex_slope=-0.45,
)
QUICK = Scale(
    changes=("data.test_fraction=0.75", "partition.clients=2", "rule.delay_bound=4"),
    convexity=5.0,
    updates=2500,
    practical_updates=1000,
    seeds=1,
    lengths=(250, 800),
    fit_from=250,
    pilot=250,
    convex_slopes=(-2.0, -0.5),
    nonconvex_slope=0.0,
)
PRACTICAL_FIRST_STEP = 0.02


def measure_convex(scale: Scale, workers: int) -> Convex:
    problem = strongly_convex.pose((*scale.changes, f"optimiser.options={{weight_decay={scale.convexity}}}"))
    seeds = range(scale.seeds)
    practical_step = problem.practical_step_size(PRACTICAL_FIRST_STEP)
    jobs = [
        *(strongly_convex.Job(problem, problem.step_size(), scale.updates, seed) for seed in seeds),
        *(strongly_convex.Job(problem, practical_step, scale.practical_updates, seed) for seed in seeds),
    ]
    runs = run_all("theorem 2", strongly_convex.descend, jobs, lambda job: job.updates, workers)
    return Convex(problem, runs[: scale.seeds], runs[scale.seeds :])


def measure_nonconvex(scale: Scale, workers: int) -> Nonconvex:
    smoothness = nonconvex.estimate_smoothness(scale.changes, scale.pilot)
    jobs = [
        nonconvex.Job(smoothness, K, seed, scale.changes)
        for K in scale.lengths
        for seed in range(scale.seeds)
    ]
    runs = run_all("theorem 1", nonconvex.descend, jobs, lambda job: job.K, workers)
    return Nonconvex(smoothness, scale.lengths, in_groups(runs, scale.seeds))


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments("convergence", (__doc__ or "").splitlines()[0]).parse_args(argv)
    scale, workers = (QUICK, 1) if options.quick else (FULL, options.workers)
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    with one_thread():
        convex = measure_convex(scale, workers)
        found = measure_nonconvex(scale, workers)
    with drawing(folder / "convergence", panels=2) as (left, right):
        draw_convex(left, convex)
        draw_nonconvex(right, found)
    verdicts = [*judge_convex(convex, scale), *judge_nonconvex(found, scale)]
    return publish(folder, options.quick, summary(convex, found, scale), verdicts)


if __name__ == "__main__":
    sys.exit(main())
