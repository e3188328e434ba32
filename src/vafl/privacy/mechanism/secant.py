"""Estimate how fast a gradient changes, with secants: |g(theta + e v) - g(theta)| / e.

Autograd's Hessian-vector products would miss the kinks of ReLU, which the noise smooths only on average. The
noise is drawn once and reused at every point: otherwise it would dominate the difference of two gradients.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vafl.privacy.mechanism.layers import HiddenNoise
from vafl.privacy.mechanism.noise import Noise
from vafl.privacy.mechanism.release import clip_rows, split_last
from vafl.privacy.settings import PrivacySettings


class FixedNoise:
    """Compute a client's noised embeddings, with the same noise in every call.

    Args:
        model: the client's model. Its hidden layers get hooks.
        settings: the clip and the noise.
        features: [rows, ...].
        draws: the number of noise samples per row.
    """

    def __init__(self, model: nn.Module, settings: PrivacySettings, features: Tensor, draws: int) -> None:
        noise = Noise()
        noised = settings.protection.noises_uploads
        cut = noised and settings.placement == "pre-activation"
        self._body, self._rest = split_last(model) if cut else (model, nn.Identity())
        self._features = features.repeat(draws, *[1] * (features.ndim - 1))
        self._clip = settings.clip if noised else 0.0
        hidden = HiddenNoise(self._body, settings, noise) if noised and settings.layers else None
        with torch.no_grad():
            shape = self._body(self._features).shape
        if hidden is not None:
            hidden.replayed = list(hidden.drawn)
        self._noise = noise.gaussian(shape, settings.noise) if noised and settings.noise else None

    def __call__(self) -> Tensor:
        """Return embeddings [draws * rows, width], differentiable in the model's parameters."""
        values = self._body(self._features)
        if self._clip:
            values = clip_rows(values, self._clip)
        embeddings: Tensor = self._rest(values if self._noise is None else values + self._noise)
        return embeddings


def secant(gradient: Callable[[Tensor], Tensor], at: Tensor, step: float, rounds: int = 12) -> float:
    """Return the steepest of `rounds` secants at a point.

    Each secant follows the direction in which the last one changed the gradient, like a power iteration. The
    result is a lower bound of the smoothness constant. It is close if the curvature has one leading
    direction.
    """
    here = gradient(at)
    direction = torch.randn(at.shape, generator=torch.Generator().manual_seed(0), dtype=at.dtype)
    steepest = 0.0
    for _ in range(rounds):
        direction = direction / direction.norm()
        change = (gradient(at + step * direction) - here) / step
        size = float(change.norm())
        if size == 0:
            break
        steepest = max(steepest, size)
        direction = change
    return steepest
