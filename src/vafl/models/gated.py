"""A head that decides for each record how much each party counts."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn

from vafl.models.tabular import HeadInUnit, Part, network

# A gate has to close before the head has learnt to use the noise behind it, so it moves faster than the other
# parameters. From 3 on, large steps of Adam leave gates stuck at 0 or 2, and regressions are not learnt.
_STEEPNESS = 2.0


class GatedHead(HeadInUnit):
    """A tabular head on gated embeddings: a small network on their sum, with a parallel linear path.

    Each embedding is projected to a common width. A gate, computed from the same embedding, scales the
    projection, from 0 (ignored) to 2; all gates start at 1. So the head can ignore a party whose embedding
    is noise, always or for some records, and the embedding that a party sends for records it does not have.

    Args:
        widths: the embedding width of each party.
        outputs: the number of outputs.
        hidden: the units of each hidden layer.
    """

    def __init__(self, widths: Sequence[int], outputs: int, hidden: Sequence[int]) -> None:
        super().__init__()
        ends = accumulate(widths)
        self._columns = [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]
        # The common width has the input of the network and of the linear path, and the score of the gate.
        self._sizes = [hidden[0] if hidden else outputs, outputs, 1]
        self.parties = nn.ModuleList(nn.Linear(width, sum(self._sizes)) for width in widths)
        self.network = network([1, *hidden], outputs)[1:]  # the projection is its first layer
        bound = sum(widths) ** -0.5  # as for one layer on all embeddings
        for layer in self._layers:
            nn.init.uniform_(layer.weight, -bound, bound)
            nn.init.uniform_(layer.bias, -bound, bound)
            nn.init.zeros_(layer.weight[-1:])
            nn.init.zeros_(layer.bias[-1:])

    @property
    def _layers(self) -> list[nn.Linear]:
        return cast("list[nn.Linear]", list(self.parties))

    def forward(self, embeddings: Tensor) -> Tensor:
        """[batch, sum of widths] -> [batch, outputs]."""
        return self._combine(self._project(embeddings))

    def gates(self, embeddings: Tensor) -> Tensor:
        """Return the gate of each party for each row, [batch, parties], from 0 to 2."""
        return _gates(self._project(embeddings))

    def in_two_parts(self) -> tuple[list[Part], Callable[[Sequence[Tensor]], Tensor]]:
        """Return the affine layers on each embedding, and a function from their outputs to the head's."""
        layers = [(columns, [layer]) for columns, layer in zip(self._columns, self._layers, strict=True)]
        return [*layers], self._combine

    def _project(self, embeddings: Tensor) -> list[Tensor]:
        pairs = zip(self._columns, self._layers, strict=True)
        return [layer(embeddings[:, columns]) for columns, layer in pairs]

    def _combine(self, projected: Sequence[Tensor]) -> Tensor:
        """Return the outputs, [batch, outputs], from each party's projection and score."""
        gates = _gates(projected)
        gated = [gates[:, party, None] * values for party, values in enumerate(projected)]
        hidden, straight, _ = torch.split(torch.stack(gated).sum(0), self._sizes, 1)
        return self._in_unit(self.network(hidden) + straight)


def _gates(projected: Sequence[Tensor]) -> Tensor:
    return 2 * torch.sigmoid(_STEEPNESS * torch.stack([values[:, -1] for values in projected], 1))
