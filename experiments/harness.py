"""Make the runs of a study: choose the step sizes first, then run the best of each variant with every seed.

Step sizes are chosen on held-out training rows. Only the final runs use the test rows.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.jobs import run_all
from experiments.study import CENTRALISED, FOLDER, SYNC, Study, Variant
from experiments.timed_runs import Job, Timed, crossing, train, was_made


@dataclass(frozen=True)
class Found:
    """A variant's tuning runs, and its final runs with the best step size."""

    variant: Variant
    tuning: list[Timed]
    final: list[Timed]


@dataclass(frozen=True)
class Place:
    """The folders of a study.

    Attributes:
        data: the folder of the data sets ("": VAFL_DATA).
        out: where run folders are kept.
        made_only: use only existing runs, and make none.
    """

    data: str
    out: Path
    workers: int = 1
    made_only: bool = False


def run_study(study: Study, place: Place) -> list[Found]:
    """Return all runs of a study: existing ones from their folders, and the rest newly made."""
    tuning = _tune(study, place)
    level = level_of(study, tuning.get(SYNC, []))
    chosen = {
        name: best_step_size(runs, level, study.as_good if name != CENTRALISED else 0)
        for name, runs in tuning.items()
    }
    jobs = [
        (variant.name, _job(study, variant, place, step_size, seed, validation=False))
        for variant in study.variants
        if (step_size := variant.step_size or chosen.get(variant.like or variant.name, study.step_sizes[0]))
        for seed in range(min(study.seeds, variant.seeds or study.seeds))
    ]
    final = _run(f"{study.name}: final runs", jobs, place)
    return [
        Found(variant, tuning.get(variant.name, []), final[variant.name])
        for variant in study.variants
        if variant.name in final
    ]


def _tune(study: Study, place: Place) -> dict[str, list[Timed]]:
    """Return the tuning runs of each variant that must find its step size: one per step size of the grid."""
    if len(study.step_sizes) == 1:
        return {}
    jobs = [
        (variant.name, _job(study, variant, place, step_size, seed, validation=True))
        for variant in study.variants
        if not (variant.like or variant.step_size)
        for step_size in study.step_sizes
        for seed in range(study.tuning_seeds)
    ]
    return _run(f"{study.name}: step sizes", jobs, place)


def _run(label: str, jobs: Sequence[tuple[str, Job]], place: Place) -> dict[str, list[Timed]]:
    """Make the final runs of each variant."""
    wanted = [(name, job) for name, job in jobs if not place.made_only or was_made(job)]
    tell = None if place.made_only else _tell
    runs = run_all(label, train, [job for _, job in wanted], workers=place.workers, tell=tell)
    found: dict[str, list[Timed]] = {}
    for (name, _), run in zip(wanted, runs, strict=True):
        found.setdefault(name, []).append(run)
    return found


def level_of(study: Study, sync: Sequence[Timed]) -> float:
    """Return the metric whose time is measured: the study's own, or a little below sync's final metric.

    Sync's final metric is the mean over its seeds, with its best step size.
    """
    if study.level:
        return study.level
    return max((mean_end(runs) for runs in by_step_size(sync).values()), default=math.inf) - study.drop


def by_step_size(runs: Sequence[Timed]) -> dict[float, list[Timed]]:
    found: dict[float, list[Timed]] = {}
    for run in runs:
        found.setdefault(run.step_size, []).append(run)
    return found


def mean_end(runs: Sequence[Timed]) -> float:
    return sum(run.final for run in runs) / len(runs)


def best_step_size(runs: Sequence[Timed], level: float, as_good: float) -> float:
    """Return the fastest step size to the level, of those that end at most `as_good` below the best.

    If none reaches the level, return the best.
    """
    ends = {step_size: mean_end(own) for step_size, own in by_step_size(runs).items()}
    best = max(ends.values())
    good = [step_size for step_size, end in ends.items() if end >= best - as_good]
    times = {each: crossing(by_step_size(runs)[each], "seconds", level) for each in good}
    reached = {each: seconds for each, seconds in times.items() if seconds is not None}
    return min(reached, key=reached.__getitem__) if reached else max(ends, key=ends.__getitem__)


def _job(
    study: Study, variant: Variant, place: Place, step_size: float, seed: int, *, validation: bool
) -> Job:
    shorter = (f"stop.seconds={study.tuning_seconds}",) if validation and study.tuning_seconds else ()
    changes = (*shorter, *variant.set, *(study.quick if study.is_quick else ()))
    split = "validation" if validation else "test"
    folder = place.out / study.name / slug(variant.name) / f"{split}-step{step_size:g}-seed{seed}"
    toml = FOLDER / f"{study.name}.toml"
    held_out = study.held_out if validation else 0.0
    return Job(toml, changes, place.data, folder, held_out, step_size, seed)


def slug(name: str) -> str:
    """Return a name in a form that is safe in a path."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _tell(job: Job, run: Timed) -> str:
    end = "diverged" if run.diverged else f"{run.final:.4f}"
    return f"  {job.out.parent.name}/{job.out.name}: {end} after {run.seconds[-1]:.0f} s"
