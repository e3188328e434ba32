"""Canaries: records made to be found, each present or not by a fair coin.

Whoever tells a mechanism's two worlds apart by mu-GDP's best test is right with probability Phi(mu/2) at
most. So the share of coins guessed right gives a lower bound on mu, whatever the mechanism claims.
The canaries go through the client that a run uses: its perturbation, its noised updates, its schedule.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.special import ndtri
from scipy.stats import beta
from torch import Tensor, nn

from vafl.privacy.accounts import KINDS
from vafl.privacy.guard import Guard, guard
from vafl.privacy.ledger import Ledger
from vafl.privacy.settings import PrivacySettings
from vafl.protocol.client import Client
from vafl.protocol.descent import Descent
from vafl.protocol.messages import Gradient, Refresh, Request, Upload
from vafl.protocol.schedule import BatchSchedule, NoRefresh
from vafl.protocol.settings import RuleSettings
from vafl.protocol.stepsizes import constant

_CONFIDENCE = 0.95
_LOUD = 1e3  # of the canaries' embeddings: far beyond any clip
_STEP_SIZE = 1.0
_BATCHES = 4  # that the canaries are uploaded in
_PROBING = 3  # how much clearer than the claim probes are to show a weight


@dataclass(frozen=True)
class Finding:
    """What an audit found.

    Attributes:
        claimed: the accountant's mu: no more than this may leak.
        found: the audit's lower bound on mu, with 95 % confidence.
    """

    name: str
    claimed: float
    found: float
    accuracy: float
    canaries: int

    @property
    def passed(self) -> bool:
        return self.found <= self.claimed


def lower_bound(right: int, of: int) -> float:
    """The mu that so many right guesses prove, by Clopper and Pearson's bound on their probability."""
    chance = float(beta.ppf(1 - _CONFIDENCE, right, of - right + 1)) if right else 0.0
    return max(0.0, 2 * float(ndtri(chance)))


def audit_mechanism(
    claimed: PrivacySettings, used: PrivacySettings, canaries: int = 1000, rounds: int = 4
) -> Finding:
    """Watches every upload of the canaries, and every update of the model, as their noise lets it.

    Args:
        claimed: what the accountant believes.
        used: what the client does; another noise than claimed must be found out.
        canaries: how many; each is one fair coin.
        rounds: how often each is uploaded.
    """
    coins = torch.from_numpy(np.random.default_rng().integers(0, 2, canaries))
    if used.kind == "release_once":
        score, claim = _score_release(claimed, used, coins)
    else:
        score, claim = _score_rounds(claimed, used, coins, rounds)
    right = int(((score > 0) == coins.bool()).sum())
    return Finding(f"mechanism, {used.kind}", claim, lower_bound(right, canaries), right / canaries, canaries)


def _presence(settings: PrivacySettings, coins: Tensor) -> Tensor:
    """What a canary is scaled by: there or not; or, for neighbours that replace, one way or the other."""
    return coins.float() if settings.neighbours == "zero_out" else 2 * coins.float() - 1


def _middle(settings: PrivacySettings, norm: float) -> float:
    """Half way between a canary's two worlds."""
    return norm / 2 if settings.neighbours == "zero_out" else 0.0


def _score_release(claimed: PrivacySettings, used: PrivacySettings, coins: Tensor) -> tuple[Tensor, float]:
    features = torch.zeros(len(coins), 2)
    features[:, 0] = _LOUD * _presence(used, coins)
    records = np.arange(len(coins))
    own = guard(used, nn.Linear(2, 2), features, Ledger.in_memory(len(coins)), records)
    return own.features[:, 0] - _middle(claimed, claimed.clip), claimed.upload_cost**0.5


