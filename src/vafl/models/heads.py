"""The server's head theta_0: from the embeddings' sum, or their concatenation, to outputs."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vafl import kernels
from vafl.models.embeddings import mlp
from vafl.models.settings import ModelSettings
from vafl.models.tabular import TabularHead

Matrix = npt.NDArray[np.float32]
WayBack = Callable[[Matrix], tuple[Matrix, list[Matrix]]]


class Bias(nn.Module):
    """outputs = sum of embeddings + bias: with linear embeddings, (logistic) regression."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, sums: Tensor) -> Tensor:
        """[batch, outputs] -> [batch, outputs]."""
        return sums + self.bias

    def with_way_back(self) -> Callable[[Matrix], tuple[Matrix, WayBack]]:
        """The same in the sums' place, and the map from slopes of the outputs to those of the sums and of the
        parameters."""
        bias = self.bias.detach().numpy()

        def outputs(sums: Matrix) -> tuple[Matrix, WayBack]:
            kernels.add_row(sums, bias)
            return sums, _through_a_sum

        return outputs


def _through_a_sum(slopes: Matrix) -> tuple[Matrix, list[Matrix]]:
    return slopes, [kernels.sum_rows(slopes)]


def make_head(settings: ModelSettings, clients: int, outputs: int) -> nn.Module:
    """Make the head that the settings describe."""
    inputs = settings.head_inputs(clients, outputs)
    if settings.head == "bias":
        return Bias(outputs)
    if settings.head == "linear":
        return linear(inputs, outputs)
    if settings.head == "tabular":
        return TabularHead(inputs, outputs, settings.head_hidden)
    return deep(inputs, outputs, settings.head_hidden)


def linear(inputs: int, outputs: int) -> nn.Module:
    """One affine layer, after the embeddings' own non-linearity."""
    return nn.Linear(inputs, outputs)


def deep(inputs: int, outputs: int, hidden: Sequence[int]) -> nn.Module:
    """ReLU on the combined embeddings, then affine layers with ReLU between them."""
    return nn.Sequential(nn.ReLU(), mlp([inputs], outputs, hidden))
