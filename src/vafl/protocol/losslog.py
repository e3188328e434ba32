"""The minibatch losses of a run, and the check that they stay finite."""

import math

from vafl.errors import Diverged


class LossLog:
    """Averages the losses between two calls of `take_mean`."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    @staticmethod
    def check(loss: float, iteration: int) -> None:
        """Raise Diverged unless the loss is a finite number."""
        if not math.isfinite(loss):
            raise Diverged(
                "VFL-4011",
                f"the loss must stay finite. Found {loss} at iteration {iteration}. "
                "Lower optimiser.step_size, or scale the features, and the labels of a regression.",
            )

    def note(self, loss: float) -> None:
        """Add the loss of one minibatch."""
        self._sum += loss
        self._count += 1

    def take_mean(self) -> float | None:
        """Return the mean since the last call; None if there was no loss."""
        mean = self._sum / self._count if self._count else None
        self._sum, self._count = 0.0, 0
        return mean
