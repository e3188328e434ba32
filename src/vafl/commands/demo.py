"""`vafl demo`: train on handwritten digits with four clients under every rule, and compare the runs.

Each rule runs as a federation of separate processes, which communicate over mutual TLS on loopback. The
clients sleep between activations. The ceiling is a centralised model with all pixels in one place.
"""

from pathlib import Path
from typing import Any

import polars as pl
from rich.console import Console
from sklearn.datasets import load_digits

from vafl.config import Config, from_document
from vafl.observe.compare import common_target, compare, table
from vafl.observe.page import write_page
from vafl.observe.plots import plot_runs
from vafl.observe.record import RecordedRun
from vafl.run.launch import launch
from vafl.run.up import up

_CLIENTS = 4
_BASE: dict[str, Any] = {
    "partition": {"clients": _CLIENTS},
    "embedding": {"model": "linear"},
    "schedule": {"batch_size": 75},
    "optimiser": {"step_size": 1.6, "l2": 0.001},
    "delays": {"kind": "exponential", "unit": 0.035},
}
_RULES: dict[str, dict[str, Any]] = {
    "async": {"name": "async"},
    "t-sync": {"name": "t-sync", "t": 2},
    "sync": {"name": "sync"},
}
_CEILING = "centralised"
_SECONDS = 6.0
_TARGET = 0.94


def federated_config(rule: str, digits: Path) -> Config:
    """Return the configuration of one rule, for separate processes and a fixed number of seconds."""
    return from_document(
        {
            **_BASE,
            "data": _data(digits),
            "rule": _RULES[rule],
            "network": {"address": "127.0.0.1:0", "real_delays": True, "join_timeout": 300.0},
            "stop": {"updates": 1_000_000, "seconds": _SECONDS},
            "evaluation": {"every_seconds": 0.2},
        }
    )


def ceiling_config(digits: Path) -> Config:
    """Return the configuration of the centralised model, which has all pixels."""
    return from_document(
        {
            **_BASE,
            "data": _data(digits),
            "rule": {"name": _CEILING},
            "stop": {"updates": 300},
            "evaluation": {"every": 10},
        }
    )


def _data(digits: Path) -> dict[str, Any]:
    return {"name": "csv", "path": str(digits), "label": "digit"}


def demo(folder: Path, console: Console) -> None:
    """Run every rule, and write a folder for each run and folder/index.html."""
    digits = write_digits(folder.resolve())
    console.print(f"{digits}: each of {_CLIENTS} client processes will use a quarter of its columns")
    runs = [up(federated_config(rule, digits), folder / rule, console, overwrite=True) for rule in _RULES]
    runs.append(launch(ceiling_config(digits), folder / _CEILING, console, overwrite=True))
    target = min(_TARGET, common_target(runs))
    lines = compare(runs, target)
    metric = runs[0].metric
    console.print(table(lines, metric, target))
    _, svg = plot_runs(runs, folder / "comparison")
    headline = _headline(runs, target)
    console.print(headline)
    write_page(
        folder / "index.html",
        "One model from four parties, without waiting",
        [_SETTING, headline],
        lines,
        metric,
        target,
        svg,
        [
            "make demo",
            *(f"vafl up {folder / rule / 'config.toml'} --out runs/{rule}" for rule in _RULES),
            f"vafl run {folder / _CEILING / 'config.toml'} --out runs/{_CEILING}",
        ],
    )
    console.print(f"open {folder / 'index.html'}")


def write_digits(folder: Path) -> Path:
    """Write scikit-learn's digits as a CSV file with one column per pixel, for all processes to read."""
    bunch = load_digits()
    pixels = {f"pixel_{number:02}": column for number, column in enumerate(bunch.data.astype(int).T)}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "digits.csv"
    pl.DataFrame({**pixels, "digit": bunch.target}).write_csv(path)
    return path


_SETTING = (
    "Each of four clients holds a quarter of the pixels of 1,797 handwritten digits; the server holds the "
    "labels. All five are separate processes that communicate over mutual TLS. Between activations, client m "
    "sleeps m times 35 milliseconds on average, exponentially distributed as in the paper. The pixels stay "
    "with their clients, which upload embeddings and receive gradients."
)


def _headline(runs: list[RecordedRun], target: float) -> str:
    times = {run.name: evaluation.seconds for run in runs if (evaluation := run.first_reaching(target))}
    ratio = times["sync"] / times["async"]
    ceiling = runs[-1].test
    return (
        f"Asynchronous training reached {target:.1%} in {times['async']:.1f} seconds, synchronous "
        f"training in {times['sync']:.1f}: {ratio:.1f} times as long. The centralised model, with all pixels "
        f"in one place, ends at {ceiling:.1%}."
    )
