"""What keeps the labels to the server, whose gradients would tell them.

Randomised response, once, is a guarantee: all that follows from the drawn labels is post-processing.
Clipping and noising the gradients is a heuristic: it makes label inference harder and proves nothing.
Where the drawn labels are kept is the runtime's business.
"""

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vafl.errors import ConfigError
from vafl.privacy.noise import Noise
from vafl.privacy.release import clip_rows


@dataclass(frozen=True)
class LabelSettings:
    """What protects the training labels.

    Attributes:
        epsilon: of randomised response: each label is kept with probability e^epsilon/(e^epsilon + k - 1),
            else replaced by another of the k classes; 0 uses the labels as they are.
        file: where the drawn labels are kept; runs that share it spend epsilon once, all others once each.
            Empty means the server's state in the run folder, and nowhere for a simulation.
        gradient_clip: largest norm of a row of the gradients the server returns; 0 leaves them as they are.
            A heuristic: it proves nothing.
        gradient_noise: standard deviation of the Gaussian noise on the gradients the server returns; 0 adds
            none. A heuristic: it proves nothing.
    """

    epsilon: float = 0.0
    file: str = ""
    gradient_clip: float = 0.0
    gradient_noise: float = 0.0

    def __post_init__(self) -> None:
        for name in ("epsilon", "gradient_clip", "gradient_noise"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"labels.{name} must be 0 or more. Found {value}.")
        if self.file and not self.epsilon:
            raise ConfigError(
                f'labels.file keeps labels drawn by randomised response. Found "{self.file}" with '
                "labels.epsilon = 0. Set epsilon, or leave out file."
            )

    def check_classes(self, classes: int) -> None:
        if self.epsilon and not classes:
            raise ConfigError(
                f"labels.epsilon is for classes. Found {self.epsilon} with a regression, whose labels are no "
                "classes to draw from. Set it to 0, or group the labels into classes."
            )

    def mask(self) -> "GradientMask | None":
        clip, noise = self.gradient_clip, self.gradient_noise
        return GradientMask(clip, noise) if clip or noise else None

    def report(self, classes: int) -> dict[str, Any]:
        """What a run's summary says of its labels."""
        kept = keep_probability(self.epsilon, classes) if self.epsilon else 1.0
        return {
            "epsilon": self.epsilon or None,
            "kept_with_probability": kept,
            "file": self.file or None,
            "heuristics": {"gradient_clip": self.gradient_clip, "gradient_noise": self.gradient_noise},
        }


def keep_probability(epsilon: float, classes: int) -> float:
    """e^epsilon / (e^epsilon + classes - 1): that of keeping a label."""
    return 1 / (1 + (classes - 1) * math.exp(-epsilon))


def randomise(labels: Tensor, classes: int, epsilon: float) -> Tensor:
    """Class numbers [rows] after randomised response, drawn from the operating system's entropy.

    Any label is at most e^epsilon times as probable for one true class as for another.
    """
    words = np.frombuffer(os.urandom(16 * len(labels)), dtype=np.uint64).reshape(2, -1)
    kept = (words[0] >> np.uint64(11)) < int(keep_probability(epsilon, classes) * 2**53)
    shift = (1 + words[1] % np.uint64(classes - 1)).astype(np.int64)
    true = labels.numpy().astype(np.int64)
    drawn = np.where(kept, true, (true + shift) % classes)
    return torch.from_numpy(drawn).to(labels.dtype)


class GradientMask:
    """Clips each row of gradients [batch, width], then adds Gaussian noise."""

    def __init__(self, clip: float, deviation: float) -> None:
        self._clip, self._deviation = clip, deviation
        self._noise = Noise()

    def __call__(self, gradients: Tensor) -> Tensor:
        if self._clip:
            gradients = clip_rows(gradients, self._clip)
        if self._deviation:
            gradients = gradients + self._noise.gaussian(gradients.shape, self._deviation)
        return gradients
