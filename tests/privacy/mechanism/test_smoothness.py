"""The corrected constants bound the measured values. The paper's do not."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from vafl.errors import ConfigError
from vafl.privacy.mechanism.smoothness import Layer, chain_of, smoothness

DRAWS = 200_000


class Absolute(nn.Module):
    """|x|: a 1-Lipschitz activation with the sharpest possible kink."""

    def forward(self, values):
        return values.abs()


def linear(weight, bias=None):
    layer = nn.Linear(len(weight[0]), len(weight))
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
        layer.bias.copy_(torch.zeros(len(weight)) if bias is None else torch.tensor(bias))
    return layer


def gradient_maker(layers, inputs, direction, generator):
    """Return theta -> the gradient of E <direction, h(theta)>, with common noise."""
    count = len(inputs)
    noises = []
    for layer in layers:
        shape = (count, layer.linear.out_features)
        if layer.noise == "gaussian":
            noises.append(layer.deviation * torch.randn(shape, generator=generator, dtype=torch.float64))
        else:
            unit = 2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1
            noises.append(layer.deviation * math.sqrt(3) * unit)

    def gradient(theta):
        theta = theta.clone().requires_grad_()
        start, values = 0, inputs
        for layer, noise in zip(layers, noises, strict=True):
            rows, columns = layer.linear.weight.shape
            weight = theta[start : start + rows * columns].view(rows, columns)
            bias = theta[start + rows * columns : start + rows * columns + rows]
            start += rows * columns + rows
            values = layer.activation(values @ weight.t() + bias + noise)
        (found,) = torch.autograd.grad((values @ direction).mean(), theta)
        return found

    return gradient


def flat(layers):
    parts = [part.detach().double().flatten() for layer in layers for part in layer.linear.parameters()]
    return torch.cat(parts)


def test_the_papers_weight_constant_is_violated_and_the_corrected_one_is_met():
    """u = 10, |x| after two Gaussian neurons, c = 1: the true constant is 79.8, the paper's is 20."""
    layer = Layer(linear([[0.0], [0.0]]), Absolute(), 1.0, 1.0, "gaussian")
    found = smoothness([layer], torch.tensor([[10.0]]), slope=1.0, curvature=0.0).layers[0]
    generator = torch.Generator().manual_seed(1)
    inputs = torch.full((DRAWS, 1), 10.0, dtype=torch.float64)
    gradient = gradient_maker([layer], inputs, torch.tensor([1.0, 0.0], dtype=torch.float64), generator)
    at, step = torch.zeros(4, dtype=torch.float64), 5e-3
    ahead = at + step * torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)  # one weight, nothing else
    true = float((gradient(ahead) - gradient(at))[:2].norm()) / step
    assert true == pytest.approx(79.8, rel=0.03)
    assert found.paper_weight == pytest.approx(20.0)
    assert found.weight == pytest.approx(79.79, abs=0.01)
    assert true <= found.weight * 1.03  # 3 % for the Monte-Carlo


def chain(sizes, deviations, generator, activation=nn.ReLU):
    layers = []
    for place, (before, after) in enumerate(pairwise(sizes)):
        own = nn.Linear(before, after)
        with torch.no_grad():
            own.weight.copy_(torch.randn(after, before, generator=generator) / math.sqrt(before))
            own.bias.copy_(0.3 * torch.randn(after, generator=generator))
        last = place == len(sizes) - 2
        kind = "gaussian" if last else "uniform"
        layers.append(Layer(own, activation(), 1.0, deviations[place], kind))
    return layers


