"""What leaves a client: clip the last layer's output, add noise, then apply the rest of the model.

The activation and all else that follows the noise is post-processing, and needs no noise.

Values are scaled in float64. As a float32, the factor that shortens a value near 3e38 to the clip would be a
denormal number, which rounding can make twice as large.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vafl.privacy.mechanism.noise import Floats, Noise

Rows = npt.NDArray[np.float32]
ROUNDING = 1 - 1e-5  # clip this much below C: float32 rounding must not make a norm longer than C


def lengths_of(values: Tensor) -> Floats:
    """The norm of each [0, ...] of the batch, in float64: a float32 sum of many squares is too small."""
    lengths: Floats = _lengths(values.detach()).numpy()
    return lengths


def _lengths(values: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(values.flatten(1), dim=1, dtype=torch.float64)
    return lengths


def scaling(lengths: Floats, norm: float) -> Floats:
    """The factors that shorten rows of these lengths to `norm`; 1, but for rounding, for shorter rows.

    A length that is not finite gets 0: that record counts as zero. Stopping instead would reveal that record
    without any noise.
    """
    factors: Floats = norm * ROUNDING / np.maximum(lengths, norm)
    factors[~np.isfinite(factors)] = 0
    return factors


def scaled(rows: Rows, factors: Floats) -> Floats:
    """Each row times its factor, in float64; zero where the factor is 0, whatever the row holds."""
    if factors.all():
        return rows * factors[:, None]
    product = np.zeros(rows.shape)
    return np.multiply(rows, factors[:, None], out=product, where=(factors > 0)[:, None])


def clip_rows(values: Tensor, norm: float) -> Tensor:
    """Each [0, ...] of the batch, scaled down to that norm where it is longer; zero if it is not finite.

    Differentiable.
    """
    lengths = _lengths(values)
    finite = lengths.isfinite()
    if not finite.all():
        zero = torch.zeros((), dtype=values.dtype)
        values, lengths = torch.where(_beside(finite, values), values, zero), lengths.where(finite, 0.0)
    factors = norm * ROUNDING / lengths.clamp_min(norm)
    return (values * _beside(factors, values)).to(values.dtype)


def _beside(numbers: Tensor, values: Tensor) -> Tensor:
    """One number for each [0, ...] of the batch."""
    return numbers.view(-1, *[1] * (values.ndim - 1))


def split_last(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """(the model up to its last layer with parameters, what follows it).

    Only a chain can be cut safely: elsewhere a value might pass by the noise. Other models are one piece.
    """
    if type(model) is not nn.Sequential:
        return model, nn.Identity()
    last = max((i for i, layer in enumerate(model) if any(True for _ in layer.parameters())), default=-1)
    return (model, nn.Identity()) if last < 0 else (model[: last + 1], model[last + 1 :])


def split_frozen(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """(the frozen layers that a model begins with, what follows them); the former may be none.

    A model that is no chain is frozen as a whole or not at all.
    """
    layers = list(model) if type(model) is nn.Sequential else [model]
    trained = (i for i, layer in enumerate(layers) if any(own.requires_grad for own in layer.parameters()))
    count = next(trained, len(layers))
    if not any(True for layer in layers[:count] for _ in layer.parameters()):
        return nn.Identity(), model
    return nn.Sequential(*layers[:count]), nn.Sequential(*layers[count:])


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
        empty = type(rest) is nn.Sequential and not len(rest)
        self._ends_here = empty or type(rest) is nn.Identity

    def forward(self, values: Tensor) -> Tensor:
        return self.with_way_back(values)[0]

    def with_way_back(self, values: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Embeddings, and the map from their slopes to those of the values."""
        noised, through_clip = self._noised(values.detach().flatten(1))
        inputs = torch.from_numpy(noised).view_as(values)
        if self._ends_here:
            return inputs, through_clip
        embeddings: Tensor = self.rest(
            inputs.requires_grad_().clone()
        )  # which may write into what it is given

        def pull_back(slopes: Tensor) -> Tensor:
            return through_clip(torch.autograd.grad(embeddings, inputs, slopes)[0])

        return embeddings.detach(), pull_back

    def _noised(self, values: Tensor) -> tuple[Rows, Callable[[Tensor], Tensor]]:
        """In numpy: for so few numbers, calling an operation of torch takes longer than the operation."""
        rows: Rows = values.numpy()
        if not self._clip:
            return self._noise.added_to(rows, self._deviation), lambda slopes: slopes
        factors = scaling(lengths_of(values), self._clip)
        clipped = scaled(rows, factors)

        @np.errstate(over="ignore", invalid="ignore")
        def through_clip(slopes: Tensor) -> Tensor:
            """Slopes of the clipped rows -> slopes of the rows.

            A row that was clipped moves on a sphere, so the part of its slope along the row is taken out.
            """
            own = slopes.flatten(1).numpy()
            along = np.einsum("ij,ij->i", clipped, own) / (self._clip * ROUNDING) ** 2
            along[factors >= ROUNDING] = 0
            moves = scaled(own - clipped * along[:, None], factors)
            return torch.from_numpy(moves.astype(np.float32)).view_as(slopes)

        return self._noise.added_to(clipped, self._deviation), through_clip
