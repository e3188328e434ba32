"""The results of a study: figures of each variant over its seeds, and whether the targets are met."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.harness import Found, by_step_size, level_of, mean_end
from experiments.results import Verdict
from experiments.study import ASYNC, CENTRALISED, SYNC, Study, Variant
from experiments.timed_runs import crossing


@dataclass(frozen=True)
class Row:
    """One variant's figures.

    Attributes:
        tuned: whether every step size of the grid was tried, if the grid decides.
        metric, low, high: the final metric: the mean over the seeds, the lowest and the highest.
        seconds, megabytes: until the mean over the seeds reaches the level; None if it never does.
    """

    variant: str
    step_size: float
    tuned: bool
    seeds: int
    metric: float
    low: float
    high: float
    seconds: float | None
    megabytes: float | None
    updates: float
    delay: float
    longest_delay: int
    never: float
    diverged: int


@dataclass(frozen=True)
class Outcome:
    """The measured results of a study.

    Attributes:
        level: the metric whose time was measured.
        horizon: sync's seconds, or the longest run's if the study has no sync.
    """

    study: Study
    found: Sequence[Found]
    rows: Sequence[Row]
    level: float
    horizon: float
    verdicts: Sequence[Verdict]

    def row(self, name: str) -> Row | None:
        """Return a variant's figures, or None if it was not run."""
        return next((row for row in self.rows if row.variant == name), None)


def measure(study: Study, found: Sequence[Found]) -> Outcome:
    """Return all figures and verdicts of a study."""
    sync = next((each.final for each in found if each.variant.name == SYNC), [])
    level = level_of(study, sync)
    rows = [_row(study, found, each, level) for each in found]
    runs = sync or [run for each in found for run in each.final]
    horizon = max(float(run.seconds[-1]) for run in runs)
    by_name = {row.variant: row for row in rows}
    return Outcome(study, found, rows, level, horizon, _judge(study, by_name, level, horizon))


def _is_tuned(study: Study, found: Sequence[Found], variant: Variant) -> bool:
    if variant.step_size or len(study.step_sizes) == 1:
        return True
    source = variant.like or variant.name
    tried = next((each.tuning for each in found if each.variant.name == source), [])
    return len(tried) == len(study.step_sizes) * study.tuning_seeds


def _row(study: Study, every: Sequence[Found], found: Found, level: float) -> Row:
    runs = found.final
    ends = [run.final for run in runs]
    sound = [run for run in runs if not run.diverged]
    timed = sound and all(run.seconds[-1] > 0 for run in sound) and len(sound) == len(runs)
    return Row(
        variant=found.variant.name,
        step_size=runs[0].step_size,
        tuned=_is_tuned(study, every, found.variant),
        seeds=len(runs),
        metric=float(np.mean(ends)),
        low=min(ends),
        high=max(ends),
        seconds=crossing(runs, "seconds", level) if timed else None,
        megabytes=crossing(runs, "megabytes", level) if timed else None,
        updates=float(np.mean([run.run.evaluations[-1].updates for run in runs])),
        delay=float(np.mean([run.delay for run in runs])),
        longest_delay=max(run.longest_delay for run in runs),
        never=float(np.mean([run.never for run in runs])),
        diverged=len(runs) - len(sound),
    )


def _judge(study: Study, rows: dict[str, Row], level: float, horizon: float) -> list[Verdict]:
    verdicts = []
    if study.within is not None and {ASYNC, CENTRALISED} <= rows.keys():
        behind = rows[CENTRALISED].metric - rows[ASYNC].metric
        unit, scale = ("points", 100) if study.metric == "accuracy" else ("", 1)
        verdicts.append(
            Verdict(
                f"async ends below centralised by, in {study.metric}",
                f"{scale * behind:.{2 if scale > 1 else 4}f} {unit}".strip()
                + _seeds(rows[ASYNC], rows[CENTRALISED]),
                f"at most {scale * study.within:g} {unit}".strip(),
                behind <= study.within,
            )
        )
    if study.share is not None and {ASYNC, SYNC} <= rows.keys():
        fast, slow = rows[ASYNC].seconds, rows[SYNC].seconds
        # If sync never reached the level, it would have taken longer than its whole run.
        ratio = None if fast is None else fast / (horizon if slow is None else slow)
        verdicts.append(
            Verdict(
                f"async's seconds to {level:.3f}, as a share of sync's",
                ("not reached" if ratio is None else f"{'below ' if slow is None else ''}{ratio:.2f}")
                + _seeds(rows[ASYNC], rows[SYNC]),
                f"at most {study.share:g}",
                ratio is not None and ratio <= study.share,
            )
        )
    return verdicts


def _seeds(one: Row, other: Row) -> str:
    """Describe the number of seeds; one seed gives only a first impression."""
    fewest = min(one.seeds, other.seeds)
    return f" ({fewest} seed{'s' if fewest > 1 else ''})"


def as_document(outcome: Outcome) -> dict[str, Any]:
    """Return the results for results.json, without infinite values and NaN."""
    study, top = outcome.study, outcome.row(CENTRALISED)
    return {
        "title": study.title,
        "paper": study.paper,
        "metric": study.metric,
        "tried_before": study.before,
        "level": outcome.level if np.isfinite(outcome.level) else None,
        "step_sizes": list(study.step_sizes),
        "centralised": None if top is None else top.metric,
        "variants": {row.variant: vars(row) for row in outcome.rows},
        "tuning": {
            each.variant.name: {
                f"{size:g}": mean_end(runs) for size, runs in by_step_size(each.tuning).items()
            }
            for each in outcome.found
            if each.tuning
        },
        "verdicts": [vars(verdict) for verdict in outcome.verdicts],
        "holds": all(verdict.holds for verdict in outcome.verdicts) if outcome.verdicts else None,
    }
