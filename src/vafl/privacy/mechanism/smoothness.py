"""How smooth noise makes a client's part of the objective (Theorem 5, corrected by privacy.md section 9).

The expectation over a layer's noise turns a Lipschitz function of its pre-activations into a smooth one:
B-Lipschitz becomes kappa B-smooth. The constants hold for models that are a chain of affine layers with
Lipschitz activations, while the weights' norms are at most what they are now, and where no row is clipped:
the clip has a kink that no noise smooths, since the noise comes after it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vafl.errors import ConfigError

_SLOPES: dict[type[nn.Module], float] = {
    nn.Flatten: 1.0,
    nn.Identity: 1.0,
    nn.ReLU: 1.0,
    nn.Tanh: 1.0,
    nn.Sigmoid: 0.25,
    nn.Softplus: 1.0,
}
_DRAWS = 16  # of the noise, for each row
NoiseKind = Literal["uniform", "gaussian"]
Norms = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Layer:
    """u -> activation(w u + b + Z), Z of that standard deviation.

    Attributes:
        slope: the activation's Lipschitz constant L0.
    """

    linear: nn.Linear
    activation: nn.Module
    slope: float
    deviation: float
    noise: NoiseKind

    @property
    def norm(self) -> float:
        """The weights' spectral norm."""
        return float(torch.linalg.matrix_norm(self.linear.weight.detach(), 2))

    @property
    def kappa(self) -> float:
        """What smoothing by this layer's noise makes of a Lipschitz constant; infinite without noise."""
        if not self.deviation:
            return math.inf
        if self.noise == "gaussian":
            return math.sqrt(2 / math.pi) / self.deviation
        return math.sqrt(self.linear.out_features) / (math.sqrt(3) * self.deviation)

    @property
    def paper_kappa(self) -> float:
        """The same as in the paper: d/c, and 2 sqrt(d)/c_l; times L0 it is its constant of one neuron."""
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
    """The model's layers with their noise: Gaussian in the last one, `hidden` in the others.

    Raises:
        ConfigError: the model is no chain of affine layers, for which alone there are constants.
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
                f"smoothness constants need a chain of {known}. Found {type(part).__name__}. The secant "
                "estimate works for any model.",
            )
        elif groups:
            groups[-1][1].append(part)
    deviations = [*_one_each(hidden, len(groups) - 1), noise]
    kinds: list[NoiseKind] = [hidden_noise] * (len(groups) - 1) + ["gaussian"]
    return [
        Layer(linear, nn.Sequential(*after), math.prod(_SLOPES[type(part)] for part in after), *own)
        for (linear, after), own in zip(groups, zip(deviations, kinds, strict=True), strict=True)
    ]


def _one_each(deviations: Sequence[float], layers: int) -> Sequence[float]:
    if len(deviations) < 2:
        return [*deviations, 0.0][:1] * layers
    if len(deviations) != layers:
        raise ConfigError(
            "VFL-5092",
            f"there must be one deviation for each of the {layers} hidden layers, or one for all. Found "
            f"{len(deviations)}.",
        )
    return deviations


@dataclass(frozen=True)
class LayerConstants:
    """Bounds on how fast a client's gradient changes with one layer's parameters, all others fixed.

    Attributes:
        reach: B_l, the Lipschitz constant of what follows the pre-activation.
        input_norm, input_square: the means of |u| and of |u|^2, u the layer's input.
        bias, weight: L_b = kappa B and L_w = E|u|^2 L_b.
        paper_bias, paper_weight: "paper constant (block-diagonal only)": by its recursion, with E|u|.
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
    """A client's constants.

    Attributes:
        joint: a bound for all of the client's parameters together, between layers too.
        paper: the paper's sum of blocks: "paper constant (block-diagonal only)".
    """

    layers: tuple[LayerConstants, ...]
    joint: float
    paper: float


def smoothness(
    layers: Sequence[Layer], features: Tensor, slope: float, curvature: float, l2: float = 0.0
) -> Smoothness:
    """The constants of one client's part of the objective.

    Args:
        features: [rows, ...], over which the objective is a mean.
        slope, curvature: Lipschitz constants, with respect to the embedding, of the loss and of its
            gradient; only the paper's constant needs the latter.
        l2: of the regulariser.
    """
    norms = _input_norms(layers, features.flatten(1))
    reaches = _reaches(layers, slope)
    papers = _paper_biases(layers, slope)
    found = []
    for layer, own, reach, paper in zip(layers, norms, reaches, papers, strict=True):
        mean, square = float(own.mean()), float((own**2).mean())
        bias = layer.kappa * reach
        found.append(
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
    steepness = sum((reach / slope) ** 2 * float((own**2).mean() + 1) for reach, own in pairs)
    paper = curvature * steepness + sum(one.paper_bias + one.paper_weight for one in found)
    return Smoothness(tuple(found), _joint(layers, norms, reaches) + l2, paper + l2)


def _input_norms(layers: Sequence[Layer], inputs: Tensor) -> list[Norms]:
    """|u_{l-1}| of every layer, [draws of the noise * rows]."""
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
    """B_l = slope * L0 * product over the layers above of L0 |w|."""
    found: list[float] = []
    for layer in reversed(layers):
        slope *= layer.slope
        found.append(slope)
        slope *= layer.norm
    return found[::-1]


def _paper_biases(layers: Sequence[Layer], slope: float) -> list[float]:
    """L_b of the paper's recursion, equation (eq.smoothness), times the loss's slope."""
    found = []
    above, carried = 1.0, 0.0  # the product of L0 |w|, and L_b |w| of the next layer
    for layer in reversed(layers):
        own = above * layer.paper_kappa * layer.slope + carried * layer.slope**2
        found.append(slope * own)
        above, carried = above * layer.slope * layer.norm, own * layer.norm
    return found[::-1]


def _joint(
    layers: Sequence[Layer],
    norms: Sequence[Norms],
    reaches: Sequence[float],
) -> float:
    """The norm of the matrix that bounds how fast layer l's gradient changes with layer k's parameters.

    With u~ = (u, 1) and k < l, a step of theta_k moves the input of layer l by at most |u~_{k-1}| times
    the Lipschitz constants between, and that moves both factors of layer l's gradient.
    """
    sizes = [np.hypot(own, 1.0) for own in norms]
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
