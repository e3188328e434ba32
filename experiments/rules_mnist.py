"""Which update rule is fastest on MNIST, each at its own best step size?

    python -m experiments.rules_mnist --data DIR [--out DIR] [--quick] [--workers N]

DIR holds mnist/ with the four original files. Every rule gets the same grid of step sizes; the best is
chosen on held-out training rows, by the seconds to the target accuracy, then by the final accuracy. Then it
is trained on all training rows with several seeds, and only those runs see the test rows. Seconds are those
of the simulator's virtual clock, with the paper's Poisson delays and links that cost no time. After the comma
stands what is refreshed besides the batch; "none" is Algorithm 1 as written.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments import figures
from experiments.jobs import in_groups, run_all
from experiments.results import arguments
from experiments.rules_report import CENTRALISED, LOOKAHEAD, SYNC, Found, Rule, Scale, report
from experiments.timed_runs import Job, Timed, train
from vafl.errors import VaflError

RULES = (
    Rule(LOOKAHEAD, (), figures.BLUE, cost=3),
    Rule("async, all rows", ("schedule.refresh=all",), figures.GREEN, cost=7),
    Rule("async, 3000 random", ("schedule.refresh=random:3000",), figures.ORANGE, cost=2),
    Rule("async, none", ("schedule.refresh=none",), figures.RED),
    Rule(
        "async, none, i.i.d.",
        ("schedule.refresh=none", "schedule.kind=iid"),
        figures.PURPLE,
        "--",
    ),
    Rule("3-sync, look-ahead", ("rule.name=t-sync", "rule.t=3"), figures.SKY, cost=3),
    Rule(SYNC, ("rule.name=sync",), figures.BLACK, cost=0.5),
)


FULL = Scale((0.25, 0.5, 1.0, 2.0, 4.0), 5, tuning_seconds=120.0, seconds=250.0, ceiling_updates=3000)
QUICK = Scale((0.5, 1.0), 1, 10.0, 20.0, ceiling_updates=100, target=0.80, speed=1.0, loss=5.0)


def ceiling(scale: Scale) -> Rule:
    """The centralised run, which has no clock: it is stopped and measured by its updates."""
    stop = ("stop.seconds=0", f"stop.updates={scale.ceiling_updates}")
    looks = ("evaluation.every_seconds=0", "evaluation.every=50")
    return Rule(CENTRALISED, ("rule.name=centralised", *stop, *looks), figures.GREY)


def tune(rules: Sequence[Rule], scale: Scale, folder: str, workers: int) -> list[list[Timed]]:
    """Each rule's runs with every step size, measured on the held-out rows."""
    jobs = [
        _job(rule, scale.tuning_seconds, folder, step_size, seed=0, validation=True)
        for rule in rules
        for step_size in scale.step_sizes
    ]
    runs = run_all("choosing step sizes", train, jobs, lambda job: job.cost, workers)
    return in_groups(runs, len(scale.step_sizes))


def finish(
    rules: Sequence[Rule], best: Sequence[float], scale: Scale, folder: str, workers: int
) -> list[list[Timed]]:
    """Each rule's runs with its best step size and every seed, measured on the test rows."""
    jobs = [
        _job(rule, scale.seconds, folder, step_size, seed, validation=False)
        for rule, step_size in zip(rules, best, strict=True)
        for seed in range(scale.seeds)
    ]
    runs = run_all("final runs", train, jobs, lambda job: job.cost, workers)
    return in_groups(runs, scale.seeds)


def _job(rule: Rule, seconds: float, folder: str, step_size: float, seed: int, *, validation: bool) -> Job:
    changes = (f"stop.seconds={seconds}", *rule.changes)
    return Job(Path(__file__).with_suffix(".toml"), changes, folder, validation, step_size, seed, rule.cost)


def best_step_size(runs: Sequence[Timed], target: float) -> float:
    """By the seconds to the target, then by the final accuracy; runs that diverged come last."""

    def merit(run: Timed) -> tuple[float, float]:
        seconds = run.seconds_to(target)
        return (math.inf if seconds is None or run.diverged else seconds, -run.final)

    return min(runs, key=merit).step_size


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments("rules_mnist", (__doc__ or "").splitlines()[0]).parse_args(argv)
    scale, workers = (QUICK, 1) if options.quick else (FULL, options.workers)
    folder = "" if options.data is None else str(options.data)
    rules = (*RULES, ceiling(scale))
    try:
        tuning = tune(rules, scale, folder, workers)
        best = [best_step_size(runs, scale.target) for runs in tuning[:-1]]
        best.append(max(tuning[-1], key=lambda run: run.final).step_size)
        final = finish(rules, best, scale, folder, workers)
    except VaflError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return error.exit_code
    return report(
        options.out, options.quick, [Found(*each) for each in zip(rules, tuning, final, strict=True)], scale
    )


if __name__ == "__main__":
    sys.exit(main())
