"""Moving parameters down their gradients, by a step size that may follow the global iteration."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
from torch import Tensor

from vafl.protocol.optimisers import SGD, Optimiser, make_optimiser
from vafl.protocol.rows import Array
from vafl.protocol.settings import OptimiserSettings
from vafl.protocol.stepsizes import StepSize
from vafl.protocol.tensors import as_arrays


class Descent:
    """Steps a fixed list of parameters.

    Args:
        parameters: the tensors to move, in place; those that are frozen are left out.
        step_size: a function of the global iteration.
        optimiser: makes what moves them from the list.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        step_size: StepSize,
        optimiser: Callable[[Sequence[Tensor]], Optimiser] = SGD,
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._step_size = step_size
        self._optimiser = optimiser(self.parameters) if self.parameters else None

    @classmethod
    def of(cls, settings: OptimiserSettings, parameters: Iterable[Tensor], *, server: bool = False) -> Self:
        """As the settings say, for the head or for a client's model."""
        return cls(parameters, settings.step_sizes(server=server), partial(make_optimiser, settings))

    def step(self, gradients: Sequence[Array], iteration: int, *, l2: float = 0.0) -> None:
        """One step along `gradients`, one for each parameter, at global iteration `iteration`; and along that
        of l2/2 |parameters|^2."""
        if len(gradients) != len(self.parameters):
            raise ValueError(f"{len(self.parameters)} gradients are needed. Found {len(gradients)}")
        if l2:  # not in place: autograd may give one tensor for two parameters
            pairs = zip(gradients, as_arrays(self.parameters), strict=True)
            gradients = [np.asarray(gradient + l2 * value) for gradient, value in pairs]
        if self._optimiser is not None:
            self._optimiser.step(gradients, self._step_size(iteration))

    def state(self) -> dict[str, Any]:
        """What the optimiser remembers between steps (nothing, for plain SGD)."""
        return {} if self._optimiser is None else self._optimiser.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state` gave."""
        if self._optimiser is not None:
            self._optimiser.restore(state)
