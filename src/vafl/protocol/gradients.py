"""Gradients of a few tensors, straight from torch's engine.

`torch.autograd.grad` does the same and no more, but its wrapper checks for symbolic shapes: that
imports sympy at the first call (a second, 30 MB) and costs as much as a small model's backward pass
at every other. Only this file knows the engine's own name, which torch keeps to itself.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Variable

PullBack = Callable[[Tensor], list[Tensor]]


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


def apply_head(
    head: nn.Module, inputs: Tensor, parameters: Sequence[Tensor]
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, list[Tensor]]]]:
    """Outputs of a batch, and the map from their slopes to those of the inputs and of the parameters.

    A head may bring that map itself, as `pull_back(slopes)`; then no graph is recorded.
    """
    closed_form = getattr(head, "pull_back", None)
    if closed_form is not None and parameters:
        with torch.no_grad():
            return head(inputs), closed_form
    inputs.requires_grad_()
    outputs = head(inputs)

    def pull(slopes: Tensor) -> tuple[Tensor, list[Tensor]]:
        own, *others = pull_back(outputs, slopes, [inputs, *parameters])
        return own, others

    return outputs.detach(), pull


def embed_batch(model: nn.Module, inputs: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, PullBack]:
    """Embeddings [batch, width] of a batch, and the map from their slopes to the parameters'.

    A plain linear model needs no graph for that: its gradient is two products.
    """
    if _is_plain_linear(model, parameters):
        with torch.no_grad():
            return model(inputs), lambda slopes: [slopes.t() @ inputs, slopes.sum(0)]
    embeddings = model(inputs)
    return embeddings.detach(), lambda slopes: pull_back(embeddings, slopes, parameters)


def followed_by(
    perturb: Callable[[Tensor], Tensor], embedded: tuple[Tensor, PullBack]
) -> tuple[Tensor, PullBack]:
    """The same for embeddings that go through `perturb` afterwards.

    It may bring its own way back, as `with_way_back(values)`; then no graph is recorded here.
    """
    values, back = embedded
    closed_form = getattr(perturb, "with_way_back", None)
    if closed_form is not None:
        embeddings, through = closed_form(values)
        return embeddings, lambda slopes: back(through(slopes))
    embeddings = perturb(values.requires_grad_())
    return embeddings.detach(), lambda slopes: back(pull_back(embeddings, slopes, [values])[0])


def _is_plain_linear(model: nn.Module, parameters: Sequence[Tensor]) -> bool:
    if type(model) is not nn.Linear or model._forward_hooks or model._forward_pre_hooks:
        return False
    return len(parameters) == 2 and parameters[0] is model.weight and parameters[1] is model.bias