def _score_rounds(
    claimed: PrivacySettings, used: PrivacySettings, coins: Tensor, rounds: int
) -> tuple[Tensor, float]:
    """The log-likelihood ratio of all that was seen of each canary."""
    count = len(coins)
    client, own = _client(used, torch.diag(_presence(used, coins)), count, count // _BATCHES)
    score = torch.zeros(count, dtype=torch.float64)
    for _ in range(rounds * _BATCHES):
        (upload,) = client.wake()
        rows, seen, moved = _answer(client, own, upload)
        score[rows] += (seen - _middle(claimed, claimed.clip)).double() * _weight(
            claimed.upload_cost, claimed.noise
        )
        if used.kind == "dp_train":
            score[rows] += (moved - _middle(claimed, claimed.gradient_clip)).double() * _weight(
                claimed.update_cost, claimed.gradient_noise
            )
    ledger = own.budget.ledger
    uses = int(ledger.counts[KINDS.index("batch")].max())
    return score, math.sqrt(uses * claimed.batch_cost())


def _weight(cost: float, deviation: float) -> float:
    """Sensitivity over variance: how much one observation says."""
    return math.sqrt(cost) / deviation


def _client(
    settings: PrivacySettings, features: Tensor, training_rows: int, batch: int
) -> tuple[Client, Guard]:
    """A client whose canary i has feature i, which its model turns into a loud first coordinate."""
    rows, columns = features.shape
    model = nn.Linear(columns, 2, bias=False)
    with torch.no_grad():
        model.weight.zero_()
        model.weight[0] = _LOUD
    limits = replace(settings, mu_max=0.0, ledger="")
    own = guard(limits, model, features, Ledger.in_memory(rows), np.arange(rows))
    client = Client(
        0,
        own.features,
        own.model,
        Descent(own.model.parameters(), constant(_STEP_SIZE)),
        BatchSchedule("epochs", training_rows, batch, seed=0, stream=0),
        NoRefresh(),
        RuleSettings(),
        embed_batch=own.updates,
        perturb=own.release,
        budget=own.budget,
    )
    return client, own


def _answer(client: Client, own: Guard, upload: object, slope: float = -1e9) -> tuple[Tensor, Tensor, Tensor]:
    """Answers an upload with a steep second slope: (rows, first coordinates, sums of their gradients).

    The second coordinate is out of the clip's way, so the gradient reaches the model in full.
    """
    if not isinstance(upload, Upload):
        raise TypeError(f"a canary's client uploads its batches. Found {type(upload).__name__}.")
    weight = next(own.model.parameters())
    before = weight[1].detach().clone()
    slopes = torch.zeros_like(upload.embeddings)
    slopes[:, 1] = slope
    client.receive(Gradient(0, upload.activation, upload.activation, slopes, (client.activation,)))
    moved = (weight[1].detach() - before) * len(upload.rows) / _STEP_SIZE
    return upload.rows, upload.embeddings[:, 0], moved[upload.rows]


def audit_model_channel(
    claimed: PrivacySettings, used: PrivacySettings, canaries: int = 1000, rounds: int = 4
) -> Finding:
    """Looks for canaries in other records' uploads: those of public probes with the same feature.

    A canary's gradient moves the weight of its feature; a probe's embedding shows that weight, and the
    server may ask for probes until their own noise is gone. Noise on uploads alone does not hide a canary
    then, so `embed_only` must fail under the claim sqrt(T_n) Delta/c.
    """
    claim = math.sqrt(rounds * claimed.batch_cost())
    coins = torch.from_numpy(np.random.default_rng().integers(0, 2, canaries))
    sum_of_gradients = used.gradient_clip if used.kind == "dp_train" else 1.0
    moved = rounds * _STEP_SIZE * sum_of_gradients / canaries  # a weight, by a canary that is there
    shown = used.clip / 2  # of that in a probe's embedding, out of the clip's way
    features = torch.cat([torch.diag(_presence(used, coins)), torch.eye(canaries) * shown / moved])
    client, own = _client(used, features, canaries, canaries)
    for _ in range(rounds):
        with torch.no_grad():
            next(own.model.parameters())[0] = 0.0  # quiet: the gradient passes the clip in full
        (upload,) = client.wake()
        _answer(client, own, upload, slope=-1e9 if used.kind == "dp_train" else -1 / canaries)
    probes, seen = torch.arange(canaries, 2 * canaries), torch.zeros(canaries, dtype=torch.float64)
    asked = math.ceil((_PROBING * claim * used.noise / shown) ** 2)
    for number in range(asked):
        (refresh,) = client.receive(Request(0, number, probes))
        seen += _embeddings(refresh)[:, 1].double() / asked
    right = int(((seen > _middle(used, shown)) == coins.bool()).sum())
    name = f"model channel, {used.kind}"
    return Finding(name, claim, lower_bound(right, canaries), right / canaries, canaries)


def _embeddings(message: object) -> Tensor:
    if not isinstance(message, Upload | Refresh):
        raise TypeError(f"a canary's client uploads. Found {type(message).__name__}.")
    return message.embeddings
