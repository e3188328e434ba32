"""Local updates under differential privacy: clip each record's gradient, sum them, add noise to the sum.

A malicious server chooses the slopes (the gradients with respect to the embeddings). So clipping must hold
for every finite float32, not only for likely values. Two rules ensure that:

- Gradients are scaled in float64. In float32, the clip factor for slopes near 3e38 would be a denormal number
  and could round to twice its value.
- Float32 arithmetic sums at most `_SUMMED` records; float64 sums those partial sums. The rounding of a
  float32 sum depends on its terms, so one of 600 records could move it by 0.2 % more than its clipped
  gradient.

The sum stays in float64 until the noise is added. Rounding after that is post-processing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from vafl import kernels
from vafl.arrays import Doubles, Flags, Matrix, RowIds
from vafl.privacy.mechanism.layers import HiddenNoise, trained_layers
from vafl.privacy.mechanism.noise import Noise
from vafl.privacy.mechanism.release import lengths_of, scaled, scaling

_RECORDS_AT_ONCE = 64  # records whose full gradients are in memory at the same time
_SUMMED = 64  # records per float32 sum
# The rounding error of a float32 sum of n terms with norms up to G is at most n^2 u G (u = 2^-24). Two
# neighbours can differ by twice that, 4.9e-4 G. Gradients are clipped to G times this to make up for it.
_BELOW = 1 - 6e-4
# In multiples of the clip. Records with longer inputs are summed in float64: their scaled-down slope would be
# a denormal float32, and the inputs would multiply its rounding error.
_LONGEST_INPUT = 1e30
Passes = list[tuple[Tensor, Tensor]]  # per layer: inputs and outputs
Noted = dict[int, list[tuple[Tensor, Tensor, int]]]  # layer -> inputs, outputs and the sum of their versions


class NoisyUpdates:
    """Embed minibatches, and compute noised gradients from the slopes that the server returns.

    A call takes inputs and their rows. It returns the last layer's outputs, and a function that maps their
    slopes to noised gradients. The gradient of a record is that of its own loss, not of its share of the
    batch's mean. So `clip` and `deviation` do not depend on the batch size.

    Models of linear layers take a fast path that never forms the gradient of a single record. All other
    models use torch.func.

    Args:
        model: the model up to the layer whose output is noised.
        parameters: the trained parameters.
        clip: G, the largest norm of a record's gradient.
        deviation: s, the standard deviation of the noise on the sum over the batch.
        noise: the noise generator.
        hidden: the model's hidden noise, if it has any.
        features: [rows, ...], the features of all rows. A single linear layer needs their norms and computes
            them once.
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
        # The fast path needs linear layers that share no parameters.
        used = [id(p) for layer in layers for p in layer.parameters() if p.requires_grad]
        plain = all(type(layer) is nn.Linear for layer in layers) and len(set(used)) == len(used)
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
        self._reaches: Doubles | None = None
        if not self._alone:
            for number, layer in enumerate(self._layers):
                layer.register_forward_hook(partial(self._note, number))
        elif features is not None:
            self._reaches = _reach(self._trains[0], features)

    def __call__(
        self, inputs: Tensor, rows: RowIds | None = None
    ) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
        drawn: list[Tensor] = []
        if self._alone:  # one linear layer: the slopes of its outputs are given, so no graph is needed
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
        """Return the inputs and outputs of each layer if the fast path applies to this pass; else nothing.

        It applies if each layer was called once, with one vector per record, and if no in-place operation has
        overwritten its inputs or outputs since.
        """
        once = [noted[number][0] for number in range(len(self._layers)) if len(noted.get(number, ())) == 1]
        passes = [
            (inputs, outputs)
            for inputs, outputs, written in once
            if inputs.ndim == 2 and len(inputs) == records and inputs._version + outputs._version == written
        ]
        return passes if len(passes) == len(self._layers) else []

    def _mean_linear(
        self, outputs: Tensor, passes: Passes, slopes: Tensor, rows: RowIds | None
    ) -> list[Doubles]:
        """Return the mean of the clipped gradients of linear layers, one array per parameter.

        A record's gradient of a linear layer is the outer product of the slopes of its outputs and its
        inputs. So its norm is the product of two norms, and the gradient itself is not needed.
        """
        slopes_of: Sequence[Tensor] = [slopes]
        if not self._alone:
            slopes_of = torch.autograd.grad(outputs, [result for _, result in passes], slopes)
        if self._reaches is None or rows is None:
            reaches = [
                _reach(trains, inputs) for trains, (inputs, _) in zip(self._trains, passes, strict=True)
            ]
        else:
            reaches = [self._reaches.take(rows)]
        clip = self._clip / len(slopes)  # the clip of a record's share of the mean
        factors = scaling(_norms(slopes_of, reaches), clip * _BELOW)
        means: list[Doubles] = []
        layers = zip(self._trains, passes, slopes_of, reaches, strict=True)
        for (weight, bias), (inputs, _), layer_slopes, reach in layers:
            clipped = scaled(layer_slopes.numpy(), factors)
            exact = ~(reach <= _LONGEST_INPUT * clip)  # negated, so that nan counts as too long
            means += [_summed_products(clipped, inputs.numpy(), exact)] if weight else []
            means += [np.ones(len(clipped)) @ clipped] if bias else []  # much faster than sum(0)
        return means

    def _mean_any(self, inputs: Tensor, drawn: Sequence[Tensor], slopes: Tensor) -> list[Doubles]:
        """Return the mean of the clipped gradients of any model, from the full gradient of each record."""
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        fixed = {name: value.detach() for name, value in named}
        trained = {name: fixed.pop(name) for name in self._names}
        gradient = grad(lambda parameters, *record: self._loss({**fixed, **parameters}, *record))
        each = vmap(gradient, in_dims=(None, 0, 0, 0), randomness="different")
        means = [np.zeros(shape) for _, shape in self._places]
        for start in range(0, len(inputs), _RECORDS_AT_ONCE):
            part = slice(start, start + _RECORDS_AT_ONCE)
            # torch cannot vectorise its fast attention: it would compute the records one by one, 9 times as
            # slowly, and warn about that.
            with sdpa_kernel(SDPBackend.MATH):
                by_name = each(trained, inputs[part], slopes[part], tuple(noise[part] for noise in drawn))
            gradients = [by_name[name].flatten(1) for name in self._names]
            lengths = np.hypot.reduce([lengths_of(gradient) for gradient in gradients])
            factors = scaling(lengths, self._clip / len(slopes))
            for place, gradients_of_one in enumerate(gradients):
                clipped = scaled(gradients_of_one.numpy(), factors)
                means[place] += clipped.sum(0).reshape(means[place].shape)
        return means

    def _loss(
        self, parameters: dict[str, Tensor], features: Tensor, slopes: Tensor, drawn: Sequence[Tensor]
    ) -> Tensor:
        """Return <outputs, slopes> of one record, with the hidden noise of its forward pass."""
        if self._hidden:
            self._hidden.replayed = [noise[None] for noise in drawn]
        try:
            outputs: Tensor = functional_call(self._model, parameters, (features[None],))
        finally:
            if self._hidden:
                self._hidden.replayed = None
        return (outputs[0] * slopes).sum()


