"""Moving parameters down their gradients: plain SGD, or any optimiser of torch.optim."""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vafl.errors import ConfigError
from vafl.protocol.stepsizes import SCHEDULES, StepSize, constant


@dataclass(frozen=True)
class OptimiserSettings:
    """How every party steps.

    Attributes:
        name: `sgd`, or a class of torch.optim (`Adam`, `AdamW`, ...).
        step_size: eta_m, the clients' step size.
        server_step_size: eta_0, the head's; 0 means the same as `step_size`.
        schedule: `constant`, or a schedule of vafl.protocol.stepsizes.
        constants: the constants that schedule needs, by the paper's names.
        options: more arguments for the optimiser, e.g. { momentum = 0.9 }.
        l2: the clients' regulariser r(theta_m) = l2/2 |theta_m|^2.
    """

    name: str = "sgd"
    step_size: float = 0.1
    server_step_size: float = 0.0
    schedule: str = "constant"
    constants: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    l2: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.step_size < math.inf:
            raise ConfigError(f"optimiser.step_size must be above 0. Found {self.step_size}.")
        if not 0 <= self.server_step_size < math.inf:
            raise ConfigError(
                "optimiser.server_step_size must be above 0, or 0 to take step_size. "
                f"Found {self.server_step_size}."
            )
        if not 0 <= self.l2 < math.inf:
            raise ConfigError(f"optimiser.l2 must be 0 or more. Found {self.l2}.")
        self._try_once()

    def _try_once(self) -> None:
        """Steps a single number once, so that a wrong option fails here and not in the middle of a run."""
        step_size, make = self._schedule(self.step_size), self._maker(self.step_size)
        try:
            parameters = [torch.zeros(1, requires_grad=True)]
            Descent(parameters, step_size, make, self._momentum).step([torch.ones(1)], 0)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f'optimiser.name "{self.name}" with options {self.options} cannot step: {error}. '
                "Take another class of torch.optim, or other [optimiser.options]."
            ) from error

    def _maker(self, step_size: float) -> Callable[[list[Tensor]], torch.optim.Optimizer] | None:
        kind = self._torch_class()
        return None if kind is None else lambda listed: kind(listed, lr=step_size, **self.options)

    @property
    def _is_plain(self) -> bool:
        """SGD, with momentum or without, needs nothing of torch.optim."""
        return self.name == "sgd" and self.options.keys() <= {"momentum"}

    def _torch_class(self) -> Callable[..., torch.optim.Optimizer] | None:
        if self._is_plain:
            return None
        name = "SGD" if self.name == "sgd" else self.name
        found = getattr(torch.optim, name, None)
        if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
            near = get_close_matches(name, dir(torch.optim), 1) or ["sgd"]
            raise ConfigError(
                f'optimiser.name must be "sgd" or a class of torch.optim. Found "{self.name}". '
                f'Did you mean "{near[0]}"?'
            )
        return found

    def _schedule(self, step_size: float) -> StepSize:
        if self.schedule == "constant":
            return constant(step_size)
        if self.schedule not in SCHEDULES:
            raise ConfigError(
                f"optimiser.schedule must be constant or one of {', '.join(SCHEDULES)}. "
                f'Found "{self.schedule}".'
            )
        make = SCHEDULES[self.schedule]
        try:
            inspect.signature(make).bind(**self.constants)
            return make(**self.constants)
        except TypeError as error:
            needs = ", ".join(inspect.signature(make).parameters)
            raise ConfigError(
                f'optimiser.schedule "{self.schedule}" takes the constants {needs}: {error}. '
                "Put them into [optimiser.constants]."
            ) from None

    def descent(self, parameters: Iterable[Tensor], *, server: bool = False) -> "Descent":
        """A descent over these parameters, for the head or for a client's model."""
        step_size = self.server_step_size if server and self.server_step_size else self.step_size
        return Descent(parameters, self._schedule(step_size), self._maker(step_size), self._momentum)

    @property
    def _momentum(self) -> float:
        return self.options.get("momentum", 0.0) if self._is_plain else 0.0


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
        self._velocities = [torch.zeros_like(value) for value in self._values] if momentum else []

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
