"""Canaries: records made to be found, each present or not by a fair coin.

Whoever tells a mechanism's two worlds apart by mu-GDP's best test is right with probability Phi(mu/2) at
most. So the share of coins guessed right gives a lower bound on mu, whatever the mechanism claims.

Only a linear embedding has a best test that is known, so the canaries have a linear client whatever the
configured model: its perturbation, noised updates, ledger, refresh and local steps are those of a run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom
from torch import Tensor, nn

from vafl.config import Config
from vafl.privacy.ledger.accounts import KINDS, Floats
from vafl.privacy.ledger.ledger import Ledger
from vafl.privacy.mechanism.client_privacy import ClientPrivacy, guard
from vafl.privacy.settings import UNLIMITED, PrivacySettings
from vafl.protocol.client import Client
from vafl.protocol.descent import Descent
from vafl.protocol.messages import ClientMessage, Evaluate, Gradient, Refresh, Upload
from vafl.protocol.rows import Matrix, Rows
from vafl.protocol.settings import RuleSettings
from vafl.protocol.stepsizes import constant
from vafl.run.assembly import make_refresh, make_schedule

AUDITED = (
    "a linear client of canaries with the configured mode, clip, noise, neighbours and local steps (one, for "
    "extreme slopes), and for the mechanism the kind of schedule and the refresh; not the configured model, "
    "its layers' noise, its batch size or a secure sum"
)
_CONFIDENCE = 0.95
_LOOKS = 2  # alarms in a row that make a claim broken
_LOUD = 1e3  # how far beyond clip and noise the canaries' embeddings are
_STEP_SIZE = 1.0
_TOGETHER = 1000  # canaries of one client, whose features are as many
_BATCHES = 4  # that the canaries are uploaded in
_CLEAR = 0.9  # canaries tell most for mu near 1
_MOST_ROUNDS = 100
_PROBING = 3  # how much clearer than the claim probes are to show a weight
_MOST_PROBES = 1000
_MOST_CANARIES = 10**6  # that it makes sense to ask for
_LARGEST, _SMALLEST = float(np.finfo(np.float32).max), 2.0**-149  # float32
_ROUNDED_UP = 0.51 * _SMALLEST  # a number that float32 makes almost twice as large


@dataclass(frozen=True)
class Finding:
    """What an audit found.

    Attributes:
        claimed: the accountant's mu: no more than this may leak.
        found: the audit's lower bound on mu, with 95 % confidence.
        accuracy: the share of coins guessed right.
        accuracy_at_half: the share to expect of a client with half the noise it claims.
    """

    name: str
    claimed: float
    found: float
    accuracy: float
    accuracy_at_half: float
    canaries: int

    @property
    def power(self) -> float:
        """The probability that half the noise is noticed."""
        return self._power(self.canaries)

    @property
    def verdict(self) -> str:
        """`broken`; or `holds`, if the audit would rather have noticed half the noise; else `cannot tell`."""
        if self.found > self.claimed:
            return "broken"
        return "holds" if self.power >= 0.5 else "cannot tell"

    @property
    def canaries_needed(self) -> int:
        """About how many would tell; 0 if a million would not."""
        count = 100
        while self._power(count) < 0.5:
            count += count // 10
            if count > _MOST_CANARIES:
                return 0
        return count

    def _power(self, canaries: int) -> float:
        """Of as many alarms in a row as it takes."""
        most = binom.isf(1 - _CONFIDENCE, canaries, ndtr(self.claimed / 2))  # guessed right without alarm
        return float(binom.sf(most, canaries, self.accuracy_at_half)) ** _LOOKS


def lower_bound(right: int, of: int) -> float:
    """The mu that so many right guesses prove, by Clopper and Pearson's bound on their probability."""
    chance = float(beta.ppf(1 - _CONFIDENCE, right, of - right + 1)) if right else 0.0
    return max(0.0, 2 * float(ndtri(chance)))


def confirmed(look: Callable[[], Finding]) -> Finding:
    """A bound that holds 95 times in 100 fails 5 times for an honest client: alarms are looked at again."""
    for _ in range(_LOOKS):
        finding = look()
        if finding.verdict != "broken":
            break
    return finding


