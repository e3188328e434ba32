"""One training run of one update rule, timed on the virtual clock, on held-out or on test rows."""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from experiments.figures import Values
from vafl.build import build
from vafl.config import read_config
from vafl.data.dataset import Dataset
from vafl.data.partition import PartitionSettings, VerticalData, partition
from vafl.data.sources import DataSettings, load
from vafl.errors import Diverged
from vafl.runtime.training import Point

HELD_OUT = 6  # one training row in so many is held out to choose the step size: 10,000 of MNIST's


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        toml: the experiment's config, `changes` of it, and the folder of its data ("": VAFL_DATA).
        validation: train without the last training rows and measure on those; else train on all and
            measure on the test rows.
        cost: about how long it takes, compared with others.
    """

    toml: Path
    changes: tuple[str, ...]
    folder: str
    validation: bool
    step_size: float
    seed: int
    cost: float = 1.0


@dataclass(frozen=True)
class Timed:
    """What one run showed, at each evaluation.

    Attributes:
        diverged: the loss stopped being a number; what is here came before.
        mean_delay, longest_delay: of other clients' embeddings when used, in global iterations.
        never: the share of used embeddings that had never been uploaded (not in the delays).
    """

    step_size: float
    seed: int
    seconds: list[float]
    updates: list[int]
    bytes_up: list[int]
    accuracy: list[float]
    diverged: bool
    mean_delay: float
    longest_delay: int
    never: float

    @property
    def final(self) -> float:
        """Accuracy over the last tenth of the evaluations: one alone is luck at a large step."""
        last = self.accuracy[-max(1, len(self.accuracy) // 10) :]
        return 0.0 if self.diverged else sum(last) / len(last)

    def reached(self, target: float) -> int | None:
        """The first evaluation at or above the target."""
        return next((index for index, value in enumerate(self.accuracy) if value >= target), None)

    def seconds_to(self, target: float) -> float | None:
        index = self.reached(target)
        return None if index is None else self.seconds[index]

    def bytes_to(self, target: float) -> int | None:
        index = self.reached(target)
        return None if index is None else self.bytes_up[index]

    def accuracy_at(self, x: Values, against: str = "seconds") -> Values:
        """The accuracy at each of these seconds, or `bytes_up`: straight lines between evaluations."""
        return np.interp(x, getattr(self, against), self.accuracy)


def train(job: Job) -> Timed:
    """Makes the run."""
    config = read_config(
        job.toml, [*job.changes, f"optimiser.step_size={job.step_size!r}", f"seed={job.seed}"]
    )
    data = _data(replace(config.data, folder=job.folder), config.partition.clients, job.validation)
    # A set much smaller than MNIST, as the tests have, cannot give minibatches of 600.
    size = min(config.schedule.batch_size, data.rows // 20)
    run = build(replace(config, schedule=replace(config.schedule, batch_size=size)), data)
    points: list[Point] = []
    diverged = False
    try:
        run.train(points.append)
    except Diverged:
        diverged = True
    delays = run.delays()
    uses = sum(summary.uses for summary in delays)
    never = sum(summary.never for summary in delays)
    return Timed(
        step_size=job.step_size,
        seed=job.seed,
        seconds=[point.seconds for point in points],
        updates=[point.updates for point in points],
        bytes_up=[point.bytes_up for point in points],
        accuracy=[point.metric for point in points],
        diverged=diverged,
        mean_delay=sum(summary.mean * summary.uses for summary in delays) / max(uses, 1),
        longest_delay=max((summary.max for summary in delays), default=0),
        never=never / max(uses + never, 1),
    )


@lru_cache(maxsize=2)  # a process makes many runs
def _data(settings: DataSettings, clients: int, validation: bool) -> VerticalData:
    dataset = load(settings, seed=0)
    return partition(hold_out(dataset) if validation else dataset, PartitionSettings(clients), settings.scale)


def hold_out(dataset: Dataset) -> Dataset:
    """The training rows alone, the last of them as test rows: the test set stays unseen."""
    kept = len(dataset.train) - len(dataset.train) // HELD_OUT
    return replace(
        dataset,
        train=dataset.train[:kept],
        train_labels=dataset.train_labels[:kept],
        test=dataset.train[kept:],
        test_labels=dataset.train_labels[kept:],
    )
