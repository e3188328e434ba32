"""What rules_mnist found: figures by rule, verdicts, a table and the figure."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from experiments import figures
from experiments.results import Verdict, publish
from experiments.timed_runs import Timed

LOOKAHEAD, SYNC, CENTRALISED = "async, look-ahead", "sync", "centralised"


@dataclass(frozen=True)
class Rule:
    """A rule to try: what it changes in rules_mnist.toml, its line in the figure, its cost to run."""

    name: str
    changes: tuple[str, ...]
    colour: str
    line: str = "-"
    cost: float = 1.0


@dataclass(frozen=True)
class Scale:
    """How much is run, and what is asked of it.

    Attributes:
        tuning_seconds, seconds: simulated, of the runs that choose the step size and of the final ones.
        ceiling_updates: of the centralised runs.
        target: the accuracy that is timed.
        speed: look-ahead's seconds to the target, at most this share of sync's.
        loss: points of accuracy that look-ahead may end below the centralised ceiling.
    """

    step_sizes: tuple[float, ...]
    seeds: int
    tuning_seconds: float
    seconds: float
    ceiling_updates: int
    target: float = 0.90
    speed: float = 0.5
    loss: float = 0.5


@dataclass(frozen=True)
class Found:
    """A rule's tuning runs and, with the best step size, its final ones."""

    rule: Rule
    tuning: list[Timed]
    final: list[Timed]


def report(folder: Path, quick: bool, every: Sequence[Found], scale: Scale) -> int:
    """Writes the figure and results.json, prints the tables; the exit code says whether all holds."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {found.rule.name: measured(found, scale.target) for found in every}
    with figures.drawing(folder / "rules_mnist", panels=2, height=3.3) as (left, right):
        draw(left, right, every[:-1], rows[CENTRALISED]["final_accuracy"], scale)
    print_table(rows, scale.target)
    verdicts = judge(rows[LOOKAHEAD], rows[SYNC], rows[CENTRALISED], scale)
    return publish(folder, quick, {"scale": asdict(scale), "rules": rows}, verdicts)


def mean(values: Iterable[float | None]) -> float | None:
    """The mean, or None if a run has no value: a rule that failed once has no honest mean."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return sum(known) / len(known) if known and len(known) == len(listed) else None


def measured(found: Found, target: float) -> dict[str, Any]:
    """A rule's figures, over its seeds."""
    final = found.final
    seconds = [run.seconds_to(target) for run in final]
    return {
        "step_size": final[0].step_size,
        "seconds_to_target": mean(seconds),
        "seconds_to_target_by_seed": seconds,
        "bytes_up_to_target": mean(run.bytes_to(target) for run in final),
        "final_accuracy": mean(run.final for run in final),
        "final_accuracy_by_seed": [run.final for run in final],
        "updates": mean(run.updates[-1] for run in final),
        "mean_delay": mean(run.mean_delay for run in final),
        "longest_delay": max(run.longest_delay for run in final),
        "never_uploaded": mean(run.never for run in final),
        "tuning": [
            {"step_size": run.step_size, "seconds_to_target": run.seconds_to(target), "final": run.final}
            for run in found.tuning
        ],
        "curves": [{key: asdict(run)[key] for key in ("seconds", "bytes_up", "accuracy")} for run in final],
    }


def judge(
    lookahead: dict[str, Any], sync: dict[str, Any], top: dict[str, Any], scale: Scale
) -> list[Verdict]:
    fast, slow = lookahead["seconds_to_target"], sync["seconds_to_target"]
    # A sync that never got there took longer than its whole run.
    ratio = None if fast is None else fast / (scale.seconds if slow is None else slow)
    behind = 100 * (top["final_accuracy"] - lookahead["final_accuracy"])
    return [
        Verdict(
            f"seconds to {scale.target:.2f}: look-ahead / sync",
            "not reached" if ratio is None else f"{'below ' if slow is None else ''}{ratio:.3f}",
            f"at most {scale.speed}",
            ratio is not None and ratio <= scale.speed,
        ),
        Verdict(
            "final accuracy: points below centralised",
            f"{behind:.2f}",
            f"at most {scale.loss}",
            behind <= scale.loss,
        ),
    ]


def print_table(figures_by_rule: dict[str, dict[str, Any]], target: float) -> None:
    table = Table("rule", "step", f"s to {target:.2f}", "MB to it", "final", "delay", "max", "never")
    for name, row in figures_by_rule.items():
        seconds, sent = row["seconds_to_target"], row["bytes_up_to_target"]
        timed = name != CENTRALISED
        table.add_row(
            name,
            f"{row['step_size']:g}",
            "-" if seconds is None or not timed else f"{seconds:.1f}",
            "-" if sent is None or not timed else f"{sent / 1e6:.0f}",
            f"{row['final_accuracy']:.4f}",
            f"{row['mean_delay']:.1f}",
            str(row["longest_delay"]),
            f"{row['never_uploaded']:.1%}",
        )
    Console().print(table)


def draw(left: Axes, right: Axes, rules: Sequence[Found], top: float, scale: Scale) -> None:
    """Accuracy against simulated seconds, and against what was uploaded."""
    seconds = np.linspace(0, scale.seconds, 500)
    for found in rules:
        rule, runs = found.rule, found.final
        style = {"linestyle": rule.line, "linewidth": 1.1}
        figures.band(
            left, seconds, [run.accuracy_at(seconds) for run in runs], rule.colour, rule.name, **style
        )
        first = min(next(sent for sent in run.bytes_up if sent) for run in runs)
        sent = np.geomspace(first, min(run.bytes_up[-1] for run in runs), 500)
        curves = [run.accuracy_at(sent, "bytes_up") for run in runs]
        figures.band(right, sent / 1e6, curves, rule.colour, rule.name, **style)
    for axes in (left, right):
        axes.axhline(top, color=figures.GREY, linewidth=0.8, linestyle=":", label="centralised, at its end")
        axes.set(ylim=(scale.target - 0.1, max(top, scale.target) + 0.01), ylabel="test accuracy")
    left.set(xlabel="simulated seconds", xlim=(0, scale.seconds), title="(a) time")
    right.set(xlabel="uploaded by all clients (MB)", xscale="log", title="(b) communication")
    lines, names = left.get_legend_handles_labels()
    left.figure.legend(lines, names, loc="outside lower center", ncols=4)
