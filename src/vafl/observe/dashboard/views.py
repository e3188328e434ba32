"""Read runs from their folders while they train: their state, evaluations and metrics."""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vafl.errors import RunFolderError
from vafl.observe.compare import distinct_names
from vafl.observe.evaluation import Evaluation
from vafl.observe.record import HISTORY, SUMMARY
from vafl.observe.status import STATUS, Baselines, Status, checked_baselines, checked_figures

MOST_RUNS = 24  # runs shown, the most recently changed first
_MOST_EVALUATIONS = 400  # evaluations of a run sent to the page; a screen cannot show more
_ALIVE = 10.0  # seconds without a new status after which a run counts as silent
Kept = Mapping[str, Mapping[str, float | None]]
_DEPTHS = ("", "*/", "*/*/")  # where to search for runs in a folder


@dataclass(frozen=True)
class View:
    """The state of a run, as its folder shows it.

    Attributes:
        state: "running", "waiting", "ended", "interrupted", or "silent" if the run has not ended but has
            stopped writing its status.
        why: the reason why it ended, or what it waits for.
        metric: the name of the headline metric; empty if unknown.
        rows: the rows that evaluations use, "validation" or "test".
        kept: every metric of the kept models, by rows; empty until the run has ended.
        baselines: baseline -> rows -> metric -> value.
    """

    name: str
    state: str
    why: str
    status: Status | None
    evaluations: Sequence[Evaluation]
    metric: str
    rows: str
    kept: Kept
    baselines: Baselines

    def as_json(self) -> dict[str, Any]:
        """Return the view as JSON, with at most `_MOST_EVALUATIONS` evaluations, no NaN and no infinity."""
        facts: dict[str, Any] = asdict(self)
        facts["evaluations"] = [
            {name: _finite(value) for name, value in asdict(evaluation).items()}
            for evaluation in _thinned(self.evaluations)
        ]
        return facts


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the run folders in these folders, up to two levels deep, the most recently changed first.

    Raises:
        RunFolderError: a folder does not exist.
    """
    for folder in folders:
        if not folder.is_dir():
            raise RunFolderError(
                "VFL-8011",
                f'`vafl watch` needs run folders, or folders that contain some. "{folder}" is not a folder. '
                "Check its path.",
            )
    runs = {run.resolve(): run for folder in folders for run in _runs_in(folder)}
    return sorted(runs.values(), key=_changed, reverse=True)


def look(folders: Sequence[Path]) -> tuple[list[View], int]:
    """Return the most recently changed runs, and the number of runs that are left out."""
    every_run = find_runs(folders)
    runs = every_run[:MOST_RUNS]
    views = [view(run, name) for run, name in zip(runs, distinct_names(runs), strict=True)]
    return views, len(every_run) - len(runs)


def view(run: Path, name: str) -> View:
    """Return the view of one run.

    Its files may come from another version or be incomplete. Unreadable parts are left out.
    """
    status, summary = _status(run), _document(run / SUMMARY)
    if summary is not None:
        state, why = "interrupted" if summary.get("interrupted") else "ended", str(summary.get("ended", ""))
    elif status is None or time.time() - status.at > _ALIVE:
        state, why = "silent", "the run has stopped writing its status; its log may say why"
    elif status.waiting:
        state, why = "waiting", status.waiting
    else:
        state, why = "running", ""
    return View(name, state, why, status, list(_evaluations(run)), *_figures(status, summary or {}))


def _figures(status: Status | None, summary: dict[str, Any]) -> tuple[str, str, Kept, Baselines]:
    """Return metric, rows, kept and baselines of a View, from the summary if there is one."""
    metric, rows = ("", "test") if status is None else (status.metric, status.rows)
    kept: Kept = {}
    baselines: Baselines = {} if status is None else status.baselines
    with suppress(TypeError, KeyError, AttributeError):  # from another version, or damaged
        metric, rows = str(summary["metric"]["name"]), str(summary["watched"])
        parts = {part: summary["kept"][part] for part in ("validation", "test")}
        kept = {part: checked_figures(figures) for part, figures in parts.items() if figures is not None}
        baselines = checked_baselines(summary["baselines"])
    return metric, rows, kept, baselines


def _runs_in(folder: Path) -> Iterator[Path]:
    for depth in _DEPTHS:
        yield from (history.parent for history in folder.glob(f"{depth}{HISTORY}"))


def _changed(run: Path) -> float:
    """Return when the run last changed. An active run rewrites its status twice a second."""
    times = [0.0]
    for name in (HISTORY, STATUS):
        with suppress(OSError):
            times.append((run / name).stat().st_mtime)
    return max(times)


def _status(run: Path) -> Status | None:
    document = _document(run / STATUS)
    try:
        return None if document is None else Status.of(document)
    except TypeError:
        return None


def _document(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _evaluations(run: Path) -> Iterator[Evaluation]:
    """Yield the evaluations of a run up to the first unreadable line. The last line may be incomplete."""
    try:
        for line in (run / HISTORY).read_bytes().splitlines():
            evaluation = Evaluation(**json.loads(line))
            yield replace(
                evaluation, metrics={name: _number(value) for name, value in evaluation.metrics.items()}
            )
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return


def _thinned(evaluations: Sequence[Evaluation]) -> Sequence[Evaluation]:
    """Return at most `_MOST_EVALUATIONS` evaluations at equal distances, including the last."""
    every = math.ceil(len(evaluations) / _MOST_EVALUATIONS) or 1
    return evaluations[(len(evaluations) - 1) % every :: every]


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
