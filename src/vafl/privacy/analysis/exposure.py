"""Predict, before a run, how often a client will upload its most used record.

These numbers are for planning. The ledger counts the uploads that really happen, and only privacy.mu_max
limits them.

Each number assumes a given number of activations per client. It is then a bound, a bound that holds with
probability 99.9 %, or an estimate. If the activations themselves are expectations, computed from configured
delays that a real federation does not have, the number bounds nothing. `Exposure.notes` says which case
applies.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from scipy.stats import binom, norm

from vafl.errors import ConfigError

_RISK = 1e-3  # probability that some record exceeds a probabilistic bound


@dataclass(frozen=True)
class ExpectedUsage:
    """One client's part in a planned run.

    Attributes:
        rows: the number of training records.
        batch_size: the number of records in a minibatch.
        activations: how many minibatches this client uploads.
        others: how many minibatches each other client uploads.
        kind: `epochs` partitions the rows into minibatches every epoch; `iid` draws each one independently.
        refresh: which other rows the client uploads after each activation.
        refresh_rows: how many of them, for `random`.
        full_start: whether the client starts with an upload of all rows.
        delay_bound: whether the server may request fresh embeddings.
        local_steps: the number of local updates per minibatch.
        held_out: the number of records that are uploaded for evaluations only.
        evaluations: the number of evaluations.
        expected: whether the numbers of activations are expectations, which a run may exceed.
    """

    rows: int
    batch_size: int
    activations: float
    others: tuple[float, ...] = ()
    kind: Literal["epochs", "iid"] = "epochs"
    refresh: Literal["none", "random", "all", "lookahead"] = "none"
    refresh_rows: int = 0
    full_start: bool = False
    delay_bound: bool = False
    local_steps: int = 1
    held_out: int = 0
    evaluations: int = 0
    expected: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= self.rows:
            raise ConfigError(
                "VFL-5021",
                f"batch_size must be in 1..{self.rows} (the number of rows). Found {self.batch_size}.",
            )
        if not self.activations > 0:
            raise ConfigError(
                "VFL-5022", f"a client's activations must be above 0. Found {self.activations}."
            )


@dataclass(frozen=True)
class Exposure:
    """How often a run uses the most used record, if each client is active as often as expected.

    Attributes:
        batches: uploads of the record in minibatches.
        refreshes: uploads in refreshes, including the first upload of all rows.
        requests: uploads that the server requests under a delay bound, if it requests no more than it needs.
        updates: local updates that use the record.
        evaluations: uploads of a held-out record, which is never trained on.
        vectors: all embeddings that the client uploads, of any record.
        notes: how certain these numbers are.
    """

    batches: float
    refreshes: float
    requests: float
    updates: float
    evaluations: float
    vectors: float
    notes: tuple[str, ...] = ()

    @property
    def uploads(self) -> float:
        """T_n: the uploads of the most used training record."""
        return self.batches + self.refreshes + self.requests


def worst(exposures: Sequence[Exposure]) -> Exposure:
    """Return the largest value of each number, and all notes."""
    counts = [field.name for field in fields(Exposure) if field.name != "notes"]
    largest = {name: max(getattr(exposure, name) for exposure in exposures) for name in counts}
    notes = dict.fromkeys(note for exposure in exposures for note in exposure.notes)
    return Exposure(**largest, notes=tuple(notes))


def expose(usage: ExpectedUsage) -> Exposure:
    """Return how often the run uses its most used record."""
    batches = _uses(usage, usage.activations)
    refreshes, total = _REFRESHES[usage.refresh](usage)
    requests = _requests(usage)
    vectors = usage.activations * usage.batch_size + total + requests * usage.rows
    vectors += usage.full_start * usage.rows + usage.evaluations * usage.held_out
    return Exposure(
        batches=batches,
        refreshes=refreshes + usage.full_start,
        requests=requests,
        updates=batches * usage.local_steps,
        evaluations=usage.evaluations if usage.held_out else 0,
        vectors=vectors,
        notes=_notes(usage),
    )


def _uses(usage: ExpectedUsage, activations: float) -> float:
    """Return how many of these minibatches one record is in, at most or with probability 99.9 %."""
    if usage.kind == "epochs":
        return math.ceil(activations / math.ceil(usage.rows / usage.batch_size))
    return _most(usage, activations, usage.batch_size)


def _most(usage: ExpectedUsage, draws: float, size: int) -> float:
    """Return how often any record is drawn at most, in `draws` independent draws of `size` records each."""
    return float(binom.isf(_RISK / usage.rows, math.ceil(draws), min(1.0, size / usage.rows)))


def _no_refresh(usage: ExpectedUsage) -> tuple[float, float]:
    return 0.0, 0.0


def _refresh_all(usage: ExpectedUsage) -> tuple[float, float]:
    return usage.activations, usage.activations * usage.rows


def _random_refresh(usage: ExpectedUsage) -> tuple[float, float]:
    size = min(usage.refresh_rows, usage.rows)
    return _most(usage, usage.activations, size), usage.activations * size


def _lookahead(usage: ExpectedUsage) -> tuple[float, float]:
    """Estimate the uploads of the most used record, and of all records, with the look-ahead refresh.

    At each of its A activations, the client uploads the batches that client j used since the last activation,
    and one more. Client j uses A_j batches in total, so this makes A_j + A batches. The mean over all records
    is at most the sum over j of (A_j + A) B/N. The maximum is an estimate: a batch is uploaded 1 + r times,
    with r = A/A_j and variance r (1 + r), that of memoryless waiting times.
    """
    active, share = usage.activations, usage.batch_size / usage.rows
    mean = variance = 0.0
    for other in usage.others:
        ratio = active / other if other else math.inf
        mean += (other + active) * share
        variance += active * share * (1 + ratio)
        if usage.kind == "iid":
            variance += (active + other) * share * (1 + ratio)
    largest = mean + float(norm.isf(_RISK / usage.rows)) * math.sqrt(variance)
    return math.ceil(min(largest, active)), mean * usage.rows


_REFRESHES: dict[str, Callable[[ExpectedUsage], tuple[float, float]]] = {
    "none": _no_refresh,
    "all": _refresh_all,
    "random": _random_refresh,
    "lookahead": _lookahead,
}


def _requests(usage: ExpectedUsage) -> float:
    """Return how often the server requests one record at most.

    Each step requests a record at most once from each client. That includes the active client, whose upload
    may have become stale while it waited.
    """
    if not usage.delay_bound:
        return 0.0
    return sum(_uses(usage, activations) for activations in (*usage.others, usage.activations))


def _notes(usage: ExpectedUsage) -> tuple[str, ...]:
    notes = ["based on expected activations; only mu_max is a limit"] if usage.expected else []
    if usage.kind == "iid" or usage.refresh == "random":
        notes.append("random draws: with probability 99.9 %, no record is used more often")
    if usage.refresh == "lookahead":
        notes.append(
            "look-ahead: an estimate; while another client is silent, every activation uploads that client's "
            "next minibatch"
        )
    if usage.delay_bound:
        notes.append(
            "delay bound: assumes that the server requests no more than it needs; only mu_max limits its "
            "requests"
        )
    return tuple(notes)
