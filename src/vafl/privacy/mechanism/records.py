"""Local updates under differential privacy: clip each record's gradient, sum them, add noise to the sum.

The server chooses the slopes that gradients are made of, so clipping must hold for every finite float32, not
for likely ones. Two rules keep it:

- Gradients are scaled in float64. A clip factor in float32 would be a denormal number for slopes near 3e38,
  and would round to as much as twice its value.
- Float32 arithmetic sums at most `_SUMMED` records; float64 sums the rest. How a float32 sum is rounded
  depends on its terms, so one of 600 records could move it by 0.2 % more than its clipped gradient.

The sum stays in float64 until the noise is added. Rounding after that is post-processing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from vafl import kernels
from vafl.privacy.ledger.accounts import Floats, Numbers
from vafl.privacy.mechanism.layers import HiddenNoise, trained_layers
from vafl.privacy.mechanism.noise import Noise
from vafl.privacy.mechanism.release import Rows, lengths_of, scaled, scaling

_RECORDS_AT_ONCE = 64  # whose whole gradients are in memory together
_SUMMED = 64  # records
# A float32 sum of n terms, each of norm G at most, is off by n^2 u G at most (u = 2^-24), for each of two
# neighbours: 4.9e-4 G in all. So gradients are clipped that much below G.
_BELOW = 1 - 6e-4
# Times the clip: a record whose inputs are longer than this has its part of the sum computed in float64. Its
# slope, scaled down, would be a denormal float32, whose rounding error the inputs would multiply.
_LONGEST_INPUT = 1e30
Passes = list[tuple[Tensor, Tensor]]  # what went into a layer and came out
Noted = dict[int, list[tuple[Tensor, Tensor, int]]]  # by layer; and how often both had been written to


class NoisyUpdates:
    """(inputs, their rows) -> (the last layer's outputs, the map from their slopes to noised gradients).

    The gradient of one record is that of its own loss, not of its share of the batch's mean: so `clip`
    and `deviation` mean the same for batches of any size.

    Args:
        model: up to where the noise of the upload is added.
        parameters: those that are trained.
        clip: G.
        deviation: s, of the noise on the sum over the batch.
        hidden: the model's hidden noise, if it has any.
        features: [rows, ...], all that ever goes in: a linear model needs their norms, and finds them once.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Tensor],
        clip: float,
        deviation: float,
        noise: Noise,
        hidden: HiddenNoise | None = None,
        features: Tensor | None = None,
    ) -> None:
        self._model, self._parameters = model, list(parameters)
        self._clip, self._deviation, self._noise, self._hidden = clip, deviation, noise, hidden
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        layers = [
            layer for layer in trained_layers(model) if any(p.requires_grad for p in layer.parameters())
        ]
        whose = [id(own) for layer in layers for own in layer.parameters() if own.requires_grad]
        plain = all(type(layer) is nn.Linear for layer in layers) and len(set(whose)) == len(whose)
        self._layers = layers if plain else []
        self._alone = self._layers == [model] and not (model._forward_hooks or model._forward_pre_hooks)
        self._trains = [(_is_trained(layer, "weight"), _is_trained(layer, "bias")) for layer in self._layers]
        ends = list(accumulate(parameter.numel() for parameter in self._parameters))
        self._size = ends[-1] if ends else 0
        self._places = [
            (slice(end - parameter.numel(), end), tuple(parameter.shape))
            for end, parameter in zip(ends, self._parameters, strict=True)
        ]
        self._noting: Noted | None = None
        self._reaches: Floats | None = None
        if not self._alone:
            for number, layer in enumerate(self._layers):
                layer.register_forward_hook(partial(self._note, number))
        elif features is not None:
            self._reaches = _reach(self._trains[0], features)

    def __call__(
        self, inputs: Tensor, rows: Numbers | None = None
    ) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
        drawn: list[Tensor] = []
        if self._alone:  # its slopes are those of the outputs: no graph
            outputs = _affine(self._model, inputs)
            passes = [(inputs, outputs)]
        else:
            noted: Noted = {}
            self._noting = noted
            outputs = self._model(inputs)
            self._noting = None
            passes = self._through_each_once(noted, len(inputs))
            drawn = list(self._hidden.drawn) if self._hidden else []

        def pull_back(slopes: Tensor) -> list[Tensor]:
            if passes:
                means = self._mean_linear(outputs, passes, slopes, rows)
            else:
                means = self._mean_any(inputs, drawn, slopes)
            drawn_noise = self._noise.normals(self._size, self._deviation / len(slopes))
            return [
                torch.from_numpy((mean + drawn_noise[place].reshape(shape)).astype(np.float32))
                for mean, (place, shape) in zip(means, self._places, strict=True)
            ]

        return outputs.detach(), pull_back

    def _note(self, number: int, _: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        if self._noting is not None:
            written = inputs[0]._version + outputs._version
            self._noting.setdefault(number, []).append((inputs[0].detach(), outputs, written))

    def _through_each_once(self, noted: Noted, records: int) -> Passes:
        """What went into each layer and came out, if that was one vector a record, once, and is what it was
        then (an activation in place writes into it); else nothing."""
        once = [noted[number][0] for number in range(len(self._layers)) if len(noted.get(number, ())) == 1]
        passes = [
            (inputs, outputs)
            for inputs, outputs, written in once
            if inputs.ndim == 2 and len(inputs) == records and inputs._version + outputs._version == written
        ]
        return passes if len(passes) == len(self._layers) else []

    def _mean_linear(
        self, outputs: Tensor, passes: Passes, slopes: Tensor, rows: Numbers | None
    ) -> list[Floats]:
        """The mean of the clipped gradients, one array a parameter.

        The gradient of a linear layer is an outer product, of the slopes of its outputs and its inputs: its
        norm is known without making it.
        """
        slopes_of: Sequence[Tensor] = [slopes]
        if not self._alone:
            slopes_of = torch.autograd.grad(outputs, [own for _, own in passes], slopes)
        if self._reaches is None or rows is None:
            reaches = [
                _reach(trains, inputs) for trains, (inputs, _) in zip(self._trains, passes, strict=True)
            ]
        else:
            reaches = [self._reaches.take(rows)]
        clip = self._clip / len(slopes)  # of a record's share of the mean
        factors = scaling(_norms(slopes_of, reaches), clip * _BELOW)
        means: list[Floats] = []
        layers = zip(self._trains, passes, slopes_of, reaches, strict=True)
        for (weight, bias), (inputs, _), own, reach in layers:
            clipped = scaled(own.numpy(), factors)
            exact = ~(reach <= _LONGEST_INPUT * clip)  # not a number, too
            means += [_summed_products(clipped, inputs.numpy(), exact)] if weight else []
            means += [np.ones(len(clipped)) @ clipped] if bias else []  # several times as fast as sum(0)
        return means

    def _mean_any(self, inputs: Tensor, drawn: Sequence[Tensor], slopes: Tensor) -> list[Floats]:
        """The same for any model: torch.func makes the whole gradient of each record, some at a time."""
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        fixed = {name: value.detach() for name, value in named}
        trained = {name: fixed.pop(name) for name in self._names}
        one_gradient = grad(lambda own, *batch: self._loss({**fixed, **own}, *batch))
        each = vmap(one_gradient, in_dims=(None, 0, 0, 0), randomness="different")
        means = [np.zeros(shape) for _, shape in self._places]
        for start in range(0, len(inputs), _RECORDS_AT_ONCE):
            part = slice(start, start + _RECORDS_AT_ONCE)
            found = each(trained, inputs[part], slopes[part], tuple(own[part] for own in drawn))
            gradients = [found[name].flatten(1) for name in self._names]
            lengths = np.hypot.reduce([lengths_of(own) for own in gradients])
            factors = scaling(lengths, self._clip / len(slopes))
            for place, own in enumerate(gradients):
                means[place] += scaled(own.numpy(), factors).sum(0).reshape(means[place].shape)
        return means

    def _loss(
        self, parameters: dict[str, Tensor], features: Tensor, slopes: Tensor, drawn: Sequence[Tensor]
    ) -> Tensor:
        """<outputs, slopes> of one record, with the noise that its forward pass had."""
        if self._hidden:
            self._hidden.replayed = [own[None] for own in drawn]
        try:
            outputs: Tensor = functional_call(self._model, parameters, (features[None],))
        finally:
            if self._hidden:
                self._hidden.replayed = None
        return (outputs[0] * slopes).sum()


@np.errstate(over="ignore", invalid="ignore")
def _affine(layer: nn.Module, inputs: Tensor) -> Tensor:
    """What a linear layer gives, without a graph; for a small layer numpy takes a third of torch's time."""
    parameters = [own.detach().numpy() for own in layer.parameters()]
    outputs: Rows = inputs.numpy() @ parameters[0].T
    if len(parameters) > 1:
        kernels.add_row(outputs, parameters[1])
    return torch.from_numpy(outputs)


def _reach(trains: tuple[bool, bool], inputs: Tensor) -> Floats:
    """[batch]: the norm of a linear layer's gradient for a slope of norm 1.

    Args:
        trains: whether its weight is trained, and its bias.
        inputs: [batch, features].
    """
    weight, bias = trains
    lengths = lengths_of(inputs) if weight else np.zeros(len(inputs))
    return np.hypot(lengths, 1) if bias else lengths


@np.errstate(over="ignore", invalid="ignore")
def _norms(slopes_of: Sequence[Tensor], reaches: Sequence[Floats]) -> Floats:
    """[batch]: the norms of whole gradients, from the slopes and the reach at each layer."""
    norms = [lengths_of(own) * reach for own, reach in zip(slopes_of, reaches, strict=True)]
    whole: Floats = norms[0] if len(norms) == 1 else np.hypot.reduce(norms)
    return whole


def _summed_products(slopes: Floats, inputs: Rows, exact: npt.NDArray[np.bool_]) -> Floats:
    """[outputs, features]: slopes^T inputs, from float32 products of `_SUMMED` records at a time.

    Args:
        slopes: [batch, outputs], of clipped gradients; those of a record that counts as zero are zero.
        inputs: [batch, features].
        exact: [batch], records whose products need float64, or whose inputs are not finite.
    """
    if exact.any():
        counts = exact & slopes.any(1)  # leaves out infinity times zero
        products: Floats = slopes[counts].T @ inputs[counts].astype(np.float64)
        return products + _summed_products(slopes[~exact], inputs[~exact], exact[~exact])
    short = slopes.astype(np.float32)
    whole = len(short) // _SUMMED * _SUMMED
    stacked = [own[:whole].reshape(-1, _SUMMED, own.shape[1]) for own in (short, inputs)]
    products = (stacked[0].transpose(0, 2, 1) @ stacked[1]).sum(0, dtype=np.float64)
    if whole < len(short):
        products += short[whole:].T @ inputs[whole:]
    return products


def _is_trained(layer: nn.Module, name: str) -> bool:
    parameter = getattr(layer, name)
    return parameter is not None and bool(parameter.requires_grad)
