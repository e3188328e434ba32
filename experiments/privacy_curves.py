"""The accuracy of each privacy mode at several budgets, with calibrated noise.

A point is a whole federated run whose most used record costs exactly mu, according to the accountant and the
run's ledger, for `privacy.neighbours = "zero_out"`. For `replace` the same run costs 2 mu. Evaluations use
noised embeddings, as a server would. If a table is scaled, its scales count as public. `embed_only` is drawn
at the mu that it claims, which it does not guarantee.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter

from experiments.figures import BLACK, BLUE, GREEN, GREY, ORANGE, drawing
from experiments.jobs import one_thread, run_all
from experiments.results import Verdict, arguments, publish
from vafl.config import Config, read_config
from vafl.data.partition import VerticalData, partition
from vafl.data.public import load
from vafl.data.split import Split
from vafl.privacy.settings import PrivacySettings
from vafl.run.assembly import build

BUDGETS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
MODES = {"release_once": BLUE, "frozen": GREEN, "dp_train": ORANGE, "embed_only": GREY}
CLIPS = {"release_once": 3.0, "frozen": 3.0, "dp_train": 1.0, "embed_only": 1.0}
WIDTH = 32  # of the embedding that is not trained


@dataclass(frozen=True)
class Task:
    """One data set, split over its clients, and suitable training settings."""

    title: str
    data: str
    clients: int
    epochs: int
    batch: int
    step_size: float


TASKS = (
    Task("MNIST, 7 clients", "mnist", 7, 3, 600, 0.5),
    Task("Parkinson, 3 clients", "parkinson", 3, 5, 28, 0.02),
)
DIGITS = Task("digits, 4 clients", "digits", 4, 5, 64, 0.3)


@dataclass(frozen=True)
class Trial:
    """One run. An empty mode is the run without privacy."""

    task: Task
    mode: str
    mu: float
    seed: int
    folder: str


def main(options: Sequence[str]) -> int:
    parser = arguments("privacy_curves", "Accuracy against the budget of a record, mode by mode.")
    chosen = parser.parse_args(options)
    chosen.out.mkdir(parents=True, exist_ok=True)
    tasks = TASKS if chosen.data else (DIGITS,)
    budgets, seeds = ((1.0, 16.0), (0,)) if chosen.quick else (BUDGETS, (0, 1, 2))
    folder = str(chosen.data or "")
    trials = [
        Trial(task, mode, mu, seed, folder)
        for task in tasks
        for seed in seeds
        for mode, mus in (("", (math.inf,)), *((mode, budgets) for mode in MODES))
        for mu in mus
    ]
    found = dict(zip(trials, run_all("training", attempt, trials, workers=chosen.workers), strict=True))
    measured = {task.data: _curves(task, found) for task in tasks}
    draw(chosen.out / "privacy_curves", tasks, measured)
    verdicts = [_ledgers_agree(found), *[_more_budget_helps(task, measured[task.data]) for task in tasks]]
    return publish(chosen.out, chosen.quick, measured, verdicts)


def attempt(trial: Trial) -> tuple[float, float]:
    """Return the final accuracy, and the largest mu in the ledgers."""
    with one_thread():
        config, data = _configure(trial)
        run = build(config, data)
        accuracy = run.train()[-1].metrics["accuracy"] or 0.0
        spent = [float(ledger.spent.max()) for ledger in run.ledgers]
        return accuracy, math.sqrt(max(spent, default=0.0))


def _configure(trial: Trial) -> tuple[Config, VerticalData]:
    task = trial.task
    changes = [f'data.name="{task.data}"', f"partition.clients={task.clients}", f"seed={trial.seed}"]
    changes += [f"schedule.batch_size={task.batch}", f"optimiser.step_size={task.step_size}"]
    if trial.folder:
        changes.append(f'data.folder="{trial.folder}"')
    if trial.mode == "frozen":
        changes += ["embedding.model=linear", f"model.width={WIDTH}", "model.head=linear"]
    config = read_config(Path(__file__).with_suffix(".toml"), changes)
    dataset = load(config.data)
    split = Split.of_dataset(dataset, config.data, seed=trial.seed)
    data = partition(dataset, split, config.partition, config.data.scale)
    rounds = task.epochs * math.ceil(data.rows / task.batch)
    stop = replace(config.stop, updates=rounds)
    return replace(config, stop=stop, privacy=_privacy(trial)), data


def _privacy(trial: Trial) -> PrivacySettings:
    """Return noise settings with which a record that is uploaded once per epoch costs mu in total."""
    if not trial.mode:
        return PrivacySettings()
    clip, uses = CLIPS[trial.mode], math.sqrt(trial.task.epochs)
    settings: dict[str, Any] = {
        "mode": trial.mode,
        "clip": clip,
        "noise": clip * uses / trial.mu,
        "neighbours": "zero_out",
    }
    if trial.mode != "embed_only":
        settings["mu_max"] = trial.mu * (1 + 1e-9)  # more than a rounding error
    if trial.mode == "release_once":
        settings["noise"] = clip / trial.mu
    if trial.mode == "dp_train":  # half of mu^2 for uploads, half for updates
        settings["noise"] *= math.sqrt(2)
        settings |= {"gradient_clip": 1.0, "gradient_noise": math.sqrt(2) * uses / trial.mu}
    return PrivacySettings(**settings)


def _curves(task: Task, found: dict[Trial, tuple[float, float]]) -> dict[str, Any]:
    """Return mode -> budgets and accuracies, [budgets, seeds]."""
    curves: dict[str, Any] = {}
    for mode in ("", *MODES):
        mine = [trial for trial in found if trial.task == task and trial.mode == mode]
        mus = sorted({trial.mu for trial in mine})
        accuracies = [[found[trial][0] for trial in mine if trial.mu == mu] for mu in mus]
        curves[mode or "none"] = {"mu": mus if mode else None, "accuracy": accuracies}
    return curves


def draw(path: Path, tasks: Sequence[Task], measured: dict[str, Any]) -> None:
    """Draw one panel per data set."""
    with drawing(path, len(tasks)) as panels:
        for axes, task in zip(panels, tasks, strict=True):
            curves = measured[task.data]
            level = float(np.mean(curves["none"]["accuracy"]))
            axes.axhline(level, color=BLACK, linestyle=":", linewidth=1, label="no privacy")
            for mode, colour in MODES.items():
                values = np.array(curves[mode]["accuracy"])
                dashed = mode == "embed_only"
                axes.fill_between(
                    curves[mode]["mu"], values.min(1), values.max(1), color=colour, alpha=0.2, linewidth=0
                )
                axes.plot(
                    curves[mode]["mu"],
                    values.mean(1),
                    color=colour,
                    linestyle="--" if dashed else "-",
                    marker="o",
                    markersize=3,
                    label="embed_only (claim not valid)" if dashed else mode,
                )
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.set_xlabel(r"budget of a record, $\mu$ (zero_out)")
            axes.set_ylabel("test accuracy")
            axes.set_title(task.title)
        handles, labels = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(handles, labels, loc="outside lower center", ncols=len(handles))


def _ledgers_agree(found: dict[Trial, tuple[float, float]]) -> Verdict:
    ratios = [spent / trial.mu for trial, (_, spent) in found.items() if trial.mode]
    return Verdict(
        "mu in the ledger / mu asked for, all runs",
        f"{min(ratios):.6f} to {max(ratios):.6f}",
        "1",
        max(abs(ratio - 1) for ratio in ratios) < 1e-6,
    )


def _more_budget_helps(task: Task, curves: dict[str, Any]) -> Verdict:
    means = {mode: np.mean(curves[mode]["accuracy"], axis=1) for mode in MODES}
    return Verdict(
        f"{task.data}: accuracy at the largest budget minus at the smallest",
        ", ".join(f"{mode} {values[-1] - values[0]:+.3f}" for mode, values in means.items()),
        "above 0",
        all(values[-1] > values[0] for values in means.values()),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
