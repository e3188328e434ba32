"""Gradients of a few tensors, straight from torch's engine.

`torch.autograd.grad` does the same and no more, but its wrapper checks for symbolic shapes: that
imports sympy at the first call (a second, 30 MB) and costs as much as a small model's backward pass
at every other. Only this file knows the engine's own name, which torch keeps to itself.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Variable


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
