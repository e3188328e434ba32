"""The objective F of a run (equation 1), in float64 on all training rows, as the theorems define it."""

from copy import deepcopy

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from vafl.models.losses import LOSSES
from vafl.run.assembly import Run


class Objective:
    """F = the mean loss over the training rows + the regularisers, at any vector of parameters.

    `optimiser.l2` regularises the clients' models; a `weight_decay` among the optimiser's options
    regularises the head, too.
    """

    def __init__(self, run: Run) -> None:
        self._models = [deepcopy(model).double() for model in run.models]
        self._head = deepcopy(run.head).double()
        modules = [*self._models, self._head]
        self._parameters = [parameter for module in modules for parameter in module.parameters()]
        self._features = [party.features[run.data.train].double() for party in run.data.parties]
        self._labels, self._loss = run.data.labels[run.data.train], LOSSES[run.task.loss]
        self._weights = np.full(run.data.rows, 1 / run.data.rows)
        self._summed = run.config.model.combine == "sum"
        decay = float(run.config.optimiser.options.get("weight_decay", 0.0))
        coefficients = [run.config.optimiser.l2 + decay] * len(self._models) + [decay]
        self._decays = [
            coefficient
            for module, coefficient in zip(modules, coefficients, strict=True)
            for _ in module.parameters()
        ]

    def __call__(self, point: Tensor) -> tuple[float, Tensor]:
        """Return F and its gradient at a vector of parameters."""
        vector_to_parameters(point, self._parameters)
        value, gradients = self._value()
        return value, parameters_to_vector(gradients)

    def outputs(self, point: Tensor) -> Tensor:
        """Return the head's outputs for all training rows, [rows, outputs]."""
        vector_to_parameters(point, self._parameters)
        with torch.no_grad():
            return self._forward()

    def minimise(self, start: Tensor) -> Tensor:
        """Return the minimiser of a convex F, by L-BFGS, to a gradient of about 1e-9."""
        vector_to_parameters(start, self._parameters)
        solver = torch.optim.LBFGS(
            self._parameters,
            max_iter=2000,
            tolerance_grad=1e-10,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )

        def closure() -> float:
            value, gradients = self._value()
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            return value

        solver.step(closure)  # type: ignore[no-untyped-call]
        return parameters_to_vector(self._parameters).detach().clone()

    def curvature(self, point: Tensor, rounds: int = 10, reach: float = 1e-3) -> float:
        """Return the largest secant |grad F(x') - grad F(x)| / |x' - x| that power iteration finds near x."""
        _, here = self(point)
        direction, largest = here / here.norm(), 0.0
        for _ in range(rounds):
            change = (self(point + reach * direction)[1] - here) / reach
            largest = max(largest, float(change.norm()))
            direction = change / change.norm()
        return largest

    def _forward(self) -> Tensor:
        parts = [model(own) for model, own in zip(self._models, self._features, strict=True)]
        inputs = torch.stack(parts).sum(0) if self._summed else torch.cat(parts, dim=1)
        outputs: Tensor = self._head(inputs)
        return outputs

    def _value(self) -> tuple[float, list[Tensor]]:
        """Return F and its gradient w.r.t. each parameter, at the current parameters."""
        outputs = self._forward()
        value, slopes = self._loss(outputs.detach().numpy(), self._labels.numpy(), self._weights)
        gradients = torch.autograd.grad(outputs, self._parameters, torch.from_numpy(slopes))
        steps = list[Tensor]()
        for gradient, decay, parameter in zip(gradients, self._decays, self._parameters, strict=True):
            value += decay / 2 * float(parameter.detach().square().sum())
            steps.append(gradient.add(parameter.detach(), alpha=decay))
        return value, steps
