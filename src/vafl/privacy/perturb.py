"""Perturbed local embedding: clip each row's embedding, then add Gaussian noise.

No (epsilon, delta) is claimed here: noise on embeddings alone is not a per-record guarantee when the
client's model is trained on the same records. That needs the accountant.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vafl.errors import ConfigError


@dataclass(frozen=True)
class PrivacySettings:
    """The perturbation of every embedding that leaves a client.

    Attributes:
        clip: largest norm of a row's embedding; 0 leaves it as it is.
        noise: standard deviation c of the Gaussian noise; 0 adds none.
    """

    clip: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("clip", self.clip), ("noise", self.noise)):
            if not 0 <= value < float("inf"):
                raise ConfigError(f"privacy.{name} must be 0 or more. Found {value}.")

    def perturbation(self) -> "Perturbation | None":
        return Perturbation(self.clip, self.noise) if self.clip or self.noise else None


class Perturbation:
    """Applied to [batch, width] embeddings, with or without a graph.

    The noise comes from a generator of its own that the operating system seeds, never from the run's
    seed: whoever knows the seed must not be able to subtract the noise.
    """

    def __init__(self, clip: float, noise: float) -> None:
        self._clip, self._noise = clip, noise
        self._generator = torch.Generator()
        self._generator.seed()

    def __call__(self, embeddings: Tensor) -> Tensor:
        if self._clip:
            norms = embeddings.norm(dim=1, keepdim=True)
            embeddings = embeddings * (self._clip / norms.clamp_min(self._clip))
        if self._noise:
            embeddings = embeddings + self._noise * torch.randn(embeddings.shape, generator=self._generator)
        return embeddings
