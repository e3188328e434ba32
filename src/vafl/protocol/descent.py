"""Gradient descent on a list of parameters, with a step size that may depend on the global iteration."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from vafl.arrays import Array
from vafl.protocol.optimisers import SGD, Optimiser, make_optimiser
from vafl.protocol.settings import OptimiserSettings
from vafl.protocol.stepsizes import StepSize
from vafl.protocol.tensors import as_arrays

_RECENT = 10  # the average covers roughly the last tenth of all steps
_LONGEST = 500  # the average covers roughly this many steps at most


class Average:
    """Keeps the running average of a module's parameters in another module.

    The average of the recent steps predicts better than any single one of them, because the noise of the
    minibatches cancels. Training continues from `trained`; `kept` is evaluated and saved.

    The two modules share their buffers, so evaluations use the statistics that layers collect in training.
    They share frozen parameters, so a checkpoint restores those of both.

    Attributes:
        kept: the module with the averaged parameters.
        trained: the module that is trained.
        steps: how many steps were averaged.
    """

    def __init__(self, kept: nn.Module) -> None:
        frozen = [parameter for parameter in kept.parameters() if not parameter.requires_grad]
        shared: dict[int, Any] = {id(tensor): tensor for tensor in (*kept.buffers(), *frozen)}
        self.kept, self.trained = kept, deepcopy(kept, shared)
        self.steps = 0
        pairs = zip(self.trained.parameters(), kept.parameters(), strict=True)
        moving = [(new.data, mean.data) for new, mean in pairs if new.requires_grad]
        self._new, self._mean = [new for new, _ in moving], [mean for _, mean in moving]

    def add(self) -> None:
        """Add the current parameters to the average, after a step."""
        weight = max(1 / _LONGEST, _RECENT / (_RECENT + self.steps))
        self.steps += 1
        if self._mean:
            torch._foreach_lerp_(self._mean, self._new, weight)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, which stores `kept` separately."""
        return {"steps": self.steps, "trained": [tensor.clone() for tensor in self._new]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state` returned."""
        self.steps = state["steps"]
        for parameter, saved in zip(self._new, state["trained"], strict=True):
            parameter.copy_(saved)


class Descent:
    """Steps a fixed list of parameters.

    Args:
        parameters: the tensors to update in place. Frozen ones are left out.
        step_size: a function of the global iteration.
        optimiser: creates the optimiser for a list of parameters.
        average: the running average of the parameters, or None.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        step_size: StepSize,
        optimiser: Callable[[Sequence[Tensor]], Optimiser] = SGD,
        average: Average | None = None,
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._step_size, self.average = step_size, average
        self._optimiser = optimiser(self.parameters) if self.parameters else None

    @classmethod
    def of(cls, settings: OptimiserSettings, parameters: Iterable[Tensor], *, server: bool = False) -> Self:
        """Return the descent that the settings describe, for the head (`server`) or a client's model."""
        return cls(parameters, settings.step_sizes(server=server), partial(make_optimiser, settings))

    @classmethod
    def averaging(cls, settings: OptimiserSettings, model: nn.Module, *, server: bool = False) -> Self:
        """Return a descent that trains a copy of the model, and makes the model the average of the copy."""
        average = Average(model)
        step_sizes, optimiser = settings.step_sizes(server=server), partial(make_optimiser, settings)
        return cls(average.trained.parameters(), step_sizes, optimiser, average)

    def trains(self, model: nn.Module) -> nn.Module:
        """Return the module that is trained: the model, or its copy if the model is an average."""
        return model if self.average is None else self.average.trained

    def step(self, gradients: Sequence[Array], iteration: int, *, l2: float = 0.0) -> None:
        """Make one step down the gradients, plus the gradient of l2/2 |parameters|^2.

        Args:
            gradients: one per parameter.
            iteration: the global iteration, which determines the step size.
            l2: coefficient of the regulariser.
        """
        if len(gradients) != len(self.parameters):
            raise ValueError(f"{len(self.parameters)} gradients are needed. Found {len(gradients)}.")
        if l2:
            # Not in place: autograd may return the same tensor as the gradient of two parameters.
            pairs = zip(gradients, as_arrays(self.parameters), strict=True)
            gradients = [np.asarray(gradient + l2 * value) for gradient, value in pairs]
        if self._optimiser is not None:
            self._optimiser.step(gradients, self._step_size(iteration))
        if self.average is not None:
            self.average.add()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: empty for plain SGD without an average."""
        state = {} if self._optimiser is None else self._optimiser.state()
        return state if self.average is None else {"optimiser": state, "average": self.average.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state` returned."""
        if self.average is not None:
            self.average.restore(state["average"])
            state = state["optimiser"]
        if self._optimiser is not None:
            self._optimiser.restore(state)
