"""What leaves a client: clipped, noised, and only then finished.

The last layer's output is clipped to norm C and gets the Gaussian noise; the activation and whatever else
follows it see nothing but the noised values, so they need no noise of their own.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vafl.privacy.noise import Noise

ROUNDING = 1 - 1e-5  # a clipped norm stays below C whatever float32 rounds


def clip_rows(values: Tensor, norm: float) -> Tensor:
    """Each [0, ...] of the batch, scaled down to that norm where it is longer.

    A norm that overflows float32 counts as infinite: such a row becomes zero, which is short enough.
    """
    return values * _factors(values, norm)


def scaling(lengths: Tensor, norm: float) -> Tensor:
    """What shortens rows of these lengths to `norm`; all but rounding 1 for short ones."""
    return lengths.clamp_min(norm).reciprocal().mul(norm * ROUNDING)


def _factors(values: Tensor, norm: float) -> Tensor:
    """[batch, 1, ...]: what clipping multiplies each row by."""
    lengths = torch.linalg.vector_norm(values.flatten(1), dim=1)
    return scaling(lengths, norm).view(-1, *[1] * (values.ndim - 1))


def split_last(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """(the model up to its last layer with parameters, what follows it).

    Only a chain can be cut safely: elsewhere a value might pass by the noise. Other models are one piece.
    """
    if not isinstance(model, nn.Sequential):
        return model, nn.Identity()
    last = max((i for i, layer in enumerate(model) if any(True for _ in layer.parameters())), default=-1)
    return (model, nn.Identity()) if last < 0 else (model[: last + 1], model[last + 1 :])


class Release(nn.Module):
    """[batch, ...] outputs of the last layer -> embeddings [batch, width] that may leave.

    Args:
        clip: C; 0 does not clip, and then nothing is guaranteed.
        deviation: c.
        rest: what follows the noise.
    """

    def __init__(self, clip: float, deviation: float, rest: nn.Module, noise: Noise) -> None:
        super().__init__()
        self._clip, self._deviation, self._noise, self.rest = clip, deviation, noise, rest

    def forward(self, values: Tensor) -> Tensor:
        clipped = clip_rows(values, self._clip) if self._clip else values
        embeddings: Tensor = self.rest(self._add_noise(clipped))
        return embeddings

    def with_way_back(self, values: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Embeddings, and the map from their slopes to those of the values."""
        values = values.detach()
        factors = _factors(values, self._clip) if self._clip else None
        clipped = values if factors is None else values * factors
        noised = self._add_noise(clipped)
        if isinstance(self.rest, nn.Identity):
            return noised, lambda slopes: self._through_clip(slopes, clipped, factors)
        noised.requires_grad_()
        embeddings: Tensor = self.rest(noised)

        def pull_back(slopes: Tensor) -> Tensor:
            return self._through_clip(torch.autograd.grad(embeddings, noised, slopes)[0], clipped, factors)

        return embeddings.detach(), pull_back

    def _add_noise(self, clipped: Tensor) -> Tensor:
        if not self._deviation:
            return clipped
        return self._noise.gaussian(clipped.shape, self._deviation).add_(clipped)

    def _through_clip(self, slopes: Tensor, clipped: Tensor, factors: Tensor | None) -> Tensor:
        """A row that was clipped moves on a sphere: along itself nothing changes."""
        if factors is None:
            return slopes
        rows, own, scale = clipped.flatten(1), slopes.flatten(1), factors.view(-1, 1)
        along = (rows * own).sum(1, keepdim=True).masked_fill_(scale >= ROUNDING, 0.0)
        radius = self._clip * ROUNDING
        return torch.addcmul(own, rows, along, value=-1 / radius**2).mul_(scale).view_as(slopes)
