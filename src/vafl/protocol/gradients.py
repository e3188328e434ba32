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
from vafl.arrays import Array, Block, Matrix, RowIds
from vafl.protocol.optimisers import is_plain_memory
from vafl.protocol.tensors import as_arrays, as_tensor

PullBack = Callable[[Matrix], Sequence[Array]]
BatchPass = Callable[[Array, RowIds], tuple[Matrix, PullBack]]
HeadPullBack = Callable[[Matrix, Sequence[Block]], tuple[list[Matrix], Sequence[Array]]]
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

    The pull-back maps slopes of the outputs, and blocks of the inputs, to the gradients of these blocks and
    of the parameters. A step needs the gradients of a few clients' columns only, and with concatenated
    embeddings the gradient of the whole input would be the largest product. The forward pass may overwrite
    its inputs.

    A head can provide its own closed form, as the method `with_way_back()`. Neither this nor a chain of
    affine layers and ReLUs records a graph. A head that begins with affine layers says so by the method
    `in_two_parts()`; see `AffineFirst`. The kind of head is determined here, once, not at every step.
    """
    closed_form = getattr(head, "with_way_back", None)
    if closed_form is not None and parameters:
        head_pass: HeadPass = closed_form()
        return head_pass
    if layers := _plain_layers(head, parameters):
        return Chain(layers).as_head
    in_two_parts = getattr(head, "in_two_parts", None)
    if in_two_parts is not None and len(parameters) == len(list(head.parameters())):
        first_layers, rest = in_two_parts()
        return AffineFirst(first_layers, rest, parameters)

    def by_a_graph(array: Matrix) -> tuple[Matrix, HeadPullBack]:
        inputs = torch.from_numpy(array).requires_grad_()
        outputs = head(inputs)

        def pull(slopes: Matrix, blocks: Sequence[Block]) -> tuple[list[Matrix], Sequence[Array]]:
            gradient, *others = pull_back(outputs, torch.from_numpy(slopes), [inputs, *parameters])
            return [np.ascontiguousarray(gradient.numpy()[block]) for block in blocks], as_arrays(others)

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
        affine = (place for place, layer in enumerate(self._affine) if layer is not None)
        self._first = next(affine, len(layers))  # the first affine layer

    def as_head(self, inputs: Matrix) -> tuple[Matrix, HeadPullBack]:
        """Return the outputs, and the pull-back to the inputs and the parameters."""
        outputs, layer_inputs = self._forward(inputs)
        return outputs, partial(self._back_to_inputs, layer_inputs)

    def as_model(self, inputs: Matrix, rows: RowIds) -> tuple[Matrix, PullBack]:
        """Return the outputs, and the pull-back to the parameters."""
        outputs, layer_inputs = self._forward(inputs)
        if len(layer_inputs) == 1:
            return outputs, Affine(inputs)
        return outputs, lambda slopes: self._back(layer_inputs, slopes)[1]

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

    def _back(self, layer_inputs: Sequence[Matrix], slopes: Matrix) -> tuple[Matrix, Sequence[Array]]:
        """Map slopes of the outputs to slopes of the first affine layer's outputs and to gradients.

        Args:
            layer_inputs: the input of each layer, from `_forward`.

        Returns:
            The slopes, and the gradient of each parameter.
        """
        # From the last layer to the first, so each layer adds its bias before its weight: reversed, the list
        # is in the order of the parameters.
        gradients: list[Array] = []
        for place in range(len(layer_inputs) - 1, self._first - 1, -1):
            affine = self._affine[place]
            if affine is None:
                slopes = slopes * (layer_inputs[place] > 0)
                continue
            gradients += (kernels.sum_rows(slopes), slopes.T @ layer_inputs[place])
            # Stop before the product with the first layer's weights. It is a head's largest one, and a model
            # does not need it. `_back_to_block` makes it for the blocks that are wanted.
            slopes = slopes if place == self._first else slopes @ affine[0]
        return slopes, gradients[::-1]

    def _back_to_inputs(
        self, layer_inputs: Sequence[Matrix], slopes: Matrix, blocks: Sequence[Block]
    ) -> tuple[list[Matrix], Sequence[Array]]:
        """Map slopes of the outputs to the gradients of blocks of the inputs, and of the parameters."""
        slopes, gradients = self._back(layer_inputs, slopes)
        return [self._back_to_block(layer_inputs, slopes, block) for block in blocks], gradients

    def _back_to_block(self, layer_inputs: Sequence[Matrix], slopes: Matrix, block: Block) -> Matrix:
        """Return the gradient of a block of the inputs, from slopes of the first affine layer's outputs."""
        rows, columns = block
        affine = self._affine[self._first] if self._first < len(self._affine) else None
        gradient = slopes[block] if affine is None else slopes[rows] @ affine[0][:, columns]
        if self._first > 0:
            gradient = gradient * (layer_inputs[0][block] > 0)
        return np.ascontiguousarray(gradient)


