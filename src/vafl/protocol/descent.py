"""Moving parameters down their gradients, by a step size that may follow the global iteration."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from vafl.protocol.optimisers import SGD, Optimiser, make_optimiser
from vafl.protocol.rows import Array
from vafl.protocol.settings import OptimiserSettings
from vafl.protocol.stepsizes import StepSize
from vafl.protocol.tensors import as_arrays

_RECENT = 10  # the average covers about the last 1/10 of all steps
_LONGEST = 500  # steps that the average covers at most, about


class Average:
    """Keeps the running average of a module's parameters in another module.

    The average of the recent steps predicts better than any single one of them, because the noise of the
    minibatches cancels. Training goes on from `trained`; `kept` is evaluated and saved.

    The two share their buffers, so what a layer counts in training is known in evaluations.

    Attributes:
        steps: how many steps are in the average.
    """

    def __init__(self, kept: nn.Module) -> None:
        self.kept, self.trained = kept, deepcopy(kept)
        self.steps = 0
        for mine, copied in zip(kept.modules(), self.trained.modules(), strict=True):
            copied._buffers.update(mine._buffers)
        pairs = zip(self.trained.parameters(), kept.parameters(), strict=True)
        moving = [(new.data, mean.data) for new, mean in pairs if new.requires_grad]
        self._new, self._mean = [new for new, _ in moving], [mean for _, mean in moving]

    def add(self) -> None:
        """Take in the parameters as they are after one more step."""
        weight = max(1 / _LONGEST, _RECENT / (_RECENT + self.steps))
        self.steps += 1
        if self._mean:
            torch._foreach_lerp_(self._mean, self._new, weight)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides `kept`."""
        return {"steps": self.steps, "trained": [tensor.clone() for tensor in self._new]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state` returned."""
        self.steps = state["steps"]
        for mine, then in zip(self._new, state["trained"], strict=True):
            mine.copy_(then)


class Descent:
    """Steps a fixed list of parameters.

    Args:
        parameters: the tensors to move, in place; those that are frozen are left out.
        step_size: a function of the global iteration.
        optimiser: makes what moves them from the list.

    Attributes:
        average: takes in the parameters after every step, or None.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        step_size: StepSize,
        optimiser: Callable[[Sequence[Tensor]], Optimiser] = SGD,
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._step_size = step_size
        self.average: Average | None = None
        self._optimiser = optimiser(self.parameters) if self.parameters else None

    @classmethod
    def of(cls, settings: OptimiserSettings, parameters: Iterable[Tensor], *, server: bool = False) -> Self:
        """As the settings say, for the head or for a client's model."""
        return cls(parameters, settings.step_sizes(server=server), partial(make_optimiser, settings))

    @classmethod
    def averaging(cls, settings: OptimiserSettings, model: nn.Module, *, server: bool = False) -> Self:
        """As `of`, and the model becomes the average of what is trained: a copy of it."""
        average = Average(model)
        made = cls.of(settings, average.trained.parameters(), server=server)
        made.average = average
        return made

    def trains(self, model: nn.Module) -> nn.Module:
        """Return the module whose parameters move: a copy of the model if it is to be their average."""
        return model if self.average is None else self.average.trained

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
        if self.average is not None:
            self.average.add()

    def state(self) -> dict[str, Any]:
        """Return what is remembered between steps: nothing, for plain SGD without an average."""
        state = {} if self._optimiser is None else self._optimiser.state()
        return state if self.average is None else {"optimiser": state, "average": self.average.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state` gave."""
        if self.average is not None:
            self.average.restore(state["average"])
            state = state["optimiser"]
        if self._optimiser is not None:
            self._optimiser.restore(state)
