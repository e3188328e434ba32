"""Runs beside each other: what each reached, and what it took to get as far as all of them got."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich import box
from rich.table import Table

from vafl.observe.record import RecordedRun

_NOTHING = "\N{EN DASH}"  # a centralised run has no clock and sends nothing


@dataclass(frozen=True)
class Comparison:
    """One line: a run's end, and its way to the target (None where it never got there).

    Attributes:
        test, validation: the metric of the models kept, on these rows; None if there are none, or it is not
            known.
    """

    run: str
    rule: str
    test: float | None
    validation: float | None
    seconds: float
    updates: int
    megabytes: float
    seconds_to_target: float | None
    updates_to_target: int | None
    megabytes_to_target: float | None


def distinctly_named(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """The runs, named by their folders."""
    names = distinct_names([run.path for run in runs])
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """As much of the folders' paths as tells them apart."""
    paths = [folder.resolve() for folder in folders]
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(set(paths)):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]


def common_target(runs: Sequence[RecordedRun]) -> float:
    """The best level that every run reached."""
    if runs[0].higher_is_better:
        return min(max(point.metric for point in run.points) for run in runs)
    return max(min(point.metric for point in run.points) for run in runs)


def compare(runs: Sequence[RecordedRun], target: float) -> list[Comparison]:
    """Each run's figures, for a table or as JSON."""
    return [_compared(run, target) for run in runs]


def _compared(run: RecordedRun, target: float) -> Comparison:
    end, there = run.points[-1], run.first_reaching(target)
    return Comparison(
        run=run.name,
        rule=run.summary["rule"],
        test=run.test,
        validation=run.validation,
        seconds=end.seconds,
        updates=end.updates,
        megabytes=(end.bytes_up + end.bytes_down) / 1e6,
        seconds_to_target=None if there is None else there.seconds,
        updates_to_target=None if there is None else there.updates,
        megabytes_to_target=None if there is None else (there.bytes_up + there.bytes_down) / 1e6,
    )


def headings(metric: str, target: float, *, validated: bool = False) -> list[str]:
    """The columns of the table, on a terminal and on a page; `validated` has one more, of validation rows."""
    goal = f"to {target:.4g}"
    return [
        "run",
        f"test {metric}",
        *([f"validation {metric}"] if validated else []),
        "seconds",
        "updates",
        "MB",
        f"seconds {goal}",
        f"updates {goal}",
        f"MB {goal}",
    ]


def cells(line: Comparison, *, validated: bool = False) -> list[str]:
    """One run's cells, in the order of `headings`."""
    timed, sent = line.seconds > 0, line.megabytes > 0
    return [
        line.run,
        _figure(line.test),
        *([_figure(line.validation)] if validated else []),
        f"{line.seconds:,.1f}" if timed else _NOTHING,
        f"{line.updates:,}",
        f"{line.megabytes:,.1f}" if sent else _NOTHING,
        _to_target(line.seconds_to_target) if timed else _NOTHING,
        _to_target(line.updates_to_target),
        _to_target(line.megabytes_to_target) if sent else _NOTHING,
    ]


def _figure(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.4f}"


def _to_target(number: float | None) -> str:
    return "never" if number is None else f"{number:,.3g}" if number < 1000 else f"{number:,.0f}"


def table(lines: Sequence[Comparison], metric: str, target: float) -> Table:
    """The comparison for a terminal."""
    validated = any(line.validation is not None for line in lines)
    on = " (validation, where there are such rows)" if validated else ""
    title = f"what each run reached, and what it took to reach {metric} {target:.4g}{on}"
    shown = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 0 if validated else 1, 0, 0), pad_edge=False)
    for number, heading in enumerate(headings(metric, target, validated=validated)):
        longest = max(map(len, heading.split()))
        side: Literal["left", "right"] = "right" if number else "left"
        shown.add_column(heading, justify=side, no_wrap=number == 0, min_width=longest)
    for line in lines:
        shown.add_row(*cells(line, validated=validated))
    return shown
