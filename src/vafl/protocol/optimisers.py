"""What moves parameters along their gradients.

SGD is a loop of ours, and Adam torch's own fused kernel, called without torch.optim: its way there costs
more than a small model's arithmetic at every step, and a second and 80 MB at the first. Any other is a class
of torch.optim.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vafl import kernels
from vafl.errors import ConfigError
from vafl.protocol.rows import Array
from vafl.protocol.settings import OptimiserSettings


class Optimiser(Protocol):
    """Moves a fixed list of parameters, in place."""

    def step(self, gradients: Sequence[Array], step_size: float) -> None:
        """One step along `gradients`, one for each parameter."""

    def state(self) -> dict[str, Any]:
        """What it remembers between steps."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state` gave."""


def make_optimiser(settings: OptimiserSettings, parameters: Sequence[Tensor]) -> Optimiser:
    """The optimiser that the settings name.

    Raises:
        ConfigError: torch.optim has no such class.
        TypeError, ValueError: its options are none that it takes.
    """
    if all(own.is_contiguous() and own.dtype == torch.float32 for own in parameters):  # else kernels cannot
        if settings.is_plain:
            return SGD(parameters, settings.momentum)
        if settings.name in ("Adam", "AdamW") and settings.options.keys() <= {"betas", "eps", "weight_decay"}:
            return Adam(parameters, decoupled=settings.name == "AdamW", **settings.options)
    return OfTorch(parameters, _class(settings.name), settings.step_size, settings.options)


class SGD:
    """As torch.optim.SGD, with momentum or without."""

    def __init__(self, parameters: Sequence[Tensor], momentum: float = 0.0) -> None:
        self._values = [value.numpy() for value in _memory(parameters)]
        self._momentum = momentum
        self._velocities = [np.zeros_like(value) for value in self._values] if momentum else []

    def step(self, gradients: Sequence[Array], step_size: float) -> None:
        for place, gradient in enumerate(gradients if self._velocities else ()):
            self._velocities[place] *= self._momentum
            self._velocities[place] += gradient
        for place, move in enumerate(self._velocities or gradients):
            kernels.descend(self._values[place], np.ascontiguousarray(move, np.float32), step_size)

    def state(self) -> dict[str, Any]:
        return {"velocities": [torch.from_numpy(own) for own in self._velocities]} if self._velocities else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        for velocity, kept in zip(self._velocities, state.get("velocities", ()), strict=True):
            velocity[...] = kept.numpy()


class Adam:
    """As torch.optim.Adam; with `decoupled` weight decay as AdamW. Its state is laid out as theirs."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        decoupled: bool = False,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
    ) -> None:
        decay = (0.01 if decoupled else 0.0) if weight_decay is None else weight_decay
        first, second = betas
        if not (0 <= first < 1 and 0 <= second < 1 and eps >= 0 and decay >= 0):
            raise ValueError(
                "betas must be from 0 to below 1, eps and weight_decay 0 or more. "
                f"Found {list(betas)}, {eps} and {decay}"
            )
        self._values = _memory(parameters)
        self._means = [torch.zeros_like(value) for value in self._values]
        self._squares = [torch.zeros_like(value) for value in self._values]
        self._steps = torch.zeros(())
        self._kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        self._betas, self._eps, self._decay = (first, second), eps, decay

    def step(self, gradients: Sequence[Array], step_size: float) -> None:
        self._steps += 1
        self._kernel(
            self._values,
            [torch.from_numpy(gradient).contiguous() for gradient in gradients],
            self._means,
            self._squares,
            [],
            [self._steps] * len(self._values),
            lr=step_size,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=self._decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
        )

    def state(self) -> dict[str, Any]:
        return {
            "state": {
                place: {"step": self._steps.clone(), "exp_avg": mean, "exp_avg_sq": square}
                for place, (mean, square) in enumerate(zip(self._means, self._squares, strict=True))
            }
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for place, kept in state["state"].items():
            self._steps.copy_(kept["step"])
            self._means[place].copy_(kept["exp_avg"])
            self._squares[place].copy_(kept["exp_avg_sq"])


class OfTorch:
    """Any class of torch.optim whose steps need nothing but gradients."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        kind: Callable[..., torch.optim.Optimizer],
        step_size: float,
        options: Mapping[str, Any],
    ) -> None:
        self._parameters = parameters
        self._optimiser = kind(parameters, lr=step_size, **options)

    def step(self, gradients: Sequence[Array], step_size: float) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = torch.from_numpy(gradient).to(parameter.dtype)
        for group in self._optimiser.param_groups:
            group["lr"] = step_size
        self._optimiser.step()

    def state(self) -> dict[str, Any]:
        return self._optimiser.state_dict()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._optimiser.load_state_dict(dict(state))


def try_once(settings: OptimiserSettings) -> None:
    """Steps a single number once.

    Raises:
        ConfigError: torch.optim has no such class, or it cannot step with these options.
    """
    try:
        make_optimiser(settings, [torch.zeros(1, requires_grad=True)]).step([np.ones(1, np.float32)], 0.1)
    except ConfigError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            "VFL-4051",
            f'optimiser.name "{settings.name}" with options {settings.options} cannot step: {error}. '
            "Take another class of torch.optim, or other [optimiser.options].",
        ) from error


def _memory(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The same, without a graph."""
    return [parameter.detach() for parameter in parameters]


def _class(name: str) -> Callable[..., torch.optim.Optimizer]:
    name = "SGD" if name == "sgd" else name
    found = getattr(torch.optim, name, None)
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
        near = get_close_matches(name, dir(torch.optim), 1) or ["sgd"]
        raise ConfigError(
            "VFL-4052",
            f'optimiser.name must be "sgd" or a class of torch.optim. Found "{name}". '
            f'Did you mean "{near[0]}"?',
        )
    return found
