"""The perturbed objective of a run as one function of all its parameters: for whoever measures it."""

from copy import deepcopy

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from vafl.models.losses import LOSSES
from vafl.plan import Plan
from vafl.privacy.secant import FixedNoise
from vafl.protocol.gradients import pull_back


class Objective:
    """F(theta_1..theta_M, theta_0): mean loss under fixed noise, and the clients' regularisers.

    It works on copies of the plan's models.

    Args:
        rows: how many of the training rows, evenly spread, it is a mean over.
        draws: of the noise, for each of them.
    """

    def __init__(self, plan: Plan, rows: int, draws: int) -> None:
        self._plan, models, self._head = plan, deepcopy(plan.models), deepcopy(plan.head)
        chosen = torch.linspace(0, plan.data.rows - 1, min(rows, plan.data.rows)).long()
        self.features = [party.train.index_select(0, chosen) for party in plan.data.parties]
        self._labels = plan.data.train_labels.index_select(0, chosen).repeat(draws)
        pairs = zip(models, self.features, strict=True)
        self._clients = [FixedNoise(model, plan.config.privacy, own, draws) for model, own in pairs]
        self._regularised = sum(p.numel() for model in models for p in model.parameters())
        self._parameters = [p.requires_grad_() for m in (*models, self._head) for p in m.parameters()]

    @property
    def here(self) -> Tensor:
        """All parameters as they are."""
        return parameters_to_vector(self._parameters).detach().clone()

    def gradient(self, theta: Tensor) -> Tensor:
        """At theta, which the copies take on."""
        vector_to_parameters(theta, self._parameters)
        outputs, slopes = self._evaluate()
        found = pull_back(outputs, slopes / len(slopes), self._parameters)
        flat = torch.cat([part.flatten() for part in found])
        flat[: self._regularised] += self._plan.config.optimiser.l2 * theta[: self._regularised]
        return flat

    def largest_slope(self) -> float:
        """Of the loss with respect to the outputs, over the rows."""
        return float(self._evaluate()[1].norm(dim=1).max())

    def _evaluate(self) -> tuple[Tensor, Tensor]:
        parts = [client() for client in self._clients]
        summed = self._plan.config.model.combine == "sum"
        outputs = self._head(torch.stack(parts).sum(0) if summed else torch.cat(parts, dim=1))
        return outputs, LOSSES[self._plan.task.loss](outputs.detach(), self._labels)[1]
