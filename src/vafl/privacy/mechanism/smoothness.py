"""Smoothness of a client's part of the objective under noise (Theorem 5, corrected in privacy.md, section 9).

The expectation over a layer's noise turns a B-Lipschitz function of its pre-activations into a (kappa
B)-smooth one. The constants hold under three conditions: the model is a chain of affine layers with Lipschitz
activations; the norms of the weights do not grow; no row is clipped. The clip has a kink, and the noise does
not smooth it because it is added after the clip.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from vafl.arrays import Doubles
from vafl.errors import ConfigError

_SLOPES: dict[type[nn.Module], float] = {
    nn.Flatten: 1.0,
    nn.Identity: 1.0,
    nn.ReLU: 1.0,
    nn.Tanh: 1.0,
    nn.Sigmoid: 0.25,
    nn.Softplus: 1.0,
}
_DRAWS = 16  # noise samples per row
NoiseKind = Literal["uniform", "gaussian"]


@dataclass(frozen=True)
class Layer:
    """A layer u -> activation(w u + b + Z) with noise Z.

    Attributes:
        linear: the affine map with weights w and bias b.
        activation: the layers after it.
        slope: L0, the Lipschitz constant of the activation.
        deviation: the standard deviation of Z.
        noise: the distribution of Z.
    """

    linear: nn.Linear
    activation: nn.Module
    slope: float
    deviation: float
    noise: NoiseKind

    @property
    def norm(self) -> float:
        """The spectral norm of the weights."""
        return float(torch.linalg.matrix_norm(self.linear.weight.detach(), 2))

    @property
    def kappa(self) -> float:
        """The smoothness under this layer's noise, per unit of the Lipschitz constant; inf without noise."""
        if not self.deviation:
            return math.inf
        if self.noise == "gaussian":
            return math.sqrt(2 / math.pi) / self.deviation
        return math.sqrt(self.linear.out_features) / (math.sqrt(3) * self.deviation)

    @property
    def paper_kappa(self) -> float:
        """The paper's kappa: d/c (Gaussian) or 2 sqrt(d)/c_l (uniform)."""
        if not self.deviation:
            return math.inf
        width = self.linear.out_features
        return (width if self.noise == "gaussian" else 2 * math.sqrt(width)) / self.deviation


def chain_of(
    model: nn.Module,
    noise: float,
    hidden: Sequence[float] = (),
    hidden_noise: NoiseKind = "uniform",
) -> list[Layer]:
    """Return the model's layers with their noise.

    Args:
        model: a chain of affine layers and activations.
        noise: the standard deviation of the Gaussian noise in the last layer.
        hidden: standard deviations of the noise in the other layers: one each, one for all, or none.
        hidden_noise: the distribution of that noise.

    Raises:
        ConfigError: the model is not a chain of affine layers, so no constants are known.
    """
    parts = list(model) if type(model) is nn.Sequential else [model]
    groups: list[tuple[nn.Linear, list[nn.Module]]] = []
    for part in parts:
        if type(part) is nn.Linear:
            groups.append((part, []))
        elif type(part) not in _SLOPES or (not groups and not isinstance(part, nn.Flatten)):
            known = ", ".join(["Linear", *(kind.__name__ for kind in _SLOPES)])
            raise ConfigError(
                "VFL-5091",
                f"smoothness constants need a chain of {known}. Found {type(part).__name__}. Use the "
                "secant estimate, which works for any model.",
            )
        elif groups:
            groups[-1][1].append(part)
    deviations = [*_one_each(hidden, len(groups) - 1), noise]
    kinds: list[NoiseKind] = [hidden_noise] * (len(groups) - 1) + ["gaussian"]
    return [
        Layer(
            linear, nn.Sequential(*after), math.prod(_SLOPES[type(part)] for part in after), deviation, kind
        )
        for (linear, after), deviation, kind in zip(groups, deviations, kinds, strict=True)
    ]


def _one_each(deviations: Sequence[float], layers: int) -> Sequence[float]:
    if len(deviations) < 2:
        return [*deviations, 0.0][:1] * layers
    if len(deviations) != layers:
        raise ConfigError(
            "VFL-5092",
            f"the number of noise deviations must be 1 or {layers}, the number of hidden layers. Found "
            f"{len(deviations)}.",
        )
    return deviations


@dataclass(frozen=True)
class LayerConstants:
    """Bounds on how fast a client's gradient changes with one layer's parameters, all others fixed.

    Attributes:
        norm: the spectral norm of the weights.
        kappa: see `Layer.kappa`.
        reach: B_l, the Lipschitz constant of the map from the pre-activation to the loss.
        input_norm: the mean of |u|, where u is the layer's input.
        input_square: the mean of |u|^2.
        bias: L_b = kappa B_l.
        weight: L_w = E|u|^2 L_b.
        paper_bias: L_b by the paper's recursion (block-diagonal only).
        paper_weight: L_w by the paper's recursion, with E|u| (block-diagonal only).
    """

    norm: float
    kappa: float
    reach: float
    input_norm: float
    input_square: float
    bias: float
    weight: float
    paper_bias: float
    paper_weight: float


