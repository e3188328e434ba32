"""Forward passes that return a pull-back: a function from slopes of the outputs to gradients.

Chains of affine layers and ReLUs have a closed form in numpy. Other modules use torch's autograd.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from vafl import kernels
from vafl.arrays import Array, Matrix, RowIds
from vafl.protocol.tensors import as_arrays, as_tensor

PullBack = Callable[[Matrix], Sequence[Array]]
BatchPass = Callable[[Array, RowIds], tuple[Matrix, PullBack]]
HeadPullBack = Callable[[Matrix], tuple[Matrix, Sequence[Array]]]
HeadPass = Callable[[Matrix], tuple[Matrix, HeadPullBack]]
TensorPass = Callable[[Tensor, RowIds], tuple[Tensor, Callable[[Tensor], list[Tensor]]]]


def pull_back(outputs: Tensor, slopes: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient of sum(slopes * outputs) w.r.t. each of the inputs, and free the graph.

    Args:
        outputs, slopes: tensors of the same shape.
        inputs: tensors that the outputs may depend on. The gradient is zero for the others.
    """
    if not inputs:
        return []
    # The slopes are not passed as `grad_outputs`: the check of their shape would import sympy at the first
    # call, which takes a second and 30 MB in every process.
    product = torch.dot(outputs.flatten(), slopes.flatten())
    return list(torch.autograd.grad(product, inputs, allow_unused=True, materialize_grads=True))


def head_with_way_back(head: nn.Module, parameters: Sequence[Tensor]) -> HeadPass:
    """Return the forward pass of a head: inputs [batch, ...] -> outputs and their pull-back.

    The pull-back maps slopes of the outputs to the gradients of the inputs and of the parameters. The forward
    pass may overwrite its inputs.

    A head can provide its own closed form, as the method `with_way_back()`. Neither this nor a chain of
    affine layers and ReLUs records a graph. The kind of head is determined here, once, not at every step.
    """
    closed_form = getattr(head, "with_way_back", None)
    if closed_form is not None and parameters:
        head_pass: HeadPass = closed_form()
        return head_pass
    if layers := _plain_layers(head, parameters):
        return Chain(layers).as_head

    def by_a_graph(array: Matrix) -> tuple[Matrix, HeadPullBack]:
        inputs = torch.from_numpy(array).requires_grad_()
        outputs = head(inputs)

        def pull(slopes: Matrix) -> tuple[Matrix, Sequence[Array]]:
            gradient, *others = pull_back(outputs, torch.from_numpy(slopes), [inputs, *parameters])
            return gradient.numpy(), as_arrays(others)

        return outputs.detach().numpy(), pull

    return by_a_graph


def model_with_way_back(model: nn.Module, parameters: Sequence[Tensor]) -> BatchPass:
    """Return the forward pass of a client's model: features and rows -> embeddings and their pull-back.

    The pull-back maps slopes of the embeddings [batch, width] to the gradients of the parameters. A chain of
    affine layers and ReLUs records no graph. The kind of model is determined here, once.
    """
    if layers := _plain_layers(model, parameters):
        return Chain(layers).as_model

    def by_a_graph(inputs: Tensor, rows: RowIds) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
        embeddings = model(inputs).float()
        return embeddings.detach(), lambda slopes: pull_back(embeddings, slopes, parameters)

    return by_tensors(by_a_graph)


def by_tensors(through: TensorPass) -> BatchPass:
    """Wrap a pass on tensors as a pass on arrays, which share the tensors' memory."""

    def embedded(inputs: Array, rows: RowIds) -> tuple[Matrix, PullBack]:
        embeddings, back = through(torch.from_numpy(inputs), rows)
        return embeddings.contiguous().numpy(), lambda slopes: as_arrays(back(as_tensor(slopes)))

    return embedded


