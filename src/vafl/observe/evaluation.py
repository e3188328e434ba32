"""The result of an evaluation. This module does not import torch, so that reading run folders is fast."""

from dataclasses import dataclass, field
from typing import Literal, Protocol


@dataclass(frozen=True)
class Evaluation:
    """One evaluation, which is one line of history.jsonl.

    Attributes:
        seconds: the run's clock.
        updates: server steps so far.
        bytes_up, bytes_down: bytes that clients have sent and received so far.
        train_loss: the mean loss of the minibatches since the previous evaluation.
        metric: the headline metric.
        metrics: every metric by name, including the headline. A metric is None if the rows do not define it.
        unanswered: clients that did not send embeddings when asked, and the replacement that was used: "last"
            for the embeddings they sent before, "default" for their mean embedding if they sent none.
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
    """The clock of a run: its time in seconds and its number of updates."""

    @property
    def now(self) -> float: ...

    @property
    def updates(self) -> int: ...
