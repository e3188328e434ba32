"""How often one record leaves its client in a run, worked out before the run begins.

For planning only: what a record has really cost is in the ledger, which counts, and what it may cost is
limited by mu_max alone. A figure here is for so many activations of each client; of these it is a bound, or
one that holds with probability 99.9 %, or an estimate. Where the activations are expected ones, by delays
that a real federation does not have, it bounds nothing. Notes say which.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from scipy.stats import binom, norm

from vafl.errors import ConfigError

_RISK = 1e-3  # that some record is beyond a figure that rests on chance


@dataclass(frozen=True)
class ExpectedUsage:
    """A run as one client lives through it.

    Attributes:
        rows: training records.
        batch_size: records of a minibatch.
        kind: whether minibatches deal out each epoch, or are drawn afresh.
        activations: uploads of minibatches by this client, as planned or as expected.
        others: the same of each other client.
        refresh: which other rows are uploaded after each activation.
        refresh_rows: how many, for `random`.
        full_start: whether the client begins with an upload of all rows.
        delay_bound: whether the server may ask for fresh embeddings.
        local_steps: updates a minibatch is used for.
        held_out: records that are uploaded for evaluations only.
        evaluations: how many of those there are.
        expected: whether these numbers are means, which a run may exceed.
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
                "VFL-5021", f"batch_size must be in 1..{self.rows}, the rows. Found {self.batch_size}."
            )
        if not self.activations > 0:
            raise ConfigError(
                "VFL-5022", f"a client's activations must be above 0. Found {self.activations}."
            )


@dataclass(frozen=True)
class Exposure:
    """The largest number of uses of any one record, if each client is active as often as its course says.

    Attributes:
        batches: its uploads in minibatches.
        refreshes: those because others are about to use it, with the first upload of all rows.
        requests: those the server asks for under a delay bound, if it asks for no more than it needs.
        updates: the local updates it is used for.
        evaluations: uploads of a record that is held out, and never trained on.
        vectors: all that the client uploads, of any record.
        notes: how sure these figures are.
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
        """T_n of the training record that is uploaded most."""
        return self.batches + self.refreshes + self.requests


def worst(exposures: Sequence[Exposure]) -> Exposure:
    """The largest of every figure."""
    counts = [field.name for field in fields(Exposure) if field.name != "notes"]
    largest = {name: max(getattr(exposure, name) for exposure in exposures) for name in counts}
    notes = dict.fromkeys(note for exposure in exposures for note in exposure.notes)
    return Exposure(**largest, notes=tuple(notes))


def expose(course: ExpectedUsage) -> Exposure:
    """What a run makes of its most used record."""
    batches = _uses(course, course.activations)
    refreshes, total = _REFRESHES[course.refresh](course)
    requests = _requests(course)
    vectors = course.activations * course.batch_size + total + requests * course.rows
    vectors += course.full_start * course.rows + course.evaluations * course.held_out
    return Exposure(
        batches=batches,
        refreshes=refreshes + course.full_start,
        requests=requests,
        updates=batches * course.local_steps,
        evaluations=course.evaluations if course.held_out else 0,
        vectors=vectors,
        notes=_notes(course),
    )


def _uses(course: ExpectedUsage, activations: float) -> float:
    """How often one record is in so many minibatches of one client: at most, or with probability 99.9 %."""
    if course.kind == "epochs":
        return math.ceil(activations / math.ceil(course.rows / course.batch_size))
    return _most(course, activations, course.batch_size)


def _most(course: ExpectedUsage, draws: float, size: int) -> float:
    """The most often any record is drawn, when `size` of them are, so many times afresh."""
    return float(binom.isf(_RISK / course.rows, math.ceil(draws), min(1.0, size / course.rows)))


def _no_refresh(course: ExpectedUsage) -> tuple[float, float]:
    return 0.0, 0.0


def _refresh_all(course: ExpectedUsage) -> tuple[float, float]:
    return course.activations, course.activations * course.rows


def _random_refresh(course: ExpectedUsage) -> tuple[float, float]:
    size = min(course.refresh_rows, course.rows)
    return _most(course, course.activations, size), course.activations * size


def _lookahead(course: ExpectedUsage) -> tuple[float, float]:
    """Of client j's batches a client uploads, each time, those of its last gap and one more.

    The gaps add up to j's activations A_j, so that makes A_j + A batches in all, and a record's mean over
    all records is at most the sum over j of (A_j + A) B/N. The largest is estimated: a batch is uploaded
    1 + r times, r = A/A_j, with the variance r (1 + r) of waiting times without memory.
    """
    own, share = course.activations, course.batch_size / course.rows
    mean = variance = 0.0
    for other in course.others:
        ratio = own / other if other else math.inf
        mean += (other + own) * share
        variance += own * share * (1 + ratio)
        if course.kind == "iid":
            variance += (own + other) * share * (1 + ratio)
    largest = mean + float(norm.isf(_RISK / course.rows)) * math.sqrt(variance)
    return math.ceil(min(largest, own)), mean * course.rows


_REFRESHES: dict[str, Callable[[ExpectedUsage], tuple[float, float]]] = {
    "none": _no_refresh,
    "all": _refresh_all,
    "random": _random_refresh,
    "lookahead": _lookahead,
}


def _requests(course: ExpectedUsage) -> float:
    """A step asks for a cell once at most; even the active client's own, if its upload has waited."""
    if not course.delay_bound:
        return 0.0
    return sum(_uses(course, activations) for activations in (*course.others, course.activations))


def _notes(course: ExpectedUsage) -> tuple[str, ...]:
    notes = ["by expected activations; only mu_max is a limit"] if course.expected else []
    if course.kind == "iid" or course.refresh == "random":
        notes.append("drawn at random: no record is used more often with probability 99.9 %")
    if course.refresh == "lookahead":
        notes.append(
            "look-ahead: an estimate; while another client is silent its next minibatch is uploaded at "
            "every activation"
        )
    if course.delay_bound:
        notes.append(
            "delay bound: the requests of a server that asks for no more than it needs; what it may ask for "
            "has no bound but mu_max"
        )
    return tuple(notes)
