"""The server's head theta_0, which maps the sum or the concatenation of the embeddings to outputs."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from vafl import kernels
from vafl.arrays import Array, Block, Matrix
from vafl.models.embeddings import mlp
from vafl.models.gated import GatedHead
from vafl.models.settings import ModelSettings
from vafl.models.tabular import TabularHead

WayBack = Callable[[Matrix, Sequence[Block]], tuple[list[Matrix], list[Array]]]
"""Backward pass: slopes of the outputs, blocks of the inputs -> gradients of these and of the parameters."""


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


def _backward(gradient: Matrix, blocks: Sequence[Block]) -> tuple[list[Matrix], list[Array]]:
    """Return the gradients of blocks of the sums, and of the bias, from the gradient of the outputs."""
    return [np.ascontiguousarray(gradient[block]) for block in blocks], [kernels.sum_rows(gradient)]


def make_head(settings: ModelSettings, widths: Sequence[int], outputs: int) -> nn.Module:
    """Make the head that the settings describe.

    Args:
        widths: the embedding width of each client.
        outputs: the number of outputs.
    """
    inputs = settings.head_inputs(widths)
    if settings.head == "bias":
        return Bias(outputs)
    if settings.head == "linear":
        return linear(inputs, outputs)
    if settings.head == "tabular":
        return TabularHead(inputs, outputs, settings.head_hidden)
    if settings.head == "gated":
        return GatedHead(widths, outputs, settings.head_hidden)
    return deep(inputs, outputs, settings.head_hidden)


def linear(inputs: int, outputs: int) -> nn.Module:
    """Return one affine layer. Embeddings may be non-linear themselves."""
    return nn.Linear(inputs, outputs)


def deep(inputs: int, outputs: int, hidden: Sequence[int]) -> nn.Module:
    """Return a ReLU on the combined embeddings, followed by affine layers with ReLU between them."""
    return nn.Sequential(nn.ReLU(), mlp([inputs], outputs, hidden))


def input_layers(head: nn.Module, columns: Mapping[str, slice]) -> list[tuple[str, nn.Linear]]:
    """Return the affine layers on the concatenated embeddings, each with the party whose embedding it takes.

    The party is "" for a layer on the embeddings of all parties.

    Args:
        columns: party -> the columns of its embedding, in order.
    """
    if isinstance(head, GatedHead):
        return [(name, layers[0]) for name, (_, layers) in zip(columns, head.in_two_parts()[0], strict=True)]
    if isinstance(head, TabularHead):
        found: Sequence[nn.Linear] = head.in_two_parts()[0][0][1]
    elif isinstance(head, nn.Linear):
        found = [head]
    else:
        found = [layer for layer in head.modules() if isinstance(layer, nn.Linear)][:1]
    return [("", layer) for layer in found]
