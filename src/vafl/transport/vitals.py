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

An alarm never drops a message. A message is refused only if its embeddings are 1000 times larger than the
client's recent ones, because it would destroy the head. The client is then told (`InvalidMessage`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from vafl.arrays import Matrix
from vafl.errors import InvalidMessage

AlarmKind = Literal["jump", "size", "loss", "overfit", "rate", "refused", "silent"]
MODEL = "the model"  # in place of a client's name, for alarms that no client has caused

_JUMP, _APART, _LIMIT = 20.0, 100.0, 1000.0  # see the table above
# Embeddings up to this size raise no alarm, and those up to `_LIMIT` times this size are always accepted.
_SMALL = 10.0
_FIRST = 1e8  # the largest size that is accepted from a client without history
_MEMORY = 0.995  # decay of the largest recent size, per message
_WORSE = 1.1  # a client does harm if the loss is more than this times the loss without it
_NO_DIFFERENCE = 1e-3  # a smaller relative change of the loss says nothing about a client
_LOOKS = 3  # evaluations in a row before an alarm about the loss
_FAST = 50.0  # a client is too fast at this many times the rate of any other
_BRISK = 200.0  # messages per second that are never too fast
_RATE_SECONDS = 10.0  # time constant of the average rate
_LASTING = 60.0  # seconds for which an alarm stays on after its cause was last seen


