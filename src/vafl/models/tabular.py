"""The default embedding for tables: piecewise-linear inputs, a small network, and a parallel linear path.

The embedding takes one code per column (vafl.data.encoding, form `codes`) and expands it batch by batch:

- A number becomes a thermometer over its edges, [clip(code - edge, 0, 1) for each edge], its scaled value,
  and a flag if it may be missing.
- A category with few levels becomes one input per level. A category with many levels becomes a learned
  vector.

Every column gets up to hundreds of inputs, and nearly all of them are 0 or 1. A large batch therefore skips
the product with the first layer. The layer is linear between two edges, so its value at a number is
interpolated from its values at the two nearest edges. These values are computed once per batch for every
edge and level. They form a table, and each row of the batch adds up a few lines of it.

The thermometer is the piecewise-linear encoding of Gorishniy et al. (2022). Learned input scales and the
linear path come from RealMLP (Holzmüller et al., 2024).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

_FEW_LEVELS = 32  # most levels of a category that gets one input per level
_VECTOR = 8  # width of a learned vector
_DROPPED = 0.1  # share of hidden units that dropout zeroes
# Adding up table lines is faster than the full product from this many rows per batch and this many inputs per
# line on (measured on one core).
_SMALL_BATCH, _INPUTS_PER_LINE = 128, 6
_EXTREME = 0.005  # share of the labels at each end that is ignored for the unit of a regression


@dataclass(frozen=True)
class NumberInput:
    """A column of numbers.

    Attributes:
        values: the scaled value at each edge.
        fill: the scaled value that replaces a missing one.
        flags_missing: whether a value may be missing; its code is then below 0.
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
    """Expands codes [batch, columns] to inputs [batch, width], without a loop over columns.

    The inputs are, in this order: thermometer steps, scaled values, flags of missing values, category levels,
    learned vectors. The buffers say for each input which column and edge or level it belongs to. Buffers of
    different columns are laid end to end; `*_starts` is the position of each column's first entry.

    Attributes:
        width: the number of inputs.
        lines: the number of table lines that `times` adds up for a row.
    """

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
        numbers = [(at, item) for at, item in enumerate(inputs) if isinstance(item, NumberInput)]
        categories = [(at, item.levels) for at, item in enumerate(inputs) if isinstance(item, CategoryInput)]
        few = [(at, levels) for at, levels in categories if levels <= _FEW_LEVELS]
        many = [(at, levels) for at, levels in categories if levels > _FEW_LEVELS]
        steps = [(at, edge) for at, number in numbers for edge in range(len(number.values) - 1)]
        self._keep("step_columns", [at for at, _ in steps])
        self._keep("step_edges", [float(edge) for _, edge in steps])
        self._keep("number_columns", [at for at, _ in numbers])
        self._keep("value_starts", _starts([len(number.values) for _, number in numbers]))
        self._keep("value_lasts", [len(number.values) - 1 for _, number in numbers])
        self._keep("values", [value for _, number in numbers for value in number.values], torch.float32)
        self._keep("fills", [number.fill for _, number in numbers], torch.float32)
        self._keep("flag_columns", [at for at, number in numbers if number.flags_missing])
        self._keep("level_columns", [at for at, levels in few for _ in range(levels)])
        self._keep("levels", [float(level) for _, levels in few for level in range(levels)])
        self._keep("vector_columns", [at for at, _ in many])
        self._keep("vector_starts", _starts([levels for _, levels in many]))
        total = sum(levels for _, levels in many)
        self.vectors = nn.Embedding(total, _VECTOR) if many else None
        if self.vectors is not None:
            nn.init.normal_(self.vectors.weight, std=0.1)
        flags = sum(number.flags_missing for _, number in numbers)
        self._sizes = [len(steps), len(numbers), flags, sum(n for _, n in few), _VECTOR * len(many)]
        self.width = sum(self._sizes)
        self.scale = nn.Parameter(torch.ones(self.width))
        # The table of `times` has a line for every edge of every number. A line sums the steps up to its
        # edge. The first edge of a number has no step; it uses the zero that _at_edges appends to the steps.
        counts = [len(number.values) for _, number in numbers]
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
        self.lines = 2 * len(numbers) + len(few)  # two edges per number, one level per category
        self._keep("few_columns", [at for at, _ in few])
        self._keep("few_starts", _starts([levels for _, levels in few]))

    def _keep(self, name: str, values: list[int] | list[float], dtype: torch.dtype | None = None) -> None:
        """Register a buffer, which moves and is saved with the module."""
        kind = dtype or (torch.float32 if values and isinstance(values[0], float) else torch.int64)
        self.register_buffer(name, torch.tensor(values, dtype=kind))

    def forward(self, codes: Tensor) -> Tensor:
        """[batch, columns] -> [batch, width]."""
        steps = (codes[:, self.step_columns] - self.step_edges).clamp(0, 1)
        levels = (codes[:, self.level_columns] == self.levels).float()
        values, flags, vectors = self._dense(codes)
        return torch.cat([steps, values, flags, levels, vectors], 1) * self.scale

    def _dense(self, codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs that are dense: scaled values, flags of missing values, and learned vectors."""
        values = self._scaled(codes[:, self.number_columns])
        flags = (codes[:, self.flag_columns] < 0).float()
        if self.vectors is None:
            return values, flags, codes.new_empty(len(codes), 0)
        places = codes[:, self.vector_columns].long() + self.vector_starts
        return values, flags, self.vectors(places).flatten(1)

    def times(self, codes: Tensor, weight: Tensor) -> Tensor:
        """Return `forward(codes) @ weight.T`, [batch, outputs], without expanding steps and levels."""
        steps, values, flags, levels, vectors = torch.split((weight * self.scale).T, self._sizes)
        summed = torch.cat(self._dense(codes), 1) @ torch.cat([values, flags, vectors])
        lines, shares = self._lines(codes)
        if not lines.shape[1]:
            return summed
        table = torch.cat([self._at_edges(steps), levels])
        return summed + functional.embedding_bag(lines, table, mode="sum", per_sample_weights=shares)

    def _at_edges(self, steps: Tensor) -> Tensor:
        """Return the sum of the step weights up to each edge, [edges of all numbers, outputs]."""
        zero = steps.new_zeros(1, steps.shape[1])
        # One cumulative sum runs over all numbers, then each number subtracts the sum at its first edge. The
        # sums of earlier numbers cancel, and in float32 they would leave rounding errors behind: use float64.
        sums = torch.cat([steps, zero])[self.line_steps].double().cumsum(0)
        return (sums - sums[self.line_starts]).float()

    def _lines(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the table lines that each row adds up, and their weights, both [batch, lines of a row].

        A number uses the edges below and above it. A missing number uses its first edge, where the sum is 0.
        """
        places = codes[:, self.number_columns].clamp(min=0)
        below = torch.minimum(places.floor(), (self.value_lasts - 1).clamp(min=0))
        share = (places - below).clamp(0, 1)
        line = below.long() + self.value_starts
        above = torch.minimum(line + 1, self.value_starts + self.value_lasts)
        level = codes[:, self.few_columns].long() + (self.few_starts + len(self.line_starts))
        ones = torch.ones_like(level, dtype=share.dtype)
        return torch.cat([line, above, level], 1), torch.cat([1 - share, share, ones], 1)

    def _scaled(self, places: Tensor) -> Tensor:
        """Return scaled values, interpolated between the two edges next to each code."""
        below = torch.minimum(places.clamp(min=0).floor().long(), (self.value_lasts - 1).clamp(min=0))
        left = self.values[self.value_starts + below]
        right = self.values[self.value_starts + torch.minimum(below + 1, self.value_lasts)]
        return torch.where(places < 0, self.fills, left + (right - left) * (places - below))


class Tabular(nn.Module):
    """The embedding model of a party's table.

    Args:
        inputs: the column that each code belongs to.
        width: the width of the embedding.
        hidden: the units of each hidden layer.
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
    """Return whether the model is being exported, or per-record gradients are being computed.

    torch.export and torch.func do not support embedding_bag.
    """
    return torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(codes)


Part = tuple[slice, Sequence[nn.Linear]]  # affine layers on some columns of a head's input


class HeadInUnit(nn.Module):
    """A head whose outputs are scaled to the unit of the labels, in a regression.

    Without that, labels far from 1 would take many steps to reach.

    Attributes:
        centre: added to the outputs: the mean of the training labels.
        unit: multiplies the outputs: the deviation of the training labels.
    """

    centre: Tensor
    unit: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("unit", torch.ones(()))

    def _in_unit(self, outputs: Tensor) -> Tensor:
        return self.centre + self.unit * outputs

    def measure(self, labels: Tensor) -> None:
        """Set the centre and unit of a regression's outputs from its training labels.

        They are the mean and standard deviation after winsorising: the highest and lowest 0.5 % of the
        labels, at least one at each end, are clipped to the nearest remaining label. Otherwise a single wrong
        label of 10^9 would set the unit, and the model could not tell the other labels apart.
        """
        ordered = labels.double().sort().values
        cut = math.ceil(_EXTREME * len(ordered))
        inner = ordered[cut : len(ordered) - cut]
        clipped = ordered.clamp(inner[0], inner[-1]) if len(inner) else ordered
        # If all labels but the extremes are equal, as with rare payments, only the extremes give a unit.
        unit = float(clipped.std(correction=0)) or float(ordered.std(correction=0)) or 1.0
        self.centre.fill_(float(clipped.mean()))
        self.unit.fill_(unit)


class TabularHead(HeadInUnit):
    """A small network on the embeddings, with a parallel linear path."""

    def __init__(self, inputs: int, outputs: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.network = network([inputs, *hidden], outputs)
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, embeddings: Tensor) -> Tensor:
        """[batch, inputs] -> [batch, outputs]."""
        return self._in_unit(self.network(embeddings) + self.linear(embeddings))

    def in_two_parts(self) -> tuple[list[Part], Callable[[Sequence[Tensor]], Tensor]]:
        """Return the affine layers on the input, and a function from their outputs to those of the head."""
        first, later = cast("nn.Linear", self.network[0]), self.network[1:]
        sizes = [first.out_features, self.linear.out_features]

        def rest(values: Sequence[Tensor]) -> Tensor:
            hidden, straight = torch.split(values[0], sizes, 1)
            return self._in_unit(later(hidden) + straight)

        return [(slice(None), [first, self.linear])], rest


def network(sizes: Sequence[int], width: int) -> nn.Sequential:
    """Return affine layers with SiLU and dropout between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.SiLU(), Dropout(_DROPPED)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], width))


class Dropout(nn.Module):
    """Like nn.Dropout, with a private generator, so that a run depends on its seed and not on global state.

    The generator's seed is drawn from torch's global generator when the module is made. The run seeds that
    one first. A copy or a pickle starts its masks again from the seed.
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
        return values * kept.to(values.device) / (1 - self._share)  # the generator is one of the CPU

    def __getstate__(self) -> dict[str, object]:
        """Leave out the generator, which cannot be pickled; __setstate__ makes it from the seed."""
        return {name: value for name, value in self.__dict__.items() if name != "_generator"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._generator = torch.Generator().manual_seed(self._seed)


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return the start of each of several blocks with these sizes, laid end to end."""
    return [sum(sizes[:place]) for place in range(len(sizes))]
