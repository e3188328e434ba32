"""Protect the server's training labels, which its gradients would reveal to clients.

Randomised response is a guarantee: it draws the labels once, and everything computed from the drawn labels is
post-processing. Clipping and noising the gradients is a heuristic without a guarantee: it makes label
inference harder. The caller stores the drawn labels.
"""

import os
from typing import Self

import numpy as np
import torch
from torch import Tensor

from vafl.arrays import Matrix
from vafl.privacy.mechanism.noise import Noise
from vafl.privacy.mechanism.release import clip_rows
from vafl.privacy.settings import LabelSettings, keep_probability


def randomise(labels: Tensor, classes: int, epsilon: float) -> Tensor:
    """Return class numbers after randomised response: [rows]. The operating system supplies the randomness.

    Every result is at most e^epsilon times as probable for one true class as for another.
    """
    words = np.frombuffer(os.urandom(16 * len(labels)), dtype=np.uint64).reshape(2, -1)
    kept = (words[0] >> np.uint64(11)) < int(keep_probability(epsilon, classes) * 2**53)
    shift = (1 + words[1] % np.uint64(classes - 1)).astype(np.int64)
    true = labels.numpy().astype(np.int64)
    drawn = np.where(kept, true, (true + shift) % classes)
    return torch.from_numpy(drawn).to(labels.dtype)


class GradientMask:
    """Clip each row of gradients [batch, width], then add Gaussian noise."""

    def __init__(self, clip: float, deviation: float) -> None:
        self._clip, self._deviation = clip, deviation
        self._noise = Noise()

    @classmethod
    def of(cls, settings: LabelSettings) -> Self | None:
        """Make the mask that the settings describe; return None if they neither clip nor noise."""
        clip, deviation = settings.gradient_clip, settings.gradient_noise
        return cls(clip, deviation) if clip or deviation else None

    def __call__(self, gradients: Matrix) -> Matrix:
        if self._clip:
            gradients = clip_rows(torch.from_numpy(gradients), self._clip).numpy()
        return self._noise.added_to(gradients, self._deviation) if self._deviation else gradients