def audit_mechanism(config: Config, used: PrivacySettings, canaries: int = 1000, clients: int = 2) -> Finding:
    """Watches every upload of the canaries, and every update of the model, as their noise lets it.

    Args:
        config: its privacy settings are what the accountant believes.
        used: what the client does; another noise than claimed must be found out.
        canaries: how many; each is one fair coin.
        clients: of the run, whose batches a refresh may look ahead to.
    """
    coins = _toss(canaries)
    if used.kind == "release_once":
        scored = [_score_release(config.privacy, used, own) for own in coins]
    else:
        scored = [_score_rounds(config, used, own, clients) for own in coins]
    costs = np.concatenate([own for _, own in scored])
    at_half = float(ndtr(np.sqrt(costs)).mean())  # twice the mu
    guesses = [score > 0 for score, _ in scored]
    return _finding(f"mechanism, {used.kind}", _claim(costs), guesses, coins, at_half)


def _toss(canaries: int) -> list[Tensor]:
    """A coin for each canary, by client."""
    coins = torch.from_numpy(np.random.default_rng().integers(0, 2, canaries))
    return list(coins.tensor_split(-(-canaries // _TOGETHER)))


def _claim(costs: Floats) -> float:
    """The mu that a share of right guesses may prove, of canaries that were charged so much mu^2 each."""
    average = 2 * float(ndtri(ndtr(np.sqrt(costs) / 2).mean()))
    return min(average, math.sqrt(costs.max()))


def _finding(
    name: str, claimed: float, guesses: list[Tensor], coins: list[Tensor], at_half: float
) -> Finding:
    hits = torch.cat(guesses) == torch.cat(coins).bool()
    right, canaries = int(hits.sum()), len(hits)
    return Finding(name, claimed, lower_bound(right, canaries), right / canaries, at_half, canaries)


def _presence(settings: PrivacySettings, coins: Tensor) -> Tensor:
    """What a canary is scaled by: there or not; or, for neighbours that replace, one way or the other."""
    return coins.float() if settings.neighbours == "zero_out" else 2 * coins.float() - 1


def _middle(settings: PrivacySettings, norm: float) -> float:
    """Half way between a canary's two worlds."""
    return norm / 2 if settings.neighbours == "zero_out" else 0.0


def _score_release(claimed: PrivacySettings, used: PrivacySettings, coins: Tensor) -> tuple[Tensor, Floats]:
    features = torch.zeros(len(coins), 2)
    features[:, 0] = _LOUD * used.clip * _presence(used, coins)
    records = np.arange(len(coins))
    own = guard(used, nn.Linear(2, 2), features, Ledger.in_memory(len(coins)), records)
    score = own.features[:, 0] - _middle(claimed, claimed.clip)
    return score, np.full(len(coins), claimed.upload_cost)


def _score_rounds(
    config: Config, used: PrivacySettings, coins: Tensor, clients: int
) -> tuple[Tensor, Floats]:
    """The log-likelihood ratio of all that was seen of each canary, and what that cost it."""
    claimed, steps, count = config.privacy, config.rule.local_steps, len(coins)
    config = replace(config, schedule=replace(config.schedule, batch_size=-(-count // _BATCHES)))
    client, own = _client(config, used, torch.diag(_presence(used, coins)), count, clients)
    score = torch.zeros(count, dtype=torch.float64)
    for activation in range(1, _MOST_ROUNDS * _BATCHES + 1):
        (upload,) = client.wake()
        moved, refreshed = _answer(client, own, upload, clients, -1e9 if used.kind == "dp_train" else 0.0)
        for rows, embeddings in map(_embedded, (upload, *refreshed)):
            seen = torch.from_numpy(embeddings[:, 0] - _middle(claimed, claimed.clip)).double()
            score[rows] += seen * _weight(claimed.upload_cost, claimed.noise)
        if used.kind == "dp_train":
            rows, _ = _embedded(upload)
            summed = (moved[rows] - steps * _middle(claimed, claimed.gradient_clip)).double()
            score[rows] += summed * _weight(claimed.update_cost, claimed.gradient_noise)
        if activation % _BATCHES == 0 and _claim(_costs(own, claimed, steps)) >= _CLEAR:
            break
    return score, _costs(own, claimed, steps)


def _costs(own: ClientPrivacy, claimed: PrivacySettings, local_steps: int) -> Floats:
    """[canaries], the mu^2 that is claimed for all their uploads, as the ledger has counted them."""
    counts = own.budget.ledger.counts.astype(np.float64)
    batches = counts[KINDS.index("batch")]
    others = counts.sum(0) - batches
    costs: Floats = batches * claimed.batch_cost(local_steps) + others * claimed.upload_cost
    return costs


def _weight(cost: float, deviation: float) -> float:
    """Sensitivity over variance: how much one observation says."""
    return math.sqrt(cost) / deviation


def _client(
    config: Config, settings: PrivacySettings, features: Tensor, training_rows: int, clients: int
) -> tuple[Client, ClientPrivacy]:
    """A client whose canary i has feature i, which its model turns into a loud first coordinate."""
    rows, columns = features.shape
    model = nn.Linear(columns, 2, bias=False)
    with torch.no_grad():
        model.weight.zero_()
        model.weight[0] = _LOUD * max(settings.clip, settings.gradient_clip, settings.gradient_noise)
    limits = replace(settings, mu_max=settings.mu_max and UNLIMITED, ledger="")
    steps = config.rule.local_steps
    own = guard(limits, model, features, Ledger.in_memory(rows), np.arange(rows), steps)
    schedules = [make_schedule(config, training_rows, index) for index in range(clients)]
    client = Client(
        0,
        own.features,
        own.model,
        Descent(own.model.parameters(), constant(_STEP_SIZE)),
        schedules[0],
        make_refresh(config, 0, schedules),
        RuleSettings(local_steps=steps),
        embed_batch=own.updates,
        perturb=own.release,
        budget=own.budget,
    )
    # The client scales down a gradient that is far larger than those before it. A server gets around that by
    # sending larger and larger ones, so the audit starts where such a server ends: the clip alone must hold.
    client.gradient_limit.usual = _LARGEST
    return client, own


def _answer(
    client: Client, own: ClientPrivacy, upload: ClientMessage, clients: int, slope: float
) -> tuple[Tensor, list[ClientMessage]]:
    """Answers an upload with a steep second slope: (the sums of each canary's gradients, what is said then).

    The second coordinate is out of the clip's way, so the gradient reaches the model in full.
    """
    rows, embeddings = _embedded(upload)
    weight = next(own.model.parameters())
    before = weight[1].detach().clone()
    slopes = np.zeros_like(embeddings)
    slopes[:, 1] = slope
    activation = client.activation - 1
    said = client.receive(Gradient(0, activation, activation, slopes, (client.activation,) * clients))
    return (weight[1].detach() - before) * len(rows) / _STEP_SIZE, said


def audit_model_channel(config: Config, used: PrivacySettings, canaries: int = 1000) -> Finding:
    """Looks for canaries in other records' uploads: those of public probes with the same feature.

    A canary's gradient moves the weight of its feature; a probe's embedding shows that weight, and the
    server may ask for probes until their own noise is gone. So the claim is what the updates may cost.
    Noise on uploads alone hides no canary then: `embed_only` must fail under the claim sqrt(T_n) Delta/c.
    """
    claimed, steps, trained = config.privacy, config.rule.local_steps, used.kind == "dp_train"
    cost = steps * claimed.update_cost if trained else claimed.upload_cost
    rounds = max(1, min(_MOST_ROUNDS, round(1 / cost)))
    claim, coins = math.sqrt(rounds * cost), _toss(canaries)
    shown = used.clip / 2  # of a moved weight in a probe's embedding, out of the clip's way
    asked = min(_MOST_PROBES, math.ceil((_PROBING * claim * used.noise / shown) ** 2))
    clarity = shown * math.sqrt(asked) / used.noise * (1 if used.neighbours == "zero_out" else 2)
    at_half = 1 / math.hypot(1 / clarity, 1 / (2 * claim) if trained else 0.0)
    guesses = [_probe(config, used, own, rounds, asked) > _middle(used, shown) for own in coins]
    return _finding(f"model channel, {used.kind}", claim, guesses, coins, float(ndtr(at_half / 2)))


def _probe(config: Config, used: PrivacySettings, coins: Tensor, rounds: int, asked: int) -> Tensor:
    """What probes show, asked so often, of a model trained on the canaries for so many rounds."""
    canaries, steps, trained = len(coins), config.rule.local_steps, used.kind == "dp_train"
    shown = used.clip / 2
    sum_of_gradients = steps * (used.gradient_clip if trained else 1.0)
    moved = rounds * _STEP_SIZE * sum_of_gradients / canaries  # a weight, by a canary that is there
    features = torch.cat([torch.diag(_presence(used, coins)), torch.eye(canaries) * shown / moved])
    config = replace(config, schedule=replace(config.schedule, batch_size=canaries, refresh="none"))
    client, own = _client(config, used, features, canaries, 1)
    for _ in range(rounds):
        with torch.no_grad():
            next(own.model.parameters())[0] = 0.0  # quiet: the gradient passes the clip in full
        (upload,) = client.wake()
        _answer(client, own, upload, 1, -1e9 if trained else -1 / canaries)
    probes, seen = np.arange(canaries, 2 * canaries), torch.zeros(canaries, dtype=torch.float64)
    for number in range(asked):
        (refresh,) = client.receive(Evaluate(0, number, probes))
        seen += torch.from_numpy(_embedded(refresh)[1][:, 1]).double() / asked
    return seen


def audit_extreme_slopes(config: Config, used: PrivacySettings, canaries: int = 1000) -> Finding:
    """Watches the updates of a `dp_train` client whose server sends slopes at the limits of float32.

    Each pair of slope and feature makes one number of the clip's arithmetic almost twice as large if that is
    done in float32. The result is the finding of the worst pair. The claim is the cost of the updates alone.
    """
    clip, batch = used.gradient_clip, min(canaries, _TOGETHER)
    pairs = (
        (_LARGEST, clip / (_ROUNDED_UP * batch * _LARGEST)),  # rounds up the factor that clips
        (1.0, clip / (_ROUNDED_UP * batch)),  # rounds up the slope that is left
        (_LARGEST, _LARGEST),
    )
    findings = [
        confirmed(partial(_audit_updates, config, used, canaries, slope, min(feature, _LARGEST)))
        for slope, feature in pairs
    ]
    return max(findings, key=lambda finding: finding.found)


def _audit_updates(
    config: Config, used: PrivacySettings, canaries: int, slope: float, feature: float
) -> Finding:
    """Guesses the coins of canaries with this feature from the updates that follow this slope."""
    claimed = config.privacy
    rounds = max(1, min(_MOST_ROUNDS, round(1 / claimed.update_cost)))
    claim, coins = math.sqrt(rounds * claimed.update_cost), _toss(canaries)
    middle = rounds * _middle(claimed, claimed.gradient_clip)
    guesses = [_updated(config, used, own, rounds, slope, feature) > middle for own in coins]
    return _finding(f"mechanism, {used.kind}, extreme slopes", claim, guesses, coins, float(ndtr(claim)))


def _updated(
    config: Config, used: PrivacySettings, coins: Tensor, rounds: int, slope: float, feature: float
) -> Tensor:
    """Return how far the updates of `rounds` rounds have moved each canary's weight: [canaries]."""
    count = len(coins)
    config = replace(
        config,
        schedule=replace(config.schedule, batch_size=count, refresh="none"),
        rule=replace(config.rule, local_steps=1),
    )
    client, own = _client(config, used, torch.diag(feature * _presence(used, coins)), count, 1)
    moved = torch.zeros(count, dtype=torch.float64)
    for _ in range(rounds):
        with torch.no_grad():
            next(own.model.parameters()).zero_()  # or the clip of the upload would take a part of the slope
        (upload,) = client.wake()
        moved += _answer(client, own, upload, 1, -slope)[0]
    return moved


def _embedded(message: ClientMessage) -> tuple[Rows, Matrix]:
    """The rows and embeddings of an upload or a refresh."""
    if not isinstance(message, Upload | Refresh):
        raise TypeError(f"a canary's client uploads. Found {type(message).__name__}.")
    return message.rows, message.embeddings
