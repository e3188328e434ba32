"""The noised objective of a run as one function of all its parameters, for smoothness estimates."""

import math
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from vafl.arrays import Floats
from vafl.models.losses import LOSSES
from vafl.privacy.mechanism.secant import FixedNoise
from vafl.protocol.gradients import pull_back
from vafl.run.plan import Plan


class Objective:
    """F(theta_1..theta_M, theta_0): mean loss under fixed noise, the clients' regularisers, and weight decay.

    It works on copies of the plan's models.

    Args:
        plan: the run.
        rows: the number of training rows in the mean, evenly spread.
        draws: the number of noise samples per row.
    """

    def __init__(self, plan: Plan, rows: int, draws: int) -> None:
        self._plan, models, self._head = plan, deepcopy(plan.models), deepcopy(plan.head)
        chosen = torch.linspace(0, plan.data.rows - 1, min(rows, plan.data.rows)).long()
        self.features = [party.features[chosen] for party in plan.data.parties]
        self._labels = plan.data.labels[chosen].repeat(draws)
        self._weights = _weights(plan, chosen)
        self._draws = draws
        pairs = zip(models, self.features, strict=True)
        self._clients = [FixedNoise(model, plan.config.privacy, features, draws) for model, features in pairs]
        self._regularised = sum(p.numel() for model in models for p in model.parameters())
        self._parameters = [p.requires_grad_() for m in (*models, self._head) for p in m.parameters()]

    @property
    def here(self) -> Tensor:
        """The current parameters as one vector."""
        return parameters_to_vector(self._parameters).detach().clone()

    def gradient(self, theta: Tensor) -> Tensor:
        """Return the gradient at `theta`. The copies keep these parameters."""
        vector_to_parameters(theta, self._parameters)
        outputs, slopes = self._evaluate()
        gradients = pull_back(outputs, slopes / len(slopes), self._parameters)
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        optimiser = self._plan.config.optimiser
        flat[: self._regularised] += optimiser.l2 * theta[: self._regularised]
        return flat + optimiser.decay * theta

    def strong_convexity(self) -> float:
        """Return a mu for which F is mu-strongly convex wherever no row is clipped; 0 if none is known.

        F is convex for linear embeddings that are summed under a bias head. Weight decay applies to every
        parameter, so it is a mu.

        `l2` alone is not, because it does not regularise the head's bias s. Softmax is invariant to a shift
        of all of s, and the logistic loss has almost no curvature for large outputs. The squared loss has
        curvature 2 everywhere. Let u be the clients' parameters, and x a row's features with a 1 for each
        client's bias. Then the curvature of F along (u, s) is

            l2 |u|^2 + 2 mean((x.u + s)^2) >= l2 |u|^2 + 2 (mean(x).u + s)^2,

        which is at least the smaller eigenvalue of a 2 by 2 matrix: about l2 / (M + 1) if l2 is small and the
        features have mean 0.
        """
        config = self._plan.config
        if config.embedding.model != "linear" or config.model.head != "bias":
            return 0.0
        decay, l2 = config.optimiser.decay, config.optimiser.l2
        if not l2 or self._plan.task.loss != "squared" or config.privacy.protection.noises_features:
            return decay
        means = [np.average(part.flatten(1), axis=0, weights=self._weights) for part in self.features]
        size = math.sqrt(sum(1 + float(mean @ mean) for mean in means))
        curvature = torch.tensor([[l2 + 2 * size**2, 2 * size], [2 * size, 2.0]], dtype=torch.float64)
        return decay + float(torch.linalg.eigvalsh(curvature)[0])

    def largest_slope(self) -> float:
        """Return the largest norm of the loss's gradient with respect to the outputs, over the rows."""
        return float(self._evaluate()[1].norm(dim=1).max())

    def _evaluate(self) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the loss's gradient with respect to them."""
        parts = [client() for client in self._clients]
        summed = self._plan.config.model.combine == "sum"
        outputs = self._head(torch.stack(parts).sum(0) if summed else torch.cat(parts, dim=1))
        each = np.tile(self._weights, self._draws)
        _, slopes = LOSSES[self._plan.task.loss](outputs.detach().numpy(), self._labels.numpy(), each)
        return outputs, torch.from_numpy(slopes)


def _weights(plan: Plan, chosen: Tensor) -> Floats:
    """Return the weights of the chosen rows, scaled to mean 1."""
    weights = plan.weights
    if weights is None:
        return np.ones(len(chosen), np.float32)
    chosen_weights: Floats = weights[chosen.numpy()]
    chosen_weights /= chosen_weights.mean()
    return chosen_weights
