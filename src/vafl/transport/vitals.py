"""Watches what each client sends, and raises alarms when it is not normal for the run.

A client with a valid certificate can send any finite embeddings. Nothing in the protocol tells poisoned ones
from honest ones, so the server keeps simple statistics and reports what stands out:

| alarm      | raised when                                                                          |
|------------|--------------------------------------------------------------------------------------|
| `jump`     | a message's embeddings are 20 times larger than any recent ones of this client       |
| `size`     | the client's embeddings are 100 times larger than every other client's               |
| `loss`     | evaluations are clearly better with the client's mean in place of its embeddings,    |
|            | and not better without each of the other clients, too                                |
| `overfit`  | of the model: evaluations are clearly better without any one of the clients          |
| `rate`     | the client sends 50 times as many messages per second as any other                   |
| `refused`  | messages of the client broke a rule and were refused                                 |
| `silent`   | the client does not answer requests                                                  |

An alarm never drops a message. Only the limit that follows from the client's own history does, 1000 times
its recent embeddings, and then the client is told (`InvalidMessage`): such a message would destroy the head.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from vafl.errors import InvalidMessage
from vafl.protocol.rows import Matrix

AlarmKind = Literal["jump", "size", "loss", "overfit", "rate", "refused", "silent"]
MODEL = "the model"  # in the place of a client's name: no client is to blame

_JUMP, _APART, _LIMIT = 20.0, 100.0, 1000.0
_SMALL = (
    10.0  # embeddings up to this size raise no alarm, and up to `_LIMIT` times this size are always taken
)
_FIRST = 1e8  # the largest size that is taken when there is no history to compare with
_MEMORY = 0.995  # how much of the largest size is remembered from one message to the next
_WORSE = 1.1  # times the loss without the client
_NO_DIFFERENCE = 1e-3  # of the loss: less than that says nothing about a client
_LOOKS = 3  # evaluations in a row before the loss counts
_FAST, _BRISK = 50.0, 200.0  # times the others' rate; messages per second that are never too many
_RATE_SECONDS = 10.0  # that a rate is averaged over
_LASTING = 60.0  # seconds an alarm stays on after its cause was last seen


@dataclass
class Alarm:
    """Something about a client, or about the model, that is not normal for the run.

    Attributes:
        text: what was found, for people.
        count: how often.
        last: when its cause was last seen, on the clock of `Vitals`.
    """

    kind: AlarmKind
    text: str = ""
    count: int = 0
    last: float = -math.inf


@dataclass
class _Client:
    size: float = 0.0  # the largest recent root mean square of an embedding's values
    rate: float = 0.0  # messages per second
    heard: float = 0.0
    worse: int = 0  # evaluations in a row that were better without it, and not without all others
    loss_with: float = 0.0  # when it was last judged
    loss_without: float | None = None
    alarms: dict[AlarmKind, Alarm] = field(default_factory=dict)

    @property
    def does_harm(self) -> bool:
        """Whether the loss was clearly lower without the client."""
        return self.loss_without is not None and self.loss_with > _WORSE * self.loss_without

    @property
    def makes_a_difference(self) -> bool:
        return (
            self.loss_without is not None
            and abs(self.loss_with - self.loss_without) > _NO_DIFFERENCE * self.loss_with
        )


class Vitals:
    """Statistics and alarms of every client.

    Args:
        parties: the clients' names.
        report: takes each new alarm: the client's name, or `MODEL`, and the alarm.
        clock: seconds; only differences matter.
    """

    def __init__(
        self, parties: Sequence[str], report: Callable[[str, Alarm], None], clock: Callable[[], float]
    ) -> None:
        self._parties, self._report, self._clock = list(parties), report, clock
        self._clients = [_Client() for _ in parties]
        self._model: dict[AlarmKind, Alarm] = {}
        self._overfits = 0  # evaluations in a row

    def check(self, client: int, embeddings: Matrix) -> None:
        """Compare a message with the client's recent ones, before it is taken.

        Raises:
            InvalidMessage: its embeddings are so much larger that they would destroy the head.
        """
        own = self._clients[client]
        size = _root_mean_square(embeddings)
        limit = _LIMIT * max(own.size, _SMALL) if own.size else _FIRST
        if size > limit:
            raise InvalidMessage(
                "VFL-6261",
                f"embeddings may not grow from one message to the next as these do: their size is {size:.3g} "
                f"(root mean square), and at most {limit:.3g} is taken. Check the features and the step size "
                "of this client, or set network.largest_norm to a limit of your choice.",
            )
        if size > _SMALL:
            if own.size and size > _JUMP * own.size:
                self._raise(client, "jump", f"embeddings of size {size:.3g}, where {own.size:.3g} was usual")
            if size > _APART * (others := self._largest_of_others(client)) > 0:
                found = f"embeddings of size {size:.3g}, where the other clients' are {others:.3g}"
                self._raise(client, "size", found)
        own.size = max(size, _MEMORY * own.size)

    def heard(self, client: int) -> float:
        """Count a message; return the seconds to wait before reading the next one.

        A client that floods the server is slowed down, not refused: reading it later costs it nothing that an
        honest client would miss.
        """
        own, now = self._clients[client], self._clock()
        own.rate = own.rate * math.exp((own.heard - now) / _RATE_SECONDS) + 1 / _RATE_SECONDS
        own.heard = now
        if own.rate <= _BRISK or len(self._clients) == 1:
            return 0.0
        others = max(self._rate(m, now) for m in range(len(self._clients)) if m != client)
        limit = max(_BRISK, _FAST * others)
        if own.rate <= limit:
            return 0.0
        self._raise(client, "rate", f"{own.rate:,.0f} messages a second; no other sends {others:,.0f}")
        return 1 / limit

    def refused(self, client: int, reason: str) -> None:
        """Note that a message of the client was refused."""
        self._raise(client, "refused", reason)

    def silent(self, client: int, seconds: float) -> None:
        """Note that the client let a request expire."""
        self._raise(client, "silent", f"a request was not answered within {seconds:g} s")

    def evaluated(self, loss: float, without: Mapping[int, float]) -> None:
        """Compare an evaluation's loss with the loss when a client's mean stands in for its embeddings.

        A model that overfits is too sure of itself. Any mean makes it less sure, so the loss falls whichever
        client is left out, and no client is to blame. Clients that make no difference, such as one that never
        came, are no evidence for either.

        Args:
            loss: with every client.
            without: client -> the loss without it, for the clients that are judged at this evaluation.
        """
        for client, other in without.items():
            self._clients[client].loss_with, self._clients[client].loss_without = loss, other
        weighty = [own for own in self._clients if own.makes_a_difference]
        overfits = len(weighty) > 1 and all(own.does_harm for own in weighty)
        for client, other in without.items():
            own = self._clients[client]
            own.worse = own.worse + 1 if own.does_harm and not overfits else 0
            if own.worse >= _LOOKS:
                self._raise(client, "loss", f"the loss is {loss:.4g} with it, and {other:.4g} without")
        self._overfits = self._overfits + 1 if overfits else 0
        if self._overfits >= _LOOKS:
            self._raise_overfit(loss, [own.loss_without for own in weighty if own.loss_without is not None])

    def _raise_overfit(self, loss: float, without: Sequence[float]) -> None:
        text = (
            f"the loss is {loss:.4g} with all clients, and {min(without):.4g} to {max(without):.4g} without "
            "any one of them: the model overfits. Set stop.patience to keep the best evaluation, or train "
            "for fewer epochs"
        )
        self._turn_on(MODEL, self._model, "overfit", text)

    def alarms(self, client: int) -> list[Alarm]:
        """The alarms about a client that are on now."""
        return self._on(self._clients[client].alarms)

    def model_alarms(self) -> list[Alarm]:
        """The alarms about the model that are on now."""
        return self._on(self._model)

    def _on(self, alarms: Mapping[AlarmKind, Alarm]) -> list[Alarm]:
        oldest = self._clock() - _LASTING
        return [alarm for alarm in list(alarms.values()) if alarm.last >= oldest]

    def report(self) -> dict[str, dict[str, object]]:
        """What a run's summary says of its clients: statistics, and every alarm there was."""
        return {
            name: {
                "embedding_size": own.size,
                "loss_without": own.loss_without,
                "alarms": _reported(own.alarms),
            }
            for name, own in zip(self._parties, self._clients, strict=True)
        }

    def model_report(self) -> dict[str, dict[str, object]]:
        """Return every alarm about the model that there was, for a run's summary."""
        return _reported(self._model)

    def _largest_of_others(self, client: int) -> float:
        return max((own.size for m, own in enumerate(self._clients) if m != client), default=0.0)

    def _rate(self, client: int, now: float) -> float:
        own = self._clients[client]
        return own.rate * math.exp((own.heard - now) / _RATE_SECONDS)

    def _raise(self, client: int, kind: AlarmKind, text: str) -> None:
        """Turn an alarm on, or note that its cause is still there; each time it goes on it is reported."""
        self._turn_on(self._parties[client], self._clients[client].alarms, kind, text)

    def _turn_on(self, name: str, alarms: dict[AlarmKind, Alarm], kind: AlarmKind, text: str) -> None:
        alarm, now = alarms.setdefault(kind, Alarm(kind)), self._clock()
        was_on = alarm.last >= now - _LASTING
        alarm.text, alarm.count, alarm.last = text, alarm.count + 1, now
        if not was_on:
            self._report(name, alarm)


def _reported(alarms: Mapping[AlarmKind, Alarm]) -> dict[str, dict[str, object]]:
    return {alarm.kind: {"count": alarm.count, "last": alarm.text} for alarm in alarms.values()}


def _root_mean_square(matrix: Matrix) -> float:
    if not matrix.size:
        return 0.0
    flat = matrix.ravel()
    with np.errstate(over="ignore"):
        square = float(flat @ flat) / flat.size
    if not square < math.inf:  # beyond float32
        wide = flat.astype(np.float64)
        square = float(wide @ wide) / flat.size
    return math.sqrt(square)
