"""Moving parameters down their gradients: plain SGD, or any optimiser of torch.optim."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from vafl.errors import ConfigError
from vafl.protocol.settings import OptimiserSettings
from vafl.protocol.stepsizes import StepSize


class Descent:
    """Steps a fixed list of parameters.

    Args:
        parameters: the tensors to move, in place; those that are frozen are left out.
        step_size: a function of the global iteration.
        optimiser: makes a torch optimiser from the list; None is SGD without its overhead, which is more
            than a small model's arithmetic.
        momentum: of SGD, as torch.optim.SGD means it.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        step_size: StepSize,
        optimiser: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
        momentum: float = 0.0,
    ) -> None:
        if not momentum >= 0:
            raise ValueError(f"momentum must be 0 or more. Found {momentum}")
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._values = [parameter.detach() for parameter in self.parameters]  # the same memory, no graph
        self._step_size = step_size
        if optimiser is None and not all(value.is_contiguous() for value in self._values):
            optimiser = partial(torch.optim.SGD, lr=1.0, momentum=momentum)  # the fused step cannot see that
        self._optimiser = optimiser(self.parameters) if optimiser and self.parameters else None
        self._momentum = momentum
        plain = self._optimiser is None  # else it keeps its own
        self._velocities = [torch.zeros_like(value) for value in self._values] if momentum and plain else []

    @classmethod
    def of(cls, settings: OptimiserSettings, parameters: Iterable[Tensor], *, server: bool = False) -> Self:
        """As the settings say, for the head or for a client's model."""
        optimiser = None
        if not settings.is_plain:
            kind = _optimiser_class(settings.name)
            optimiser = partial(kind, lr=settings.own_step_size(server=server), **settings.options)
        return cls(parameters, settings.step_sizes(server=server), optimiser, settings.momentum)

    def step(self, gradients: Sequence[Tensor], iteration: int) -> None:
        """One step along `gradients`, one for each parameter, at global iteration `iteration`."""
        step_size = self._step_size(iteration)
        if self._optimiser is not None:
            self._step_optimiser(self._optimiser, gradients, step_size)
            return
        if len(gradients) != len(self._values):
            raise ValueError(f"{len(self._values)} gradients are needed. Found {len(gradients)}")
        if self._values:
            self._move([gradient.contiguous() for gradient in gradients], step_size)

    def _move(self, gradients: list[Tensor], step_size: float) -> None:
        torch._fused_sgd_(
            self._values,
            gradients,
            self._velocities,
            weight_decay=0.0,
            momentum=self._momentum,
            lr=step_size,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def _step_optimiser(
        self, optimiser: torch.optim.Optimizer, gradients: Sequence[Tensor], step_size: float
    ) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        for group in optimiser.param_groups:
            group["lr"] = step_size
        optimiser.step()

    def state(self) -> dict[str, Any]:
        """What the optimiser remembers between steps (empty for plain SGD)."""
        if self._optimiser is not None:
            return self._optimiser.state_dict()
        return {"velocities": self._velocities} if self._velocities else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes back what `state` gave."""
        if self._optimiser is not None:
            self._optimiser.load_state_dict(state)
        for velocity, kept in zip(self._velocities, state.get("velocities", ()), strict=True):
            velocity.copy_(kept)


def try_once(settings: OptimiserSettings) -> None:
    """Steps a single number once.

    Raises:
        ConfigError: torch.optim has no such class, or it cannot step with these options.
    """
    _optimiser_class(settings.name)
    try:
        Descent.of(settings, [torch.zeros(1, requires_grad=True)]).step([torch.ones(1)], 0)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f'optimiser.name "{settings.name}" with options {settings.options} cannot step: {error}. '
            "Take another class of torch.optim, or other [optimiser.options]."
        ) from error


def _optimiser_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    name = "SGD" if name == "sgd" else name
    found = getattr(torch.optim, name, None)
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
        near = get_close_matches(name, dir(torch.optim), 1) or ["sgd"]
        raise ConfigError(
            f'optimiser.name must be "sgd" or a class of torch.optim. Found "{name}". '
            f'Did you mean "{near[0]}"?'
        )
    return found