class AffineFirst:
    """A head that begins with affine layers, each on some columns of its input.

    These layers hold most of a head's arithmetic if the input is a concatenation of embeddings. They are
    computed in numpy, and the gradient of the input only for the wanted blocks. The rest is a graph.

    Args:
        layers: (columns of the input, affine layers on these columns), for distinct columns in order.
        rest: maps the outputs of `layers`, one tensor [batch, outputs of these layers] per entry, to the
            outputs of the head.
        parameters: all parameters of the head, in the order of their gradients.
    """

    def __init__(
        self,
        layers: Sequence[tuple[slice, Sequence[nn.Linear]]],
        rest: Callable[[Sequence[Tensor]], Tensor],
        parameters: Sequence[Tensor],
    ) -> None:
        self._columns = [columns for columns, _ in layers]
        self._layers = [
            [(layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in group]
            for _, group in layers
        ]
        self._rest, self._parameters = rest, parameters
        affine = [part for _, group in layers for layer in group for part in (layer.weight, layer.bias)]
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._affine_places = [places.pop(id(parameter)) for parameter in affine]
        self._rest_places = list(places.values())

    def __call__(self, inputs: Matrix) -> tuple[Matrix, HeadPullBack]:
        """Return the outputs, and the pull-back to the inputs and the parameters."""
        weights = [np.concatenate([weight for weight, _ in group]) for group in self._layers]
        leaves = []
        for columns, weight, group in zip(self._columns, weights, self._layers, strict=True):
            values = inputs[:, columns] @ weight.T
            kernels.add_row(values, np.concatenate([bias for _, bias in group]))
            leaves.append(torch.from_numpy(values).requires_grad_())
        outputs = self._rest(leaves)

        def pull(slopes: Matrix, blocks: Sequence[Block]) -> tuple[list[Matrix], Sequence[Array]]:
            others = [self._parameters[place] for place in self._rest_places]
            found = as_arrays(pull_back(outputs, torch.from_numpy(slopes), [*leaves, *others]))
            inner = [np.ascontiguousarray(each) for each in found[: len(leaves)]]
            gradients = dict(zip(self._rest_places, found[len(leaves) :], strict=True))
            gradients |= zip(self._affine_places, self._of_parameters(inputs, inner), strict=True)
            parts = [self._of_block(inner, weights, block) for block in blocks]
            return parts, [gradients[place] for place in range(len(gradients))]

        return outputs.detach().numpy(), pull

    def _of_parameters(self, inputs: Matrix, slopes: Sequence[Matrix]) -> list[Array]:
        """Return the gradients of the affine layers' weights and biases, from the slopes of their outputs."""
        gradients: list[Array] = []
        for columns, group, slope in zip(self._columns, self._layers, slopes, strict=True):
            weights, biases, begin = slope.T @ inputs[:, columns], kernels.sum_rows(slope), 0
            for weight, _ in group:
                end = begin + len(weight)
                gradients += (weights[begin:end], biases[begin:end])
                begin = end
        return gradients

    def _of_block(self, slopes: Sequence[Matrix], weights: Sequence[Matrix], block: Block) -> Matrix:
        """Return the gradient of a block of the inputs, from the slopes of the affine layers' outputs."""
        rows, columns = block
        if columns in self._columns:
            place = self._columns.index(columns)
            return slopes[place][rows] @ weights[place]
        if len(weights) == 1:
            return slopes[0][rows] @ weights[0][:, columns]
        parts = [slope[rows] @ weight for slope, weight in zip(slopes, weights, strict=True)]
        return np.ascontiguousarray(np.concatenate(parts, axis=1)[:, columns])


def _plain_layers(module: nn.Module, parameters: Sequence[Tensor]) -> list[nn.Module]:
    """Return the layers of a module that consists of trained affine layers and ReLUs only; otherwise []."""
    if not all(is_plain_memory(tensor) for tensor in parameters):
        return []
    layers = _in_order(module)
    tensors: list[Tensor | None] = []
    for layer in layers:
        # A hook has to be called, so torch must make the forward pass.
        if layer._forward_hooks or layer._forward_pre_hooks:
            return []
        # Not isinstance: a subclass may compute something else.
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