def followed_by(
    perturb: Callable[[Tensor], Tensor], embedded: tuple[Matrix, PullBack]
) -> tuple[Matrix, PullBack]:
    """Apply `perturb` to embeddings; return the result and the pull-back through both.

    `perturb` can provide its own closed form, as `with_way_back(values)`. Then no graph is recorded here.
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
    """The pull-back of one affine layer. It depends on the inputs only, so it stays valid after a step."""

    inputs: Matrix
    ages: ClassVar[bool] = False

    def __call__(self, slopes: Matrix) -> Sequence[Array]:
        return slopes.T @ self.inputs, kernels.sum_rows(slopes)


def ages(back: PullBack) -> bool:
    """Return whether a pull-back becomes invalid when the parameters change."""
    return getattr(back, "ages", True)


class Chain:
    """A chain of affine layers and ReLUs, in numpy.

    In a small network, torch's overhead per operation exceeds the operation: with a graph, an update of a
    linear model or an MLP takes a quarter longer. The arrays here share the memory of the parameters, so they
    always have the current values. No graph is recorded. Values that are not finite pass through; the checks
    of losses and messages detect them.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._affine = [
            (layer.weight.detach().numpy(), layer.bias.detach().numpy())
            if isinstance(layer, nn.Linear)
            else None
            for layer in layers
        ]

    def as_head(self, inputs: Matrix) -> tuple[Matrix, HeadPullBack]:
        """Return the outputs, and the pull-back to the inputs and the parameters."""
        outputs, layer_inputs = self._forward(inputs)
        return outputs, partial(self._back, layer_inputs, -1)

    def as_model(self, inputs: Matrix, rows: RowIds) -> tuple[Matrix, PullBack]:
        """Return the outputs, and the pull-back to the parameters."""
        outputs, layer_inputs = self._forward(inputs)
        if len(layer_inputs) == 1:
            return outputs, Affine(inputs)
        return outputs, lambda slopes: self._back(layer_inputs, 0, slopes)[1]

    def _forward(self, values: Matrix) -> tuple[Matrix, list[Matrix]]:
        """Return the output of the last layer, and the input of each layer."""
        layer_inputs = []
        for affine in self._affine:
            layer_inputs.append(values)
            if affine is None:
                values = np.maximum(values, 0)
            else:
                values = values @ affine[0].T
                kernels.add_row(values, affine[1])
        return values, layer_inputs

    def _back(
        self, layer_inputs: Sequence[Matrix], first: int, slopes: Matrix
    ) -> tuple[Matrix, Sequence[Array]]:
        """Map slopes of the outputs to the gradients of the inputs and of the parameters.

        Args:
            layer_inputs: the input of each layer, from `_forward`.
            first: an affine layer whose inputs need no gradient, which saves a product; -1 for none.
        """
        gradients: list[Array] = []
        for place in range(len(layer_inputs) - 1, -1, -1):
            affine = self._affine[place]
            if affine is None:
                slopes = slopes * (layer_inputs[place] > 0)
                continue
            gradients += (kernels.sum_rows(slopes), slopes.T @ layer_inputs[place])
            slopes = slopes if place == first else slopes @ affine[0]
        return slopes, gradients[::-1]


def _plain_layers(module: nn.Module, parameters: Sequence[Tensor]) -> list[nn.Module]:
    """Return the layers of a module that consists of trained affine layers and ReLUs only; otherwise []."""
    if not all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in parameters):
        return []
    layers = _in_order(module)
    tensors: list[Tensor | None] = []
    for layer in layers:
        if layer._forward_hooks or layer._forward_pre_hooks:
            return []
        if type(layer) is nn.Linear:
            tensors += (layer.weight, layer.bias)
        elif type(layer) is not nn.ReLU:
            return []
    same = len(tensors) == len(parameters) and all(
        tensor is parameter for tensor, parameter in zip(tensors, parameters, strict=True)
    )
    return layers if same else []


def _in_order(module: nn.Module) -> list[nn.Module]:
    """Return the layers of a nested Sequential in order. A module with hooks counts as one layer."""
    if type(module) is not nn.Sequential or module._forward_hooks or module._forward_pre_hooks:
        return [module]
    return [layer for part in module for layer in _in_order(part)]
