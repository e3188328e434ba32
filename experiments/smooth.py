"""An embedding with a smooth activation: theorem 1 assumes Lipschitz gradients, which ReLU does not have."""

from collections.abc import Sequence

from torch import nn


def perceptron(shape: Sequence[int], width: int) -> nn.Module:
    """Return the layers affine, tanh, affine, tanh."""
    return nn.Sequential(nn.Linear(shape[0], 16), nn.Tanh(), nn.Linear(16, width), nn.Tanh())
