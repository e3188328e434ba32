"""Local updates under differential privacy: each record's own gradient, clipped; their sum, noised."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from vafl.privacy.accounts import Numbers
from vafl.privacy.layers import HiddenNoise, trained_layers
from vafl.privacy.noise import Noise
from vafl.privacy.release import Lengths, clip_rows, lengths_of, scaling

_RECORDS_AT_ONCE = 64  # whose whole gradients are in memory together
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
        self._alone = self._layers == [model]
        self._trains = [(_is_trained(layer, "weight"), _is_trained(layer, "bias")) for layer in self._layers]
        ends = list(accumulate(parameter.numel() for parameter in self._parameters))
        self._size = ends[-1] if ends else 0
        self._places = [
            (slice(end - parameter.numel(), end), tuple(parameter.shape))
            for end, parameter in zip(ends, self._parameters, strict=True)
        ]
        self._noting: Noted | None = None
        self._reaches: Lengths | None = None
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
            with torch.no_grad():
                outputs = self._model(inputs)
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
            share = 1 / len(slopes)
            return [mean.add_(noise, alpha=share) for mean, noise in zip(means, self._draw(), strict=True)]

        return outputs.detach(), pull_back

    def _draw(self) -> list[Tensor]:
        """Noise of the shape of each parameter."""
        drawn = self._noise.normals(self._size, self._deviation)
        return [torch.from_numpy(drawn[place].reshape(shape)) for place, shape in self._places]

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
    ) -> list[Tensor]:
        """The clipped gradients' mean. Those of linear layers are outer products: their norms follow without
        making them."""
        slopes_of: Sequence[Tensor] = [slopes]
        if not self._alone:
            slopes_of = torch.autograd.grad(outputs, [own for _, own in passes], slopes)
        ins = [inputs for inputs, _ in passes]
        if self._reaches is None or rows is None:
            reaches = [_reach(trains, inputs) for trains, inputs in zip(self._trains, ins, strict=True)]
        else:
            reaches = [self._reaches.take(rows)]
        lengths = _norms(slopes_of, reaches)
        finite = np.isfinite(lengths)
        if not finite.all():  # such a record counts as zero: an error would tell of it alone
            kept, zero = torch.from_numpy(finite)[:, None], torch.zeros(())
            ins = [inputs.where(kept, zero) for inputs in ins]
            slopes_of = [own.where(kept, zero) for own in slopes_of]
            lengths[~finite] = 0
        factors = torch.from_numpy(scaling(lengths * len(slopes), self._clip)).float()[:, None]
        means: list[Tensor] = []
        for (weight, bias), inputs, own in zip(self._trains, ins, slopes_of, strict=True):
            scaled = own * factors
            means += ([scaled.t() @ inputs] if weight else []) + ([scaled.sum(0)] if bias else [])
        return means

    def _mean_any(self, inputs: Tensor, drawn: Sequence[Tensor], slopes: Tensor) -> list[Tensor]:
        """The same of any model: torch.func makes every record's whole gradient, some records at a time."""
        slopes = slopes * len(slopes)
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        fixed = {name: value.detach() for name, value in named}
        trained = {name: fixed.pop(name) for name in self._names}
        one_gradient = grad(lambda own, *batch: self._loss({**fixed, **own}, *batch))
        each = vmap(one_gradient, in_dims=(None, 0, 0, 0), randomness="different")
        sizes = [parameter.numel() for parameter in self._parameters]
        sums = torch.zeros(sum(sizes))
        for start in range(0, len(inputs), _RECORDS_AT_ONCE):
            part = slice(start, start + _RECORDS_AT_ONCE)
            gradients = each(trained, inputs[part], slopes[part], tuple(own[part] for own in drawn))
            flat = torch.cat([gradients[name].flatten(1) for name in self._names], dim=1)
            sums += clip_rows(flat, self._clip).sum(0)
        pairs = zip(torch.split(sums.div_(len(slopes)), sizes), self._parameters, strict=True)
        return [own.view_as(parameter) for own, parameter in pairs]

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


def _reach(trains: tuple[bool, bool], inputs: Tensor) -> Lengths:
    """[batch]: the norm of a linear layer's gradient for a slope of norm 1.

    Args:
        trains: whether its weight is trained, and its bias.
    """
    weight, bias = trains
    lengths: Lengths = lengths_of(inputs).numpy() if weight else np.zeros(len(inputs))
    return np.hypot(lengths, 1) if bias else lengths


@np.errstate(over="ignore", invalid="ignore")
def _norms(slopes_of: Sequence[Tensor], reaches: Sequence[Lengths]) -> Lengths:
    """[batch]: those of whole gradients, from slopes and reach at each layer."""
    norms = [lengths_of(own).numpy() * reach for own, reach in zip(slopes_of, reaches, strict=True)]
    whole: Lengths = norms[0] if len(norms) == 1 else np.hypot.reduce(norms)
    return whole


def _is_trained(layer: nn.Module, name: str) -> bool:
    parameter = getattr(layer, name)
    return parameter is not None and bool(parameter.requires_grad)
