"""The result of an evaluation. It stands apart from training: reading run folders needs no torch."""

from dataclasses import dataclass, field
from typing import Literal, Protocol


@dataclass(frozen=True)
class Evaluation:
    """One evaluation: a line of history.jsonl.

    Attributes:
        metric: the headline metric.
        metrics: every metric by name, the headline too. A metric is None where the rows do not define it.
        unanswered: clients that did not send their embeddings when asked, and what was used instead: what
            they sent `last`, or a `default` (their mean embedding) where they have sent nothing.
    """

    seconds: float
    updates: int
    bytes_up: int
    bytes_down: int
    train_loss: float | None
    metric: float | None
    metrics: dict[str, float | None] = field(default_factory=dict)
    unanswered: dict[str, Literal["last", "default"]] = field(default_factory=dict)


class Clock(Protocol):
    """How far a run is."""

    @property
    def now(self) -> float: ...

    @property
    def updates(self) -> int: ...
