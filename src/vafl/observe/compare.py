"""Compare runs: the result of each, and its cost to reach a target that all of them reached."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich import box
from rich.table import Table

from vafl.errors import ConfigError
from vafl.models.metrics import figure, shown_name
from vafl.observe.record import RecordedRun
from vafl.observe.status import Baselines

_NOTHING = "\N{EN DASH}"  # for centralised runs, which have no clock and send nothing


@dataclass(frozen=True)
class Comparison:
    """One line of a comparison: a run's result, and its cost to reach the target.

    Attributes:
        test, validation: the headline metric of the kept models on these rows; None if there are no such rows
            or it is unknown.
        seconds, updates, megabytes: the cost of the complete run.
        seconds_to_target, updates_to_target, megabytes_to_target: the cost to reach the target; None if the
            run never reached it.
        kept: every metric of the kept models, by rows.
        baselines: baseline -> rows -> metric -> value.
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
    kept: Mapping[str, Mapping[str, float | None]]
    baselines: Baselines


def distinctly_named(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Return the runs, each named by its folder; see `distinct_names`."""
    names = distinct_names([run.path for run in runs])
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the folders' paths that are different for different folders."""
    paths = [folder.resolve() for folder in folders]
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(set(paths)):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]


def by_common_metric(runs: Sequence[RecordedRun], name: str | None = None) -> list[RecordedRun]:
    """Return the runs with a common headline metric: `name`, or the headline metric they share.

    Raises:
        ConfigError: the runs have different headline metrics, or a run has not measured `name`.
    """
    shared = [
        name
        for name in runs[0].evaluations[-1].metrics
        if all(name in run.evaluations[-1].metrics for run in runs)
    ]
    headlines = sorted({run.metric for run in runs})
    remedy = f"Choose one with --metric: {', '.join(shared)}." if shared else "They share none."
    if name is None and len(headlines) > 1:
        raise ConfigError(
            "VFL-8001",
            f"compared runs must have the same headline metric. Found {', '.join(headlines)}. {remedy}",
        )
    name = name or headlines[0]
    chosen = [run.by(name) for run in runs]
    for run in chosen:
        if not run.measured:
            raise ConfigError(
                "VFL-8002",
                f'a comparison by {name} needs it in every run. Found none in "{run.name}". {remedy}',
            )
    return chosen


def common_target(runs: Sequence[RecordedRun]) -> float:
    """Return the best value of the headline metric that every run reached."""
    if runs[0].higher_is_better:
        return min(max(value for _, value in run.measured) for run in runs)
    return max(min(value for _, value in run.measured) for run in runs)


def compare(runs: Sequence[RecordedRun], target: float) -> list[Comparison]:
    """Return one line per run, for a table or as JSON."""
    return [_compared(run, target) for run in runs]


def _compared(run: RecordedRun, target: float) -> Comparison:
    end, reached = run.evaluations[-1], run.first_reaching(target)
    return Comparison(
        run=run.name,
        rule=run.summary["rule"],
        test=run.test,
        validation=run.validation,
        seconds=end.seconds,
        updates=end.updates,
        megabytes=(end.bytes_up + end.bytes_down) / 1e6,
        seconds_to_target=None if reached is None else reached.seconds,
        updates_to_target=None if reached is None else reached.updates,
        megabytes_to_target=None if reached is None else (reached.bytes_up + reached.bytes_down) / 1e6,
        kept={rows: run.kept(rows) for rows in ("validation", "test") if run.kept(rows)},
        baselines=run.summary["baselines"],
    )


def headings(metric: str, target: float, *, validated: bool = False) -> list[str]:
    """Return the headings of the table.

    Args:
        validated: whether to add a column for the validation rows.
    """
    goal, metric = f"to {target:.4g}", shown_name(metric)
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
    """Return the cells of one run, in the order of `headings`."""
    timed, sent = line.seconds > 0, line.megabytes > 0
    return [
        line.run,
        figure(line.test),
        *([figure(line.validation)] if validated else []),
        f"{line.seconds:,.1f}" if timed else _NOTHING,
        f"{line.updates:,}",
        f"{line.megabytes:,.1f}" if sent else _NOTHING,
        _to_target(line.seconds_to_target) if timed else _NOTHING,
        _to_target(line.updates_to_target),
        _to_target(line.megabytes_to_target) if sent else _NOTHING,
    ]


def baseline_lines(lines: Sequence[Comparison], metric: str) -> list[str]:
    """Return the result of each baseline on the test rows, with one line for all runs that share it."""
    reached: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        for name, by_rows in line.baselines.items():
            value = figure(by_rows.get("test", {}).get(metric))
            reached.setdefault((name, value), []).append(line.run)
    return [
        f"{name} baseline, test {shown_name(metric)}: {value}"
        + ("" if len(runs) == len(lines) else f" ({', '.join(runs)})")
        for (name, value), runs in reached.items()
    ]


def _to_target(number: float | None) -> str:
    return "never" if number is None else f"{number:,.3g}" if number < 1000 else f"{number:,.0f}"


def table(lines: Sequence[Comparison], metric: str, target: float) -> Table:
    """Return the comparison as a table for a terminal."""
    validated = any(line.validation is not None for line in lines)
    on = " (on validation rows, if the run has them)" if validated else ""
    title = f"result of each run, and its cost to reach {shown_name(metric)} {target:.4g}{on}"
    shown = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 0 if validated else 1, 0, 0), pad_edge=False)
    for number, heading in enumerate(headings(metric, target, validated=validated)):
        longest = max(map(len, heading.split()))
        side: Literal["left", "right"] = "right" if number else "left"
        shown.add_column(heading, justify=side, no_wrap=number == 0, min_width=longest)
    for line in lines:
        shown.add_row(*cells(line, validated=validated))
    return shown


def figures_table(run: RecordedRun) -> Table:
    """Return every metric of a run's kept models and of the baselines, as a table for a terminal."""
    parts = [rows for rows in ("validation", "test") if run.kept(rows)]
    against = parts[-1] if parts else run.watched
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    shown.add_column("metric")
    columns = [(rows, run.kept(rows)) for rows in parts]
    columns += [
        (f"{name} baseline, {against}", run.baseline(name, against)) for name in run.summary["baselines"]
    ]
    for heading, _ in columns:
        shown.add_column(heading, justify="right")
    names = [run.metric, *(name for name in run.evaluations[-1].metrics if name != run.metric)]
    for name in names:
        shown.add_row(shown_name(name), *(figure(figures.get(name)) for _, figures in columns))
    return shown