@np.errstate(over="ignore", invalid="ignore")
def _affine(layer: nn.Module, inputs: Tensor) -> Tensor:
    """Return a linear layer's outputs without a graph. For small layers, NumPy is three times as fast."""
    parameters = [parameter.detach().numpy() for parameter in layer.parameters()]
    outputs: Matrix = inputs.numpy() @ parameters[0].T
    if len(parameters) > 1:
        kernels.add_row(outputs, parameters[1])
    return torch.from_numpy(outputs)


def _reach(trains: tuple[bool, bool], inputs: Tensor) -> Doubles:
    """Return the norm of a linear layer's gradient per record, for slopes of norm 1: [batch].

    Args:
        trains: whether the weight is trained, and whether the bias is.
        inputs: [batch, features].
    """
    weight, bias = trains
    lengths = lengths_of(inputs) if weight else np.zeros(len(inputs))
    return np.hypot(lengths, 1) if bias else lengths


@np.errstate(over="ignore", invalid="ignore")
def _norms(slopes_of: Sequence[Tensor], reaches: Sequence[Doubles]) -> Doubles:
    """Return the norm of each record's gradient over all layers: [batch]."""
    norms = [lengths_of(slopes) * reach for slopes, reach in zip(slopes_of, reaches, strict=True)]
    total: Doubles = norms[0] if len(norms) == 1 else np.hypot.reduce(norms)
    return total


def _summed_products(slopes: Doubles, inputs: Matrix, exact: Flags) -> Doubles:
    """Return slopes^T inputs: [outputs, features], from float32 products of `_SUMMED` records each.

    Args:
        slopes: [batch, outputs] of clipped gradients; zeros for records that count as zero.
        inputs: [batch, features].
        exact: [batch], records that need float64, or whose inputs are not finite.
    """
    if exact.any():
        counts = exact & slopes.any(1)  # skip zero slopes: 0 times infinity is nan
        products: Doubles = slopes[counts].T @ inputs[counts].astype(np.float64)
        return products + _summed_products(slopes[~exact], inputs[~exact], exact[~exact])
    short = slopes.astype(np.float32)
    full = len(short) // _SUMMED * _SUMMED
    stacked = [values[:full].reshape(-1, _SUMMED, values.shape[1]) for values in (short, inputs)]
    products = (stacked[0].transpose(0, 2, 1) @ stacked[1]).sum(0, dtype=np.float64)
    if full < len(short):
        products += short[full:].T @ inputs[full:]
    return products


def _is_trained(layer: nn.Module, name: str) -> bool:
    parameter = getattr(layer, name)
    return parameter is not None and bool(parameter.requires_grad)