@dataclass(frozen=True)
class Smoothness:
    """The constants of one client.

    Attributes:
        layers: the constants of each layer.
        joint: a bound for all of the client's parameters together, including interactions between layers.
        paper: the paper's constant, a sum over layers that ignores those interactions.
    """

    layers: tuple[LayerConstants, ...]
    joint: float
    paper: float


def smoothness(
    layers: Sequence[Layer], features: Tensor, slope: float, curvature: float, l2: float = 0.0
) -> Smoothness:
    """Return the constants of one client's part of the objective.

    Args:
        layers: the client's layers.
        features: [rows, ...]; the objective is the mean over these rows.
        slope: the Lipschitz constant of the loss with respect to the embedding.
        curvature: the Lipschitz constant of the loss's gradient, needed by the paper's constant only.
        l2: the weight of the regulariser.
    """
    norms = _input_norms(layers, features.flatten(1))
    reaches = _reaches(layers, slope)
    papers = _paper_biases(layers, slope)
    constants = []
    for layer, inputs, reach, paper in zip(layers, norms, reaches, papers, strict=True):
        mean, square = float(inputs.mean()), float((inputs**2).mean())
        bias = layer.kappa * reach
        constants.append(
            LayerConstants(
                norm=layer.norm,
                kappa=layer.kappa,
                reach=reach,
                input_norm=mean,
                input_square=square,
                bias=bias,
                weight=square * bias,
                paper_bias=paper,
                paper_weight=mean * paper,
            )
        )
    pairs = zip(reaches, norms, strict=True)
    steepness = sum((reach / slope) ** 2 * float((inputs**2).mean() + 1) for reach, inputs in pairs)
    paper = curvature * steepness + sum(layer.paper_bias + layer.paper_weight for layer in constants)
    return Smoothness(tuple(constants), _joint(layers, norms, reaches) + l2, paper + l2)


def _input_norms(layers: Sequence[Layer], inputs: Tensor) -> list[Doubles]:
    """Return the norms |u_{l-1}| of each layer's inputs: [noise samples * rows]."""
    generator = torch.Generator().manual_seed(0)
    norms = []
    with torch.no_grad():
        inputs = inputs.repeat(_DRAWS, 1)
        for layer in layers:
            norms.append(inputs.double().norm(dim=1).numpy())
            values = layer.linear(inputs)
            if layer.noise == "gaussian":
                noise = torch.randn(values.shape, generator=generator)
            else:
                noise = (2 * torch.rand(values.shape, generator=generator) - 1) * math.sqrt(3)
            inputs = layer.activation(values + layer.deviation * noise)
    return norms


def _reaches(layers: Sequence[Layer], slope: float) -> list[float]:
    """Return B_l = slope * L0 * (product of L0 |w| over the layers above) for each layer."""
    reaches: list[float] = []
    for layer in reversed(layers):
        slope *= layer.slope
        reaches.append(slope)
        slope *= layer.norm
    return reaches[::-1]


def _paper_biases(layers: Sequence[Layer], slope: float) -> list[float]:
    """Return L_b of each layer by the paper's recursion (eq.smoothness), times the loss's slope."""
    biases = []
    above, carried = 1.0, 0.0  # the product of L0 |w| over the layers above; L_b |w| of the next layer
    for layer in reversed(layers):
        bias = above * layer.paper_kappa * layer.slope + carried * layer.slope**2
        biases.append(slope * bias)
        above, carried = above * layer.slope * layer.norm, bias * layer.norm
    return biases[::-1]


def _joint(
    layers: Sequence[Layer],
    norms: Sequence[Doubles],
    reaches: Sequence[float],
) -> float:
    """Return a bound for all layers together.

    Entry (l, k) of the matrix bounds how fast layer l's gradient changes with layer k's parameters; the bound
    is the matrix's spectral norm. With u~ = (u, 1) and k < l, a step of theta_k moves the input of layer l by
    at most |u~_{k-1}| times the Lipschitz constants in between. That changes both factors of layer l's
    gradient.
    """
    sizes = [np.hypot(inputs, 1.0) for inputs in norms]
    bounds = np.zeros((len(layers), len(layers)))
    for upper, layer in enumerate(layers):
        smooth = layer.kappa * reaches[upper]
        bounds[upper, upper] = smooth * float((sizes[upper] ** 2).mean())
        between = 1.0
        for lower in range(upper - 1, -1, -1):
            between *= layers[lower].slope
            moved = smooth * layer.norm * float((sizes[upper] * sizes[lower]).mean())
            turned = reaches[upper] * float(sizes[lower].mean())
            bounds[upper, lower] = bounds[lower, upper] = between * (moved + turned)
            between *= layers[lower].norm
    return float(np.linalg.norm(bounds, 2)) if np.isfinite(bounds).all() else math.inf