@pytest.mark.parametrize("sizes", [(3, 2), (4, 3, 2), (3, 4, 3, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_corrected_bounds_hold_for_every_block_and_for_all_layers_together(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    layers = chain(sizes, [0.3, 0.4, 0.5][-(len(sizes) - 1) :], generator)
    rows = torch.randn(20, sizes[0], generator=generator)
    direction = torch.randn(sizes[-1], generator=generator, dtype=torch.float64)
    direction /= direction.norm()
    found = smoothness(layers, rows, slope=1.0, curvature=0.0)
    inputs = rows.double().repeat(1500, 1)
    gradient, at = gradient_maker(layers, inputs, direction, generator), flat(layers)
    here, step = gradient(at), 0.02
    blocks, start = [], 0
    for layer, constants in zip(layers, found.layers, strict=True):
        weights, biases = layer.linear.weight.numel(), layer.linear.out_features
        blocks += [(start, weights, constants.weight), (start + weights, biases, constants.bias)]
        start += weights + biases
    for start, size, bound in [*blocks, (0, len(at), found.joint)]:
        steepest = 0.0
        move = torch.zeros_like(at)
        move[start : start + size] = torch.randn(size, generator=generator, dtype=torch.float64)
        for _ in range(6):
            move *= step / move.norm()
            change = (gradient(at + move) - here)[start : start + size]
            steepest = max(steepest, float(change.norm()) / step)
            move = torch.zeros_like(at)
            move[start : start + size] = change
        assert 0 < steepest <= bound * 1.02


def test_constants_by_hand():
    layers = [
        Layer(linear([[3.0, 0.0], [0.0, 1.0]]), nn.ReLU(), 1.0, 0.5, "uniform"),
        Layer(linear([[2.0, 0.0]]), nn.Sequential(), 1.0, 2.0, "gaussian"),
    ]
    first, last = smoothness(layers, torch.tensor([[3.0, 4.0]]), slope=7.0, curvature=0.0).layers
    assert (first.norm, last.norm) == (3.0, 2.0)
    assert first.kappa == pytest.approx(math.sqrt(2) / (math.sqrt(3) * 0.5))
    assert last.kappa == pytest.approx(math.sqrt(2 / math.pi) / 2)
    assert (first.reach, last.reach) == (14.0, 7.0)
    assert (first.input_norm, first.input_square) == (5.0, 25.0)
    assert first.bias == pytest.approx(14 * first.kappa)
    assert first.weight == pytest.approx(25 * 14 * first.kappa)
    assert last.paper_bias == pytest.approx(7 * 1 / 2.0)
    assert first.paper_bias == pytest.approx(7 * (1 / 2.0 * 2 + 2 * 2 * math.sqrt(2) / 0.5))
    assert first.paper_weight == pytest.approx(5 * first.paper_bias)


def test_one_layer_is_bounded_by_its_weights_and_bias_together():
    layer = Layer(linear([[1.0, 2.0]]), nn.Sequential(), 1.0, 1.0, "gaussian")
    found = smoothness([layer], torch.tensor([[3.0, 4.0]]), slope=1.0, curvature=0.0, l2=0.5)
    only = found.layers[0]
    assert found.joint == pytest.approx(only.weight + only.bias + 0.5)
    assert found.paper == pytest.approx(only.paper_weight + only.paper_bias + 0.5)


def test_without_noise_there_is_no_constant():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    found = smoothness(chain_of(model, noise=1.0), torch.ones(4, 2), slope=1.0, curvature=0.0)
    assert found.layers[0].bias == math.inf
    assert found.layers[1].bias < math.inf
    assert found.joint == math.inf


def test_a_chain_knows_its_layers_and_their_noise():
    hidden = [nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2), nn.Tanh()]
    model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(2, 1))
    one = chain_of(model, 1.0, (0.5,))
    assert [(layer.deviation, layer.noise) for layer in one] == [
        (0.5, "uniform"),
        (0.5, "uniform"),
        (1.0, "gaussian"),
    ]
    assert [layer.slope for layer in one] == [0.25, 1.0, 1.0]
    each = chain_of(model, 1.0, (0.5, 0.2), "gaussian")
    assert [(layer.deviation, layer.noise) for layer in each][:2] == [(0.5, "gaussian"), (0.2, "gaussian")]
    assert len(chain_of(nn.Linear(2, 2), 1.0, (0.5,))) == 1
    with pytest.raises(ConfigError, match=r"VFL-5092.*2"):
        chain_of(model, 1.0, (0.5, 0.2, 0.1))


@pytest.mark.parametrize(
    "model", [nn.Conv2d(1, 2, 3), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)), weight_norm(nn.Linear(2, 1))]
)
def test_other_models_have_no_constants(model):
    with pytest.raises(ConfigError, match="VFL-5091"):
        chain_of(model, 1.0)
