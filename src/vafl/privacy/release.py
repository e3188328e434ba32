"""What leaves a client: clipped, noised, and only then finished.

The last layer's output is clipped to norm C and gets the Gaussian noise; the activation and whatever else
follows it see nothing but the noised values, so they need no noise of their own.
"""

import torch
from torch import Tensor, nn

from vafl.privacy.noise import Noise

_ROUNDING = 1 - 1e-6  # a clipped norm stays below C in float32, too


def clip_rows(values: Tensor, norm: float) -> Tensor:
    """Each [0, ...] of the batch, scaled down to that norm where it is longer."""
    exact = values.double()  # float32's squares, and the smallest factors, fit in there
    lengths = torch.linalg.vector_norm(exact.flatten(1), dim=1)
    factors = norm * _ROUNDING / lengths.clamp_min(norm)
    clipped: Tensor = exact * factors.view(-1, *[1] * (values.ndim - 1))
    return clipped.to(values.dtype)


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
        if self._clip:
            values = clip_rows(values, self._clip)
        if self._deviation:
            values = values + self._noise.gaussian(values.shape, self._deviation)
        embeddings: Tensor = self.rest(values)
        return embeddings
