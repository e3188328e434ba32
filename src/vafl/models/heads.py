"""The server's head theta_0, which maps the sum or the concatenation of the embeddings to outputs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from vafl import kernels
from vafl.arrays import Matrix
from vafl.models.embeddings import mlp
from vafl.models.settings import ModelSettings
from vafl.models.tabular import TabularHead

WayBack = Callable[[Matrix], tuple[Matrix, list[Matrix]]]
"""Backward pass: gradient of the outputs -> gradients of the inputs and of each parameter."""


class Bias(nn.Module):
    """Adds a bias to the sum of the embeddings: linear or logistic regression with linear embeddings."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, sums: Tensor) -> Tensor:
        """[batch, outputs] -> [batch, outputs]."""
        return sums + self.bias

    def with_way_back(self) -> Callable[[Matrix], tuple[Matrix, WayBack]]:
        """Return `forward` in closed form: a function that returns the outputs and their backward pass.

        The function overwrites its argument with the outputs, and records no autograd graph.
        """
        bias = self.bias.detach().numpy()

        def outputs(sums: Matrix) -> tuple[Matrix, WayBack]:
            kernels.add_row(sums, bias)
            return sums, _backward

        return outputs


def _backward(gradient: Matrix) -> tuple[Matrix, list[Matrix]]:
    """Return the gradients of the sums and of the bias, from the gradient of the outputs."""
    return gradient, [kernels.sum_rows(gradient)]


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
    """Return one affine layer. Embeddings may be non-linear themselves."""
    return nn.Linear(inputs, outputs)


def deep(inputs: int, outputs: int, hidden: Sequence[int]) -> nn.Module:
    """Return a ReLU on the combined embeddings, followed by affine layers with ReLU between them."""
    return nn.Sequential(nn.ReLU(), mlp([inputs], outputs, hidden))
