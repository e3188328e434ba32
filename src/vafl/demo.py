"""The demonstration: handwritten digits split over four clients, under every rule, beside the ceiling."""

from pathlib import Path
from typing import Any

from rich.console import Console

from vafl.config import Config, from_document
from vafl.launch import launch
from vafl.observe.compare import common_target, compare, table
from vafl.observe.page import write_page
from vafl.observe.plots import plot_runs
from vafl.observe.record import RecordedRun

_BASE: dict[str, Any] = {
    "data": {"name": "digits", "scale": "standard"},
    "partition": {"clients": 4},
    "schedule": {"batch_size": 64},
    "optimiser": {"step_size": 0.8, "l2": 0.001},
    "delays": {"kind": "poisson"},
}
_RULES: dict[str, dict[str, Any]] = {
    "async": {"name": "async"},
    "t-sync": {"name": "t-sync", "t": 2},
    "sync": {"name": "sync"},
    "centralised": {"name": "centralised"},
}
_SECONDS = 100.0
_TARGET = 0.94


def demo_config(rule: str) -> Config:
    """The configuration of one of the demonstration's runs."""
    limits = {"updates": 600} if rule == "centralised" else {"updates": 100_000, "seconds": _SECONDS}
    evaluation = {"every": 20} if rule == "centralised" else {"every_seconds": 1.0}
    return from_document({**_BASE, "rule": _RULES[rule], "stop": limits, "evaluation": evaluation})


def demo(folder: Path, console: Console) -> None:
    """Runs every rule, and writes a folder for each run and folder/index.html."""
    runs = [launch(demo_config(rule), folder / rule, console, overwrite=True) for rule in _RULES]
    target = min(_TARGET, common_target(runs))
    lines = compare(runs, target)
    metric = runs[0].summary["metric"]["name"]
    console.print(table(lines, metric, target))
    _, svg = plot_runs(runs, folder / "comparison")
    headline = _headline(runs, target)
    console.print(headline)
    write_page(
        folder / "index.html",
        "One model from four parties, and nobody waits",
        [_SETTING, headline],
        lines,
        metric,
        target,
        svg,
        ["make demo", *(f"vafl run {folder / rule / 'config.toml'} --out runs/{rule}" for rule in _RULES)],
    )
    console.print(f"open {folder / 'index.html'}")


_SETTING = (
    "Each of four clients holds a quarter of the pixels of 1,797 handwritten digits; the server holds the "
    "labels. Client m sleeps Poisson(2m)/8 seconds between activations, as in the paper. "
    "Nobody's pixels move: clients upload embeddings and get gradients back."
)


def _headline(runs: list[RecordedRun], target: float) -> str:
    times = {run.name: point.seconds for run in runs if (point := run.first_reaching(target))}
    ratio = times["sync"] / times["async"]
    ceiling = runs[-1].points[-1].metric
    return (
        f"Asynchronous training reached {target:.1%} in {times['async']:.0f} simulated seconds, synchronous "
        f"training in {times['sync']:.0f}: {ratio:.1f} times as long. The centralised model, with all pixels "
        f"in one place, ends at {ceiling:.1%}."
    )
