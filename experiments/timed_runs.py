"""One training run on the virtual clock, measured on held-out or on test rows, and saved as a run folder.

A run that has ended is never repeated. If its configuration is the same, its folder is read instead.
"""

import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vafl.arrays import Doubles
from vafl.config import Config, from_document, read_config, read_document
from vafl.data.partition import VerticalData, partition
from vafl.data.public import load
from vafl.data.settings import DataSettings
from vafl.data.split import Split
from vafl.errors import ConfigError, Diverged, RunFolderError
from vafl.observe.evaluation import Evaluation
from vafl.observe.record import RecordedRun, RunFolder, read_run
from vafl.run.assembly import Run, build
from vafl.run.conclusion import conclude
from vafl.run.launch import summarise
from vafl.simulation.simulator import Simulator

GRID = 600  # number of places at which the runs' curves are read


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        toml: the study's file and `changes` of its [config].
        data: the folder of its data ("": VAFL_DATA).
        out: the run's folder.
        held_out: train without this share of the training rows and measure on them. 0 trains on all and
            measures on the test rows.
    """

    toml: Path
    changes: tuple[str, ...]
    data: str
    out: Path
    held_out: float
    step_size: float
    seed: int

    def config(self) -> Config:
        """Return the whole configuration without the data folder, which does not affect the result."""
        prefixed = [f"config.{change}" for change in self.changes]
        own = (f"config.optimiser.step_size={self.step_size!r}", f"config.seed={self.seed}")
        return from_document(read_document(self.toml, [*prefixed, *own])["config"])


@dataclass(frozen=True)
class Timed:
    """The results of one run.

    Attributes:
        passes: how often each client has gone through all rows, on average, at each evaluation.
        delay, longest_delay: of other clients' embeddings when used, in global iterations.
        never: the share of used embeddings that had never been uploaded (not in the delays).
    """

    run: RecordedRun
    step_size: float
    seed: int
    passes: Doubles
    diverged: bool
    delay: float
    longest_delay: int
    never: float

    @property
    def seconds(self) -> Doubles:
        return np.array([point.seconds for point in self.run.evaluations])

    @property
    def megabytes(self) -> Doubles:
        """Return the traffic of all clients, in both directions."""
        return np.array([(point.bytes_up + point.bytes_down) / 1e6 for point in self.run.evaluations])

    @property
    def metric(self) -> Doubles:
        return np.array([point.metric for point in self.run.evaluations], float)

    @property
    def final(self) -> float:
        """Return the mean metric of the last tenth of the evaluations, because a single one is noisy."""
        last = self.metric[-max(1, len(self.metric) // 10) :]
        return 0.0 if self.diverged else float(last.mean())


def read_at(at: Doubles, along: Sequence[Doubles], values: Sequence[Doubles]) -> Doubles:
    """Return each run's values at the same places along it, [runs, places]."""
    return np.stack([np.interp(at, x, y) for x, y in zip(along, values, strict=True)])


def crossing(runs: Sequence[Timed], along: Literal["seconds", "megabytes"], level: float) -> float | None:
    """Return where the mean over the runs first reaches the level."""
    places = [getattr(run, along) for run in runs]
    at = np.linspace(0, min(float(x[-1]) for x in places), GRID)
    mean = read_at(at, places, [run.metric for run in runs]).mean(axis=0)
    reached = np.flatnonzero(mean >= level)
    return float(at[reached[0]]) if len(reached) else None


def train(job: Job) -> Timed:
    """Make the run, unless it exists."""
    config = job.config()
    known = _known(job, config)
    if known is not None:
        return _timed(known, config, job)
    shutil.rmtree(job.out, ignore_errors=True)
    job.out.parent.mkdir(parents=True, exist_ok=True)
    sections = Config(data=config.data, partition=config.partition).to_toml()
    data = _data(sections, job.data, job.held_out)
    # A data set that is much smaller than the real one, as in tests, has no minibatches of this size.
    size = min(config.schedule.batch_size, data.rows // 20)
    run = build(replace(config, schedule=replace(config.schedule, batch_size=size)), data)
    points: list[Evaluation] = []
    diverged = False
    with RunFolder(job.out) as folder:
        folder.begin(config.to_toml())

        def observe(point: Evaluation) -> None:
            points.append(point)
            folder.append(point)

        try:
            run.train(observe)
        except Diverged:
            diverged = True
        summary = _summary(run, points[-1])
        summary |= {"diverged": diverged, "rows": data.rows, "batch_size": size, "held_out": job.held_out}
        folder.finish(summary)
    return _timed(read_run(job.out), config, job)


def was_made(job: Job) -> bool:
    """Return whether the run's folder exists and is complete."""
    return _known(job, job.config()) is not None


def _known(job: Job, config: Config) -> RecordedRun | None:
    """Return the run in the job's folder, if it has ended and has the same configuration.

    Settings that were added since then count as their defaults.
    """
    try:
        same = read_config(job.out / "config.toml") == config
        run = read_run(job.out)
    except (ConfigError, RunFolderError):
        return None
    return run if same and run.summary.get("held_out") == job.held_out else None


def _summary(run: Run, last: Evaluation) -> dict[str, Any]:
    activations = run.runtime.server.activations if isinstance(run.runtime, Simulator) else []
    return summarise(
        run.config,
        run.task,
        run.data,
        last,
        run.delays(),
        activations,
        conclusion=conclude(run.config, run.task, run.data, run.evaluator.measured),
        traffic=run.runtime.traffic if isinstance(run.runtime, Simulator) else (),
        simulated=True,
        interrupted=False,
        end=run.end,
    )


def _timed(run: RecordedRun, config: Config, job: Job) -> Timed:
    summary = run.summary
    delays = list(summary["delays"].values())
    uses, never = sum(each["uses"] for each in delays), sum(each["never"] for each in delays)
    share = {"async": 1, "t-sync": config.rule.t}.get(config.rule.name, summary["clients"])
    uploads = np.array([point.updates for point in run.evaluations]) * share / summary["clients"]
    return Timed(
        run=run,
        step_size=job.step_size,
        seed=job.seed,
        passes=uploads * summary["batch_size"] / summary["rows"],
        diverged=summary["diverged"],
        delay=sum(each["mean"] * each["uses"] for each in delays) / max(uses, 1),
        longest_delay=max((each["max"] for each in delays), default=0),
        never=never / max(uses + never, 1),
    )


@lru_cache(maxsize=1)  # a process makes many runs on the same rows
def _data(sections: str, folder: str, held_out: float) -> VerticalData:
    """Return the data that the `sections` of a configuration, as TOML, describe."""
    config = from_document(tomllib.loads(sections))
    dataset = load(replace(config.data, folder=folder))
    split = Split.of_dataset(dataset, config.data, seed=0)
    if held_out:
        split = hold_out(split, held_out, dataset.together)
    return partition(dataset, split, config.partition, config.data.scale)


def hold_out(split: Split, share: float, together: int = 1) -> Split:
    """Return the training rows alone, with some of them as test rows: the test set stays unseen."""
    inner = Split.of(split.parts.train, DataSettings(test_fraction=share), 0, together=together)
    return Split(split.order[inner.order], inner.parts)
