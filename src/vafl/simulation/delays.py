"""Delays for experiments: how long clients sleep, when they drop out, and how fast their links are."""

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
    """Client `client` (counted from 1) is absent from `start` to `end`, in seconds. `end` may be `inf`."""

    client: int
    start: float
    end: float

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ConfigError(
                "VFL-6801",
                f"delays.dropouts must have 0 <= start < end. Found start {self.start}, end {self.end}.",
            )


@dataclass(frozen=True)
class DelaySettings:
    """Delays on the virtual clock. m is the number of a client, from 1 to M.

    Attributes:
        kind: the pause of client m between activations. `poisson`: Poisson(2m)/(2M) units (the paper's
            logistic regression); `exponential`: exponential with a mean of m units (the paper's deep
            learning); `poisson-process`: activations are a Poisson process with a mean gap of m units,
            however long the answers take; `fixed`: always m units, or `seconds`; `none`: no pause; `trace`:
            from a file.
        unit: the length of a unit in seconds.
        seconds: for `fixed`, the pause of each client in seconds, instead of m units.
        trace: a CSV file with the columns client (from 1) and seconds. Each client uses its lines in order,
            and starts again after the last one.
        latency: seconds that a message takes one way.
        bandwidth: bytes per second of each client's link, in each direction; 0 is unlimited.
        dropouts: windows in which a client is absent: { client = 2, start = 10.0, end = 20.0 }.
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
                raise ConfigError("VFL-6802", f"delays.{name} must be finite and 0 or more. Found {value}.")
        if (self.kind == "trace") != bool(self.trace):
            raise ConfigError(
                "VFL-6803",
                'delays.kind = "trace" needs a CSV file in delays.trace, and no other kind uses one. '
                f'Found kind "{self.kind}", trace "{self.trace}".',
            )
        if any(not 0 <= value < float("inf") for value in self.seconds):
            raise ConfigError(
                "VFL-6804", f"delays.seconds must be finite and 0 or more. Found {list(self.seconds)}."
            )
        if self.seconds and self.kind != "fixed":
            raise ConfigError(
                "VFL-6805", f'delays.seconds needs delays.kind = "fixed". Found kind "{self.kind}".'
            )
        if self.kind == "poisson-process" and not self.unit:
            raise ConfigError(
                "VFL-6806", f'delays.kind = "poisson-process" needs a delays.unit above 0. Found {self.unit}.'
            )
        self._check_windows()

    def _check_windows(self) -> None:
        windows = sorted(self.dropouts, key=lambda dropout: (dropout.client, dropout.start))
        for first, second in itertools.pairwise(windows):
            if first.client == second.client and second.start <= first.end:
                raise ConfigError(
                    "VFL-6807",
                    "delays.dropouts of the same client must not touch or overlap. Found client "
                    f"{first.client} absent from {first.start} to {first.end} and from {second.start} to "
                    f"{second.end}. Merge the two windows.",
                )

    def check_clients(self, clients: int) -> None:
        """Raise ConfigError unless the settings fit this number of clients."""
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
        """Return one sleeper per client, each with an independent random stream."""
        self.check_clients(clients)
        if self.kind == "trace":
            return _read_trace(Path(self.trace), clients)
        return [self._sleeper(number, clients, _generator(seed, number)) for number in range(1, clients + 1)]

    def mean_gaps(self, clients: int) -> list[float]:
        """Return the mean seconds between two activations of each client, if nothing else delays it."""
        numbers = range(1, clients + 1)
        if self.kind == "trace":
            traces = _read_lines(Path(self.trace), clients)
            gaps = [sum(seconds) / len(seconds) for seconds in traces]
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
    """Sleeps for a sampled number of seconds after each activation."""

    def __init__(self, sample: Callable[[], float]) -> None:
        self._sample = sample

    def wakes_at(self, now: float) -> float:
        return now + self._sample()


class PoissonProcess:
    """Wakes at the next event of a Poisson process. Events that pass while the client is busy are lost."""

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
    return [Sampled(itertools.cycle(seconds).__next__) for seconds in _read_lines(path, clients)]


def _read_lines(path: Path, clients: int) -> list[list[float]]:
    """Return the pauses of each client in seconds, in the order of the file."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = [(int(line["client"]), float(line["seconds"])) for line in csv.DictReader(file)]
    except OSError as error:
        raise DataError(
            "VFL-6810", f'delays.trace must be a readable CSV file. Cannot read "{path}": {error.strerror}.'
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            "VFL-6811",
            f'delays.trace "{path}" needs the columns client and seconds, with a number in each line. '
            f"Found: {error}.",
        ) from error
    traces = []
    for number in range(1, clients + 1):
        trace = [seconds for client, seconds in lines if client == number]
        if not trace:
            raise DataError(
                "VFL-6812",
                f'delays.trace "{path}" needs a line for each client. Found none for client {number}.',
            )
        for seconds in trace:
            if not 0 <= seconds < float("inf"):
                raise DataError(
                    "VFL-6813",
                    f'delays.trace "{path}": seconds must be finite and 0 or more. '
                    f"Found {seconds} for client {number}.",
                )
        traces.append(trace)
    return traces