@dataclass
class Alarm:
    """Something about a client, or about the model, that is not normal for the run.

    Attributes:
        text: what was found, for people.
        count: how often the cause was seen.
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
    heard: float = 0.0  # when the last message arrived
    worse: int = 0  # evaluations in a row that were better without this client, and not without every other
    loss_with: float = 0.0  # of the last evaluation that judged this client
    loss_without: float | None = None  # likewise; None before the first
    alarms: dict[AlarmKind, Alarm] = field(default_factory=dict)

    @property
    def does_harm(self) -> bool:
        """Return whether the loss was clearly lower without the client."""
        return self.loss_without is not None and self.loss_with > _WORSE * self.loss_without

    @property
    def makes_a_difference(self) -> bool:
        return (
            self.loss_without is not None
            and abs(self.loss_with - self.loss_without) > _NO_DIFFERENCE * self.loss_with
        )


class Vitals:
    """Keep statistics of every client and raise alarms.

    Args:
        parties: the clients' names.
        report: called for each new alarm with the client's name, or `MODEL`, and the alarm.
        clock: seconds; only differences matter.
    """

    def __init__(
        self, parties: Sequence[str], report: Callable[[str, Alarm], None], clock: Callable[[], float]
    ) -> None:
        self._parties, self._report, self._clock = list(parties), report, clock
        self._clients = [_Client() for _ in parties]
        self._model: dict[AlarmKind, Alarm] = {}
        self._overfits = 0  # evaluations in a row in which the model overfitted

    def check(self, client: int, embeddings: Matrix) -> None:
        """Compare a message's embeddings with the client's recent ones, before the message is accepted.

        Raises:
            InvalidMessage: the embeddings are so much larger that they would destroy the head.
        """
        state = self._clients[client]
        size = _root_mean_square(embeddings)
        limit = _LIMIT * max(state.size, _SMALL) if state.size else _FIRST
        if size > limit:
            raise InvalidMessage(
                "VFL-6261",
                f"the size of embeddings (root mean square) must be at most {limit:.3g}, given this client's "
                f"earlier messages. Found {size:.3g}. Check the features and the step size of this client, "
                "or set network.largest_norm to a limit of your choice.",
            )
        if size > _SMALL:
            if state.size and size > _JUMP * state.size:
                text = f"embeddings of size {size:.3g}, where {state.size:.3g} was usual"
                self._raise(client, "jump", text)
            others = max((each.size for m, each in enumerate(self._clients) if m != client), default=0.0)
            if size > _APART * others > 0:
                text = f"embeddings of size {size:.3g}, where the other clients' are {others:.3g}"
                self._raise(client, "size", text)
        state.size = max(size, _MEMORY * state.size)

    def heard(self, client: int) -> float:
        """Count a message and return the seconds to wait before reading the next one.

        A client that floods the server is slowed down instead of refused. So an honest client that happens to
        be fast loses no message.
        """
        state, now = self._clients[client], self._clock()
        state.rate = self._rate(client, now) + 1 / _RATE_SECONDS
        state.heard = now
        if state.rate <= _BRISK or len(self._clients) == 1:
            return 0.0
        others = max(self._rate(m, now) for m in range(len(self._clients)) if m != client)
        limit = max(_BRISK, _FAST * others)
        if state.rate <= limit:
            return 0.0
        self._raise(client, "rate", f"{state.rate:,.0f} messages a second; no other sends {others:,.0f}")
        return 1 / limit

    def refused(self, client: int, reason: str) -> None:
        """Raise an alarm because a message of the client was refused."""
        self._raise(client, "refused", reason)

    def silent(self, client: int, seconds: float) -> None:
        """Raise an alarm because the client has not answered a request within these seconds."""
        self._raise(client, "silent", f"a request was not answered within {seconds:g} s")

    def evaluated(self, loss: float, without: Mapping[int, float]) -> None:
        """Compare an evaluation's loss with the loss when a client's mean replaces its embeddings.

        A model that overfits is overconfident. Any client's mean makes it less confident, so the loss falls
        whichever client is left out, and no client is to blame. Clients that make no difference, such as one
        that never joined, are evidence for neither.

        Args:
            loss: with every client.
            without: client -> the loss without it, for the clients that are judged at this evaluation.
        """
        for client, loss_without in without.items():
            self._clients[client].loss_with, self._clients[client].loss_without = loss, loss_without
        relevant = [state for state in self._clients if state.makes_a_difference]
        overfits = len(relevant) > 1 and all(state.does_harm for state in relevant)
        for client, loss_without in without.items():
            state = self._clients[client]
            state.worse = state.worse + 1 if state.does_harm and not overfits else 0
            if state.worse >= _LOOKS:
                text = f"the loss is {loss:.4g} with it, and {loss_without:.4g} without"
                self._raise(client, "loss", text)
        self._overfits = self._overfits + 1 if overfits else 0
        if self._overfits >= _LOOKS:
            losses = [state.loss_without for state in relevant if state.loss_without is not None]
            text = (
                f"the loss is {loss:.4g} with all clients, and {min(losses):.4g} to {max(losses):.4g} "
                "without any one of them: the model overfits. Set stop.patience to keep the best evaluation, "
                "or train for fewer epochs"
            )
            self._turn_on(MODEL, self._model, "overfit", text)

    def alarms(self, client: int) -> list[Alarm]:
        """Return the alarms about a client that are on now."""
        return self._on(self._clients[client].alarms)

    def model_alarms(self) -> list[Alarm]:
        """Return the alarms about the model that are on now."""
        return self._on(self._model)

    def _on(self, alarms: Mapping[AlarmKind, Alarm]) -> list[Alarm]:
        oldest = self._clock() - _LASTING
        # Copy first: another thread may add an alarm meanwhile.
        return [alarm for alarm in list(alarms.values()) if alarm.last >= oldest]

    def report(self) -> dict[str, dict[str, object]]:
        """Return each client's statistics and all its alarms so far, for a run's summary."""
        return {
            name: {
                "embedding_size": state.size,
                "loss_without": state.loss_without,
                "alarms": _reported(state.alarms),
            }
            for name, state in zip(self._parties, self._clients, strict=True)
        }

    def model_report(self) -> dict[str, dict[str, object]]:
        """Return all alarms about the model so far, for a run's summary."""
        return _reported(self._model)

    def _rate(self, client: int, now: float) -> float:
        """Return a client's messages per second, an exponential average that decays while it is silent."""
        state = self._clients[client]
        return state.rate * math.exp((state.heard - now) / _RATE_SECONDS)

    def _raise(self, client: int, kind: AlarmKind, text: str) -> None:
        """Turn an alarm on and report it; if it is on already, only record its cause again."""
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
    # float32 is fast and accurate enough. Only if the sum of squares overflows, compute it in float64.
    with np.errstate(over="ignore"):
        square = float(flat @ flat) / flat.size
    if not square < math.inf:
        wide = flat.astype(np.float64)
        square = float(wide @ wide) / flat.size
    return math.sqrt(square)
