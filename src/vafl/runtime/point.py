"""What an evaluation found. It stands apart from training: whoever reads run folders needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """One evaluation: a line of history.jsonl."""

    seconds: float
    updates: int
    bytes_up: int
    bytes_down: int
    train_loss: float | None
    metric: float
