"""A run as it is seen from outside: what its folder holds, whether it goes on, has ended or broke off."""

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

MOST_RUNS = 24  # that are shown, those that changed last
_MOST_POINTS = 400  # of a run: as many as a screen can show apart
_ALIVE = 10.0  # seconds; a run writes its status twice in each
Kept = Mapping[str, Mapping[str, float | None]]
_DEPTHS = ("", "*/", "*/*/")  # where runs may lie in a folder


@dataclass(frozen=True)
class View:
    """A run.

    Attributes:
        state: "running", "waiting", "ended", "interrupted", or "silent": it neither ended nor says anything.
        why: it ended, or what it waits for.
        metric: the name of the headline metric; empty if it is not known.
        rows: which rows the evaluations use, "validation" or "test".
        kept: every metric of the models that a run has kept, by rows; empty while it goes on.
        baselines: what it has to beat: baseline -> rows -> metric -> value.
    """

    name: str
    state: str
    why: str
    status: Status | None
    points: Sequence[Evaluation]
    metric: str
    rows: str
    kept: Kept
    baselines: Baselines

    def as_json(self) -> dict[str, Any]:
        """For the page: as many points as it can show, and nothing that JSON has no word for."""
        facts: dict[str, Any] = asdict(self)
        facts["points"] = [
            {name: _finite(value) for name, value in asdict(point).items()} for point in _thinned(self.points)
        ]
        return facts


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The run folders among these, and up to two levels below them; those that changed last come first.

    Raises:
        RunFolderError: one of them is not there.
    """
    for folder in folders:
        if not folder.is_dir():
            raise RunFolderError(
                "VFL-8011",
                f'what is watched must be a run folder, or one that has some. Found no folder "{folder}".',
            )
    found = {run.resolve(): run for folder in folders for run in _in(folder)}
    return sorted(found.values(), key=_changed, reverse=True)


def look(folders: Sequence[Path]) -> tuple[list[View], int]:
    """The runs that changed last, as they are now; how many there are besides."""
    found = find_runs(folders)
    runs = found[:MOST_RUNS]
    views = [view(run, name) for run, name in zip(runs, distinct_names(runs), strict=True)]
    return views, len(found) - len(runs)


def view(run: Path, name: str) -> View:
    """One run. Its files may be another version's, or half written: what is unreadable is left out."""
    status, summary = _status(run), _document(run / SUMMARY)
    if summary is not None:
        state, why = "interrupted" if summary.get("interrupted") else "ended", str(summary.get("ended", ""))
    elif status is None or time.time() - status.at > _ALIVE:
        state, why = "silent", "no sign of life from it; its log may say why"
    elif status.waiting:
        state, why = "waiting", status.waiting
    else:
        state, why = "running", ""
    return View(name, state, why, status, list(_points(run)), *_figures(status, summary or {}))


def _figures(status: Status | None, summary: dict[str, Any]) -> tuple[str, str, Kept, Baselines]:
    """Return metric, rows, kept and baselines of a View, from the summary where there is one."""
    metric, rows = ("", "test") if status is None else (status.metric, status.rows)
    kept: Kept = {}
    baselines: Baselines = {} if status is None else status.baselines
    with suppress(TypeError, KeyError, AttributeError):  # another version's, or damaged
        metric, rows = str(summary["metric"]["name"]), str(summary["watched"])
        parts = {part: summary["kept"][part] for part in ("validation", "test")}
        kept = {part: checked_figures(figures) for part, figures in parts.items() if figures is not None}
        baselines = checked_baselines(summary["baselines"])
    return metric, rows, kept, baselines


def _in(folder: Path) -> Iterator[Path]:
    for depth in _DEPTHS:
        yield from (history.parent for history in folder.glob(f"{depth}{HISTORY}"))


def _changed(run: Path) -> float:
    """When; the status of a run that goes on is newer than anything."""
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


def _points(run: Path) -> Iterator[Evaluation]:
    """Its evaluations; of the last one, half a line may be there."""
    try:
        for line in (run / HISTORY).read_bytes().splitlines():
            point = Evaluation(**json.loads(line))
            yield replace(point, metrics={name: _number(value) for name, value in point.metrics.items()})
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return


def _thinned(points: Sequence[Evaluation]) -> Sequence[Evaluation]:
    """The last one, and so many evenly before it."""
    every = math.ceil(len(points) / _MOST_POINTS) or 1
    return points[(len(points) - 1) % every :: every]


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
