"""What leaves a client: clipped, noised, and only then finished.

The last layer's output is clipped to norm C and gets the Gaussian noise; the activation and whatever else
follows it see nothing but the noised values, so they need no noise of their own.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vafl.privacy.noise import Factors, Noise

Lengths = npt.NDArray[np.float64]
Rows = npt.NDArray[np.float32]
ROUNDING = 1 - 1e-5  # a clipped norm stays below C whatever float32 rounds


def lengths_of(values: Tensor) -> Tensor:
    """The norm of each [0, ...] of the batch, in float64: summed in float32 it is too short where there are
    many numbers."""
    lengths: Tensor = torch.linalg.vector_norm(values.flatten(1), dim=1, dtype=torch.float64)
    return lengths


def with_lengths(values: Tensor) -> tuple[Tensor, Tensor]:
    """Each [0, ...] of the batch, zero where it is not finite, and its norm.

    Stopping there would tell of that record alone, without any noise.
    """
    lengths = lengths_of(values)
    if np.isfinite(lengths.detach().numpy()).all():
        return values, lengths
    finite, zeros = lengths.isfinite(), torch.zeros(())
    return torch.where(_beside(finite, values), values, zeros), lengths.where(finite, zeros.double())


def clip_rows(values: Tensor, norm: float) -> Tensor:
    """Each [0, ...] of the batch, scaled down to that norm where it is longer; zero if it is not finite."""
    values, lengths = with_lengths(values)
    factors = (norm * ROUNDING / lengths.clamp_min(norm)).float()
    return values * _beside(factors, values)


def scaling(lengths: Lengths, norm: float) -> Factors:
    """What shortens rows of these lengths to `norm`; all but rounding 1 for short ones."""
    factors: Factors = norm * ROUNDING / np.maximum(lengths, norm)
    return factors


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
        self._ends_here = isinstance(rest, nn.Identity)

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
        """In numpy: for so few numbers most of an operation's cost in torch is the call."""
        if not self._clip:
            return self._noise.added_to(values.numpy(), self._deviation), lambda slopes: slopes
        values, lengths = with_lengths(values)
        rows: Rows = values.numpy()
        factors = scaling(lengths.numpy(), self._clip)
        noised = self._noise.added_to(rows, self._deviation, factors)
        scale = factors.astype(np.float32)

        @np.errstate(over="ignore", invalid="ignore")
        def through_clip(slopes: Tensor) -> Tensor:
            """A row that was clipped moves on a sphere: along itself nothing changes."""
            own: Rows = slopes.flatten(1).numpy()
            along = np.einsum("ij,ij->i", rows, own) * (scale / (self._clip * ROUNDING)) ** 2
            along[scale >= ROUNDING] = 0
            moves = rows * along[:, None]
            np.subtract(own, moves, out=moves)
            moves *= scale[:, None]
            return torch.from_numpy(moves).view_as(slopes)

        return noised, through_clip
