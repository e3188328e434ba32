"""The harness of all benchmarks: define, time, save and show them.

A benchmark is a function that returns a `Figure`, decorated with its target, in any module of this
package. It needs no other registration.
"""

import gc
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from statistics import quantiles
from time import perf_counter
from typing import Any, Literal

from rich.table import Table

Entries = dict[str, dict[str, Any]]
REPEATS = 25


@dataclass(frozen=True)
class Figure:
    """The result of a benchmark: the median of its samples, one per repeat."""

    samples: Sequence[float]
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def quartiles(self) -> tuple[float, float, float]:
        if len(self.samples) == 1:
            return (self.samples[0],) * 3
        lower, median, upper = quantiles(self.samples, n=4, method="inclusive")
        return lower, median, upper

    def summary(self) -> dict[str, Any]:
        """Return the figure as plain values, for the detail of another figure."""
        lower, median, upper = self.quartiles
        return {"value": median, "quartiles": [lower, upper], **self.detail}


@dataclass(frozen=True)
class Benchmark:
    """A benchmark and its target."""

    name: str
    measure: Callable[[], Figure]
    target: float
    unit: str
    better: Literal["higher", "lower"]

    def entry(self) -> dict[str, Any]:
        """Run the benchmark and return its entry of bench.json."""
        figure = self.measure()
        lower, median, upper = figure.quartiles
        return {
            "value": median,
            "target": self.target,
            "unit": self.unit,
            "better": self.better,
            "repeats": len(figure.samples),
            "detail": {"quartiles": [lower, upper], **figure.detail},
        }


def benchmark(
    *, target: float, unit: str = "ratio", better: Literal["higher", "lower"] = "lower"
) -> Callable[[Callable[[], Figure]], Benchmark]:
    """Turn a function into a benchmark of the same name."""
    return lambda measure: Benchmark(measure.__name__, measure, target, unit, better)


def discover(package: str) -> dict[str, Benchmark]:
    """Return all benchmarks in the modules of a package, by name."""
    paths = import_module(package).__path__
    names = [f"{package}.{module.name}" for module in iter_modules(paths) if module.name != "__main__"]
    found = [value for name in names for value in vars(import_module(name)).values()]
    return {value.name: value for value in found if isinstance(value, Benchmark)}


def select(benchmarks: Mapping[str, Benchmark], only: str) -> list[Benchmark]:
    """Return the benchmark of this name, or all benchmarks whose names begin with it.

    Raises:
        ValueError: there is no such benchmark.
    """
    if only in benchmarks:
        return [benchmarks[only]]
    if chosen := [one for name, one in benchmarks.items() if name.startswith(only)]:
        return chosen
    near = get_close_matches(only, benchmarks, 1)
    hint = f'Did you mean "{near[0]}"?' if near else f"Known: {', '.join(benchmarks)}."
    raise ValueError(f'--only must be a benchmark or a prefix of some. Found "{only}". {hint}')


def interleave(
    *actions: Callable[[], object], repeats: int = REPEATS, clock: Callable[[], float] = perf_counter
) -> list[list[float]]:
    """Return the seconds of each action. They run in turns (A, B, A, B, ...); the first round is not counted.

    Args:
        clock: use `process_time` for work in one thread, so that other processes do not count.
    """
    seconds: list[list[float]] = [[] for _ in actions]
    gc.collect()
    for _ in range(repeats + 1):
        for action, taken in zip(actions, seconds, strict=True):
            start = clock()
            action()
            taken.append(clock() - start)
    return [taken[1:] for taken in seconds]


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return one ratio per round, whose two times were measured next to each other."""
    return [first / second for first, second in zip(above, below, strict=True)]


def is_met(entry: Mapping[str, Any]) -> bool:
    """Return whether the value meets its target."""
    value, target = entry["value"], entry["target"]
    return bool(value >= target if entry["better"] == "higher" else value <= target)


def read_entries(path: Path) -> Entries:
    """Return the figures in a file; none if it does not exist.

    Raises:
        ValueError: the file has other content.
    """
    try:
        entries: Entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f'--out must name figures to add to, or no file yet. "{path}": {error}.') from error
    return entries


def write_entries(path: Path, entries: Entries) -> None:
    """Replace the file atomically, so that a reader finds either the old figures or the new ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    draft.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)


def table(entries: Iterable[tuple[str, Mapping[str, Any]]]) -> Table:
    """Return a table of the figures and their targets, for a terminal."""
    shown = Table("benchmark", "value", "quartiles", "target", "met?")
    for name, entry in entries:
        lower, upper = entry["detail"]["quartiles"]
        sign = "≥" if entry["better"] == "higher" else "≤"
        shown.add_row(
            name,
            f"{entry['value']:.4g} {entry['unit']}",
            f"{lower:.4g} .. {upper:.4g}",
            f"{sign} {entry['target']:g}",
            "[green]yes" if is_met(entry) else "[red]no",
        )
    return shown
