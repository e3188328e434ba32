"""Gradients of a few parameters: in closed form for small networks, else straight from torch's engine.

`torch.autograd.grad` does the same and no more, but its wrapper checks for symbolic shapes: that
imports sympy at the first call (a second, 30 MB) and costs as much as a small model's backward pass
at every other. Only this file knows the engine's own name, which torch keeps to itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Variable

from vafl import kernels
from vafl.protocol.rows import Array, Matrix, Rows
from vafl.protocol.tensors import as_arrays, as_tensor

PullBack = Callable[[Matrix], Sequence[Array]]
BatchPass = Callable[[Array, Rows], tuple[Matrix, PullBack]]
HeadPullBack = Callable[[Matrix], tuple[Matrix, Sequence[Array]]]
HeadPass = Callable[[Matrix], tuple[Matrix, HeadPullBack]]
TensorPass = Callable[[Tensor, Rows], tuple[Tensor, Callable[[Tensor], list[Tensor]]]]


def pull_back(outputs: Tensor, slopes: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of sum(slopes * outputs) w.r.t. each of the inputs; frees the graph.

    Args:
        outputs, slopes: of one shape.
        inputs: tensors the outputs may depend on; where they do not, the gradient is zero.
    """
    gradients = Variable._execution_engine.run_backward(
        (outputs,), (slopes,), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    pairs = zip(gradients, inputs, strict=True)
    return [torch.zeros_like(of) if gradient is None else gradient for gradient, of in pairs]


def head_with_way_back(head: nn.Module, parameters: Sequence[Tensor]) -> HeadPass:
    """inputs [batch, ...], which may be written to -> outputs, and the map from their slopes to those of the
    inputs and parameters.

    A head may bring that itself, as `with_way_back()`; then no graph is recorded, nor for affine layers
    and ReLUs. Which of these a head is, is found out here, once.
    """
    closed_form = getattr(head, "with_way_back", None)
    if closed_form is not None and parameters:
        own: HeadPass = closed_form()
        return own
    if layers := _plain_layers(head, parameters):
        return Chain(layers).as_head

    def by_a_graph(given: Matrix) -> tuple[Matrix, HeadPullBack]:
        inputs = torch.from_numpy(given).requires_grad_()
        outputs = head(inputs)

        def pull(slopes: Matrix) -> tuple[Matrix, Sequence[Array]]:
            own, *others = pull_back(outputs, torch.from_numpy(slopes), [inputs, *parameters])
            return own.numpy(), as_arrays(others)

        return outputs.detach().numpy(), pull

    return by_a_graph


def model_with_way_back(model: nn.Module, parameters: Sequence[Tensor]) -> BatchPass:
    """A batch's features -> embeddings [batch, width], and the map from their slopes to the parameters'.

    Affine layers and ReLUs need no graph for that; what the model is made of is found out here, once.
    """
    if layers := _plain_layers(model, parameters):
        return Chain(layers).as_model

    def by_a_graph(inputs: Tensor, rows: Rows) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
        embeddings = model(inputs).float()
        return embeddings.detach(), lambda slopes: pull_back(embeddings, slopes, parameters)

    return by_tensors(by_a_graph)


def by_tensors(through: TensorPass) -> BatchPass:
    """The same between arrays: their memory is the tensors'."""

    def embedded(inputs: Array, rows: Rows) -> tuple[Matrix, PullBack]:
        embeddings, back = through(torch.from_numpy(inputs), rows)
        return embeddings.contiguous().numpy(), lambda slopes: as_arrays(back(as_tensor(slopes)))

    return embedded


def followed_by(
    perturb: Callable[[Tensor], Tensor], embedded: tuple[Matrix, PullBack]
) -> tuple[Matrix, PullBack]:
    """The same for embeddings that go through `perturb` afterwards.

    It may bring its own way back, as `with_way_back(values)`; then no graph is recorded here.
    """
    values, back = torch.from_numpy(embedded[0]), embedded[1]
    closed_form = getattr(perturb, "with_way_back", None)
    if closed_form is not None:
        embeddings, through = closed_form(values)
    else:
        embeddings = perturb(values.requires_grad_())

        def through(slopes: Tensor) -> Tensor:
            return pull_back(embeddings, slopes, [values])[0]

    return embeddings.detach().contiguous().numpy(), lambda slopes: back(
        through(as_tensor(slopes)).contiguous().numpy()
    )


@dataclass(frozen=True, slots=True)
class Affine:
    """The way back through one affine map: the same whatever its parameters have become meanwhile."""

    inputs: Matrix
    ages: ClassVar[bool] = False

    def __call__(self, slopes: Matrix) -> Sequence[Array]:
        return slopes.T @ self.inputs, kernels.sum_rows(slopes)


def ages(back: PullBack) -> bool:
    """Whether a way back is wrong once the parameters have changed."""
    return getattr(back, "ages", True)


class Chain:
    """Affine layers and ReLUs, by numpy: for a small network torch's way to each operation is longer than the
    operation. It sees the parameters' own memory, and never records a graph. What is not finite any more is
    noticed where it is used."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._affine = [
            (layer.weight.detach().numpy(), layer.bias.detach().numpy())
            if isinstance(layer, nn.Linear)
            else None
            for layer in layers
        ]

    def as_head(self, inputs: Matrix) -> tuple[Matrix, HeadPullBack]:
        """Outputs, and the way back to the inputs and the parameters."""
        outputs, given = self._forward(inputs)
        return outputs, partial(self._back, given, -1)

    def as_model(self, inputs: Matrix, rows: Rows) -> tuple[Matrix, PullBack]:
        """Outputs, and the way back to the parameters."""
        outputs, given = self._forward(inputs)
        return outputs, Affine(inputs) if len(given) == 1 else lambda slopes: self._back(given, 0, slopes)[1]

    def _forward(self, values: Matrix) -> tuple[Matrix, list[Matrix]]:
        """What the last layer gave, and what each one was given."""
        given = []
        for affine in self._affine:
            given.append(values)
            if affine is None:
                values = np.maximum(values, 0)
            else:
                values = values @ affine[0].T
                kernels.add_row(values, affine[1])
        return values, given

    def _back(self, given: Sequence[Matrix], first: int, slopes: Matrix) -> tuple[Matrix, Sequence[Array]]:
        """Slopes of the outputs -> those of the inputs and of the parameters; through an affine layer
        `first` only to its parameters."""
        gradients: list[Array] = []
        for place in range(len(given) - 1, -1, -1):
            affine = self._affine[place]
            if affine is None:
                slopes = slopes * (given[place] > 0)
                continue
            gradients += (kernels.sum_rows(slopes), slopes.T @ given[place])
            slopes = slopes if place == first else slopes @ affine[0]
        return slopes, gradients[::-1]


def _plain_layers(module: nn.Module, parameters: Sequence[Tensor]) -> list[nn.Module]:
    """The layers of a network that is nothing but affine layers and ReLUs, all trained; else none."""
    if not all(own.is_contiguous() and own.dtype == torch.float32 for own in parameters):
        return []
    layers = _in_order(module)
    own: list[Tensor | None] = []
    for layer in layers:
        if layer._forward_hooks or layer._forward_pre_hooks:
            return []
        if type(layer) is nn.Linear:
            own += (layer.weight, layer.bias)
        elif type(layer) is not nn.ReLU:
            return []
    same = len(own) == len(parameters) and all(
        one is other for one, other in zip(own, parameters, strict=True)
    )
    return layers if same else []


def _in_order(module: nn.Module) -> list[nn.Module]:
    """The module, or what a sequence of them is made of; whatever has hooks is not taken apart."""
    if type(module) is not nn.Sequential or module._forward_hooks or module._forward_pre_hooks:
        return [module]
    return [layer for part in module for layer in _in_order(part)]
