"""How long clients sleep, when they are gone, and what their links cost: objects, for experiments."""

import csv
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from vafl.errors import ConfigError, DataError
from vafl.protocol.schedule import Sleeper
from vafl.scope import setting


@dataclass(frozen=True)
class DropOut:
    """Client `client` (counted from 1) is gone from `start` to `end`, in seconds; `inf` is for ever."""

    client: int
    start: float
    end: float

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ConfigError(
                "VFL-6801", f"delays.dropouts: 0 <= start < end is needed. Found {self.start} to {self.end}."
            )


@dataclass(frozen=True)
class DelaySettings:
    """Time, as the virtual clock tells it. m counts the clients from 1 to M.

    Attributes:
        kind: `poisson`: Poisson(2m)/(2M) units between activations (the paper's logistic regression);
            `exponential`: exponential with a mean of m units (its deep learning);
            `poisson-process`: activations are a Poisson process of mean gap m units, whatever the
            answers take; `fixed`: always m units, or `seconds`; `none`; `trace`: from a file.
        unit: seconds a unit lasts.
        seconds: for `fixed`, one number a client instead of m units.
        trace: CSV with the columns client (from 1) and seconds; each client's lines are used in
            order, over and over.
        latency: seconds a message takes one way.
        bandwidth: bytes a second of each client's link, each way; 0 is endless.
        dropouts: windows in which a client is gone: { client = 2, start = 10.0, end = 20.0 }.
    """

    kind: Literal["poisson", "exponential", "poisson-process", "fixed", "none", "trace"] = "poisson"
    unit: float = 1.0
    seconds: tuple[float, ...] = ()
    trace: str = setting("", is_path=True)
    latency: float = 0.0
    bandwidth: float = 0.0
    dropouts: tuple[DropOut, ...] = ()

    def __post_init__(self) -> None:
        for name in ("unit", "latency", "bandwidth"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError("VFL-6802", f"delays.{name} must be 0 or more. Found {value}.")
        if (self.kind == "trace") != bool(self.trace):
            raise ConfigError(
                "VFL-6803",
                'delays.kind = "trace" and delays.trace (its CSV file) go together. '
                f'Found kind "{self.kind}", trace "{self.trace}".',
            )
        if any(not 0 <= value < float("inf") for value in self.seconds):
            raise ConfigError("VFL-6804", f"delays.seconds must be 0 or more. Found {list(self.seconds)}.")
        if self.seconds and self.kind != "fixed":
            raise ConfigError(
                "VFL-6805", f'delays.seconds belongs to kind = "fixed". Found kind "{self.kind}".'
            )
        if self.kind == "poisson-process" and not self.unit:
            raise ConfigError(
                "VFL-6806", f'delays.kind = "poisson-process" needs a delays.unit above 0. Found {self.unit}.'
            )
        self._check_windows()

    def _check_windows(self) -> None:
        windows = sorted(self.dropouts, key=lambda dropout: (dropout.client, dropout.start))
        for one, other in itertools.pairwise(windows):
            if one.client == other.client and other.start <= one.end:
                raise ConfigError(
                    "VFL-6807",
                    f"delays.dropouts: the windows of one client must not meet. Client {one.client} is gone "
                    f"from {one.start} to {one.end} and from {other.start} to {other.end}. Join them.",
                )

    def check_clients(self, clients: int) -> None:
        if self.seconds and len(self.seconds) != clients:
            raise ConfigError(
                "VFL-6808",
                f"delays.seconds needs one number for each of {clients} clients. Found {len(self.seconds)}.",
            )
        for dropout in self.dropouts:
            if not 1 <= dropout.client <= clients:
                raise ConfigError(
                    "VFL-6809", f"delays.dropouts: client must be in 1..{clients}. Found {dropout.client}."
                )

    def clock(self, clients: int, seed: int) -> "list[Sleeper]":
        """One sleeper a client, each with a random stream of its own."""
        self.check_clients(clients)
        if self.kind == "trace":
            return _read_trace(Path(self.trace), clients)
        return [self._sleeper(number, clients, _generator(seed, number)) for number in range(1, clients + 1)]

    def mean_gaps(self, clients: int) -> list[float]:
        """Seconds between two activations of each client, on average, if nothing else makes it wait."""
        numbers = range(1, clients + 1)
        if self.kind == "trace":
            lines = _read_lines(Path(self.trace), clients)
            gaps = [sum(own) / len(own) for own in lines]
        elif self.kind == "none":
            gaps = [0.0] * clients
        elif self.seconds:
            gaps = list(self.seconds)
        else:
            gaps = [number * self.unit / (clients if self.kind == "poisson" else 1) for number in numbers]
        return [gap + 2 * self.latency for gap in gaps]

    def _sleeper(self, number: int, clients: int, generator: np.random.Generator) -> "Sleeper":
        mean = number * self.unit
        if self.kind == "poisson":
            return Sampled(lambda: float(generator.poisson(2 * number)) / (2 * clients) * self.unit)
        if self.kind == "exponential":
            return Sampled(lambda: float(generator.exponential(mean)))
        if self.kind == "poisson-process":
            return PoissonProcess(mean, generator)
        if self.kind == "fixed":
            seconds = self.seconds[number - 1] if self.seconds else mean
            return Sampled(lambda: seconds)
        return Sampled(lambda: 0.0)


class Sampled:
    """Sleeps a sampled time after each activation."""

    def __init__(self, sample: Callable[[], float]) -> None:
        self._sample = sample

    def wakes_at(self, now: float) -> float:
        return now + self._sample()


class PoissonProcess:
    """Wakes at the next point of a Poisson process that runs on its own; points missed are lost."""

    def __init__(self, mean: float, generator: np.random.Generator) -> None:
        self._mean, self._generator = mean, generator
        self._point = 0.0

    def wakes_at(self, now: float) -> float:
        while self._point <= now:
            self._point += float(self._generator.exponential(self._mean))
        return self._point


def _generator(seed: int, number: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, 77, number))))


def _read_trace(path: Path, clients: int) -> "list[Sleeper]":
    return [Sampled(itertools.cycle(own).__next__) for own in _read_lines(path, clients)]


def _read_lines(path: Path, clients: int) -> list[list[float]]:
    """Each client's seconds, in order."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = [(int(line["client"]), float(line["seconds"])) for line in csv.DictReader(file)]
    except OSError as error:
        raise DataError(
            "VFL-6810", f'delays.trace must be a readable CSV. "{path}": {error.strerror}.'
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            "VFL-6811",
            f'delays.trace "{path}" needs the columns client and seconds, with numbers. Found: {error}.',
        ) from error
    found = []
    for number in range(1, clients + 1):
        own = [seconds for client, seconds in lines if client == number]
        if not own:
            raise DataError("VFL-6812", f'delays.trace "{path}" has no delays for client {number}.')
        for seconds in own:
            if not 0 <= seconds < float("inf"):
                raise DataError(
                    "VFL-6813",
                    f'delays.trace "{path}": seconds must be 0 or more. Found {seconds} for client {number}.',
                )
        found.append(own)
    return found
