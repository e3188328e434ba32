"""Make embeddings safe to upload: clip the last layer's output, add noise, then apply the rest of the model.

The activation and everything else after the noise is post-processing and needs no noise.

Values are scaled in float64. In float32, the factor that scales a value near 3e38 down to the clip would be a
denormal number, which rounding can make twice as large.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from vafl.arrays import Doubles, Matrix
from vafl.privacy.mechanism.noise import Noise

ROUNDING = 1 - 1e-5  # clip to C times this, so that float32 rounding cannot make a norm exceed C


def lengths_of(values: Tensor) -> Doubles:
    """Return the norm of each record: [batch], in float64. A float32 sum of many squares is too small."""
    lengths: Doubles = _lengths(values.detach()).numpy()
    return lengths


def _lengths(values: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(values.flatten(1), dim=1, dtype=torch.float64)
    return lengths


def scaling(lengths: Doubles, norm: float) -> Doubles:
    """Return the factors that scale rows of these lengths down to `norm`; `ROUNDING` for shorter rows.

    A length that is not finite gets 0, so that record counts as zero. Raising an error instead would reveal,
    without any noise, that the batch holds such a record.
    """
    factors: Doubles = norm * ROUNDING / np.maximum(lengths, norm)
    factors[~np.isfinite(factors)] = 0
    return factors


def scaled(rows: Matrix, factors: Doubles) -> Doubles:
    """Return each row times its factor, in float64. A factor of 0 gives zeros, even for inf or nan."""
    if factors.all():
        return rows * factors[:, None]
    product = np.zeros(rows.shape)
    return np.multiply(rows, factors[:, None], out=product, where=(factors > 0)[:, None])


def clip_rows(values: Tensor, norm: float) -> Tensor:
    """Scale each longer record of the batch down to `norm`; return zeros for records that are not finite.

    The result is differentiable.
    """
    lengths = _lengths(values)
    finite = lengths.isfinite()
    if not finite.all():
        zero = torch.zeros((), dtype=values.dtype)
        values, lengths = torch.where(_beside(finite, values), values, zero), lengths.where(finite, 0.0)
    factors = norm * ROUNDING / lengths.clamp_min(norm)
    return (values * _beside(factors, values)).to(values.dtype)


def _beside(numbers: Tensor, values: Tensor) -> Tensor:
    """Reshape one number per record so that it broadcasts over `values`."""
    return numbers.view(-1, *[1] * (values.ndim - 1))


def split_last(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Split a model after its last layer with parameters.

    Only an nn.Sequential is split: in other models a value might bypass the noise. Those return as a whole,
    with nn.Identity() as the second part.
    """
    if type(model) is not nn.Sequential:
        return model, nn.Identity()
    last = max((i for i, layer in enumerate(model) if any(True for _ in layer.parameters())), default=-1)
    return (model, nn.Identity()) if last < 0 else (model[: last + 1], model[last + 1 :])


def split_frozen(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Split a model after the frozen layers at its start; the first part is nn.Identity() if there are none.

    A model that is not an nn.Sequential counts as one layer.
    """
    layers = list(model) if type(model) is nn.Sequential else [model]
    trained = (i for i, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters()))
    count = next(trained, len(layers))
    if not any(True for layer in layers[:count] for _ in layer.parameters()):
        return nn.Identity(), model
    return nn.Sequential(*layers[:count]), nn.Sequential(*layers[count:])


class Release(nn.Module):
    """Map the last layer's outputs [batch, ...] to embeddings [batch, width] that may be uploaded.

    Args:
        clip: C; 0 does not clip, which gives no guarantee.
        deviation: c, the standard deviation of the noise.
        rest: the part of the model after the noise.
        noise: the noise generator.
    """

    def __init__(self, clip: float, deviation: float, rest: nn.Module, noise: Noise) -> None:
        super().__init__()
        self._clip, self._deviation, self._noise, self.rest = clip, deviation, noise, rest
        empty = type(rest) is nn.Sequential and not len(rest)
        self._ends_here = empty or type(rest) is nn.Identity

    def forward(self, values: Tensor) -> Tensor:
        return self.with_way_back(values)[0]

    def with_way_back(self, values: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the embeddings, and a function that maps their gradient to the gradient of `values`."""
        noised, through_clip = self._noised(values.detach().flatten(1))
        inputs = torch.from_numpy(noised).view_as(values)
        if self._ends_here:
            return inputs, through_clip
        # The clone protects `inputs`: an in-place activation would overwrite a leaf tensor.
        embeddings: Tensor = self.rest(inputs.requires_grad_().clone())

        def pull_back(slopes: Tensor) -> Tensor:
            return through_clip(torch.autograd.grad(embeddings, inputs, slopes)[0])

        return embeddings.detach(), pull_back

    def _noised(self, values: Tensor) -> tuple[Matrix, Callable[[Tensor], Tensor]]:
        """Clip and noise the values in NumPy: for small arrays, the overhead of a torch call dominates."""
        rows: Matrix = values.numpy()
        if not self._clip:
            return self._noise.added_to(rows, self._deviation), lambda slopes: slopes
        factors = scaling(lengths_of(values), self._clip)
        clipped = scaled(rows, factors)

        @np.errstate(over="ignore", invalid="ignore")
        def through_clip(slopes: Tensor) -> Tensor:
            """Map the gradient of the clipped rows to the gradient of the rows.

            A clipped row stays on a sphere, so its gradient has no component along the row.
            """
            flat = slopes.flatten(1).numpy()
            along = np.einsum("ij,ij->i", clipped, flat) / (self._clip * ROUNDING) ** 2
            along[factors >= ROUNDING] = 0
            moves = scaled(flat - clipped * along[:, None], factors)
            return torch.from_numpy(moves.astype(np.float32)).view_as(slopes)

        return self._noise.added_to(clipped, self._deviation), through_clip
