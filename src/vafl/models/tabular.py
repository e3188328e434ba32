"""The default embedding of a table: piecewise-linear inputs, a small network, and a linear path beside it.

It takes one code per column (vafl.data.encoding, form `codes`) and expands them batch by batch:

- a number becomes a thermometer over its edges, [clip(place - edge, 0, 1) for each edge], its scaled value,
  and a flag if it may be missing;
- a category of few levels becomes one column per level, one of many levels a learned vector.

These inputs are hundreds for each column of the table, and nearly all are 0 or 1. So a large batch is not
multiplied with the first layer. What that layer gives for a number lies between what it gives for the two
edges beside it. It is computed once for every edge and level, as a table, and each row sums a few lines.

Gorishniy et al. (2022) call the first piecewise-linear encoding. Learned scales of inputs and a linear path
come from RealMLP (Holzmüller et al., 2024).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

_FEW_LEVELS = 32  # that have a column each
_VECTOR = 8  # width of a learned vector
_DROPPED = 0.1
# Where sums of lines are faster than a product with all inputs: from this many rows in a batch and this many
# inputs for each line on (measured on one core of 2 GHz; the product wins by less than twice elsewhere).
_SMALL_BATCH, _INPUTS_PER_LINE = 128, 6
_EXTREME = 0.005  # share of the labels, at either end, that do not set the unit of a regression


@dataclass(frozen=True)
class NumberInput:
    """A column of numbers.

    Attributes:
        values: the scaled value at each edge.
        fill: the scaled value that stands for a missing one.
        flags_missing: whether it may be missing; its code is then below 0.
    """

    values: tuple[float, ...]
    fill: float
    flags_missing: bool


@dataclass(frozen=True)
class CategoryInput:
    """A column of categories, whose codes are 0 to `levels` - 1."""

    levels: int


Input = NumberInput | CategoryInput


class Expansion(nn.Module):
    """From codes [batch, columns] to inputs [batch, width], without a loop over columns."""

    step_columns: Tensor
    step_edges: Tensor
    number_columns: Tensor
    value_starts: Tensor
    value_lasts: Tensor
    values: Tensor
    fills: Tensor
    flag_columns: Tensor
    level_columns: Tensor
    levels: Tensor
    vector_columns: Tensor
    vector_starts: Tensor
    few_columns: Tensor
    few_starts: Tensor
    line_steps: Tensor
    line_starts: Tensor

    def __init__(self, inputs: Sequence[Input]) -> None:
        super().__init__()
        numbers = [(at, own) for at, own in enumerate(inputs) if isinstance(own, NumberInput)]
        categories = [(at, own.levels) for at, own in enumerate(inputs) if isinstance(own, CategoryInput)]
        few = [(at, levels) for at, levels in categories if levels <= _FEW_LEVELS]
        many = [(at, levels) for at, levels in categories if levels > _FEW_LEVELS]
        steps = [(at, edge) for at, own in numbers for edge in range(len(own.values) - 1)]
        self._keep("step_columns", [at for at, _ in steps])
        self._keep("step_edges", [float(edge) for _, edge in steps])
        self._keep("number_columns", [at for at, _ in numbers])
        self._keep("value_starts", _starts([len(own.values) for _, own in numbers]))
        self._keep("value_lasts", [len(own.values) - 1 for _, own in numbers])
        self._keep("values", [value for _, own in numbers for value in own.values], torch.float32)
        self._keep("fills", [own.fill for _, own in numbers], torch.float32)
        self._keep("flag_columns", [at for at, own in numbers if own.flags_missing])
        self._keep("level_columns", [at for at, levels in few for _ in range(levels)])
        self._keep("levels", [float(level) for _, levels in few for level in range(levels)])
        self._keep("vector_columns", [at for at, _ in many])
        self._keep("vector_starts", _starts([levels for _, levels in many]))
        total = sum(levels for _, levels in many)
        self.vectors = nn.Embedding(total, _VECTOR) if many else None
        if self.vectors is not None:
            nn.init.normal_(self.vectors.weight, std=0.1)
        flags = sum(own.flags_missing for _, own in numbers)
        self.width = len(steps) + len(numbers) + flags + sum(n for _, n in few) + _VECTOR * len(many)
        self.scale = nn.Parameter(torch.ones(self.width))
        self._sizes = [len(steps), len(numbers), flags, sum(n for _, n in few), _VECTOR * len(many)]
        # A line for every edge of every number. The one of the first edge has no step: it takes the zero at
        # the end.
        counts = [len(own.values) for _, own in numbers]
        first, starts = _starts([count - 1 for count in counts]), _starts(counts)
        self._keep(
            "line_steps",
            [
                step
                for at, n in zip(first, counts, strict=True)
                for step in (len(steps), *range(at, at + n - 1))
            ],
        )
        self._keep("line_starts", [start for start, n in zip(starts, counts, strict=True) for _ in range(n)])
        self.lines = 2 * len(numbers) + len(few)  # that a row sums
        self._keep("few_columns", [at for at, _ in few])
        self._keep("few_starts", _starts([levels for _, levels in few]))

    def _keep(self, name: str, values: list[int] | list[float], dtype: torch.dtype | None = None) -> None:
        kind = dtype or (torch.float32 if values and isinstance(values[0], float) else torch.int64)
        self.register_buffer(name, torch.tensor(values, dtype=kind))

    def forward(self, codes: Tensor) -> Tensor:
        """[batch, columns] -> [batch, width]."""
        steps = (codes[:, self.step_columns] - self.step_edges).clamp(0, 1)
        levels = (codes[:, self.level_columns] == self.levels).float()
        values, flags, vectors = self._dense(codes)
        return torch.cat([steps, values, flags, levels, vectors], 1) * self.scale

    def _dense(self, codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scaled values, flags of missing ones, and learned vectors: the few inputs that are dense."""
        values = self._scaled(codes[:, self.number_columns])
        flags = (codes[:, self.flag_columns] < 0).float()
        if self.vectors is None:
            return values, flags, codes.new_empty(len(codes), 0)
        places = codes[:, self.vector_columns].long() + self.vector_starts
        return values, flags, self.vectors(places).flatten(1)

    def times(self, codes: Tensor, weight: Tensor) -> Tensor:
        """Return `forward(codes) @ weight.T`, [batch, outputs], without forming the inputs."""
        steps, values, flags, levels, vectors = torch.split((weight * self.scale).T, self._sizes)
        summed = torch.cat(self._dense(codes), 1) @ torch.cat([values, flags, vectors])
        lines, shares = self._lines(codes)
        if not lines.shape[1]:
            return summed
        table = torch.cat([self._at_edges(steps), levels])
        return summed + functional.embedding_bag(lines, table, mode="sum", per_sample_weights=shares)

    def _at_edges(self, steps: Tensor) -> Tensor:
        """What the weights of the steps add up to at each edge, [edges of all numbers, outputs]."""
        zero = steps.new_zeros(1, steps.shape[1])
        # One sum over all numbers, less what it was at each number's first edge. In float64, so that the
        # difference is exact.
        sums = torch.cat([steps, zero])[self.line_steps].double().cumsum(0)
        return (sums - sums[self.line_starts]).float()

    def _lines(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return which lines of the table each row sums, and their shares, both [batch, lines of a row].

        A number has the lines of the edges below and above it. A missing one has its first edge, which is 0.
        """
        places = codes[:, self.number_columns].clamp(min=0)
        below = torch.minimum(places.floor(), (self.value_lasts - 1).clamp(min=0))
        share = (places - below).clamp(0, 1)
        line = below.long() + self.value_starts
        above = torch.minimum(line + 1, self.value_starts + self.value_lasts)
        level = codes[:, self.few_columns].long() + (self.few_starts + len(self.line_starts))
        whole = torch.ones_like(level, dtype=share.dtype)
        return torch.cat([line, above, level], 1), torch.cat([1 - share, share, whole], 1)

    def _scaled(self, places: Tensor) -> Tensor:
        """Scaled values, between those at the two edges beside each place."""
        below = torch.minimum(places.clamp(min=0).floor().long(), (self.value_lasts - 1).clamp(min=0))
        left = self.values[self.value_starts + below]
        right = self.values[self.value_starts + torch.minimum(below + 1, self.value_lasts)]
        return torch.where(places < 0, self.fills, left + (right - left) * (places - below))


class Tabular(nn.Module):
    """The embedding of a party's table.

    Args:
        inputs: what each code is of.
        hidden: units of the hidden layers.
    """

    def __init__(self, inputs: Sequence[Input], width: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.expansion = Expansion(inputs)
        self.network = network([self.expansion.width, *hidden], width)
        self.linear = nn.Linear(self.expansion.width, width, bias=False)
        self._is_sparse = self.expansion.width >= _INPUTS_PER_LINE * self.expansion.lines

    def forward(self, codes: Tensor) -> Tensor:
        """[batch, columns] -> [batch, width]."""
        if len(codes) < _SMALL_BATCH or not self._is_sparse or _is_traced(codes):
            expanded = self.expansion(codes)
            return self.network(expanded) + self.linear(expanded)  # type: ignore[no-any-return]
        first, linear = cast("nn.Linear", self.network[0]), self.linear
        both = self.expansion.times(codes, torch.cat([first.weight, linear.weight]))
        hidden, straight = torch.split(both, [first.out_features, linear.out_features], 1)
        return self.network[1:](hidden + first.bias) + straight  # type: ignore[no-any-return]


def _is_traced(codes: Tensor) -> bool:
    """Whether a model is exported, or the gradient of each record taken: neither knows embedding_bag."""
    return torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(codes)


class TabularHead(nn.Module):
    """A small network on the embeddings, and a linear path beside it.

    Its outputs are in the labels' own unit: labels far from 1 would take many steps to reach.
    """

    centre: Tensor
    unit: Tensor

    def __init__(self, inputs: int, outputs: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("unit", torch.ones(()))
        self.network = network([inputs, *hidden], outputs)
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, embeddings: Tensor) -> Tensor:
        """[batch, inputs] -> [batch, outputs]."""
        outputs = self.network(embeddings) + self.linear(embeddings)
        return self.centre + self.unit * outputs  # type: ignore[no-any-return]

    def measure(self, labels: Tensor) -> None:
        """Take the unit of a regression's outputs from its training labels.

        It is their standard deviation after the highest and the lowest 0.5 % are drawn in, at least one label
        at either end. A single wrong label of 10^9 would otherwise set the unit, and all others would look
        the same.
        """
        ordered = labels.double().sort().values
        cut = math.ceil(_EXTREME * len(ordered))
        inner = ordered[cut : len(ordered) - cut]
        drawn_in = ordered.clamp(inner[0], inner[-1]) if len(inner) else ordered
        # Labels that are the same but for the extremes, such as rare payments, have no other unit.
        unit = float(drawn_in.std(correction=0)) or float(ordered.std(correction=0)) or 1.0
        self.centre.fill_(float(drawn_in.mean()))
        self.unit.fill_(unit)


def network(sizes: Sequence[int], width: int) -> nn.Sequential:
    """Affine layers with SiLU and dropout between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.SiLU(), Dropout(_DROPPED)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], width))


class Dropout(nn.Module):
    """As nn.Dropout, with random numbers of its own: a run is a function of its seed, not of global state.

    The first mask comes from torch's generator when the module is made, which the run has seeded.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self._share = share
        self._seed = int(torch.randint(2**62, ()).item()) if torch.empty(0).device.type != "meta" else 0
        self._generator = torch.Generator().manual_seed(self._seed)

    def forward(self, values: Tensor) -> Tensor:
        """Zero some of the values in training, and scale up the others."""
        if not self.training or not self._share:
            return values
        kept = torch.rand(values.shape, generator=self._generator) >= self._share
        return values * kept / (1 - self._share)

    def __getstate__(self) -> dict[str, object]:
        return {name: own for name, own in self.__dict__.items() if name != "_generator"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._generator = torch.Generator().manual_seed(self._seed)


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where each of several runs of these sizes starts, laid end to end."""
    return [sum(sizes[:place]) for place in range(len(sizes))]
