"""The minibatch losses a run has seen, and the alarm when one is no number any more."""

import math

from vafl.errors import Diverged


class LossLog:
    """Sums losses between two looks."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    @staticmethod
    def check(loss: float, iteration: int) -> None:
        """Raises Diverged unless the loss is a finite number."""
        if not math.isfinite(loss):
            raise Diverged(
                "VFL-4011",
                f"the loss must stay finite. Found {loss} at iteration {iteration}. "
                "Lower optimiser.step_size, or scale the features, and a regression's labels.",
            )

    def note(self, loss: float) -> None:
        self._sum += loss
        self._count += 1

    def take_mean(self) -> float | None:
        """The mean since the last call; None if there was no loss."""
        mean = self._sum / self._count if self._count else None
        self._sum, self._count = 0.0, 0
        return mean
