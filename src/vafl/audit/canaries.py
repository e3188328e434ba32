"""Audit a private client with canaries: records that are easy to detect, each included by a fair coin toss.

An attacker observes everything that the client sends and guesses every coin. If the client is mu-GDP, the
best possible test guesses a coin correctly with probability at most Phi(mu/2). So the share of correct
guesses proves a lower bound on mu, independent of what the client claims. If the lower bound exceeds the
claimed mu, the claim is broken.

The best test is known for linear embeddings only. The audit therefore uses a linear client, whatever model is
configured. Its clipping, noise, updates, ledger, refresh and local steps are the code of a real run.
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

from vafl.arrays import Doubles, Matrix, RowIds
from vafl.config import Config
from vafl.privacy.ledger.accounts import KINDS
from vafl.privacy.ledger.ledger import Ledger
from vafl.privacy.mechanism.client_privacy import ClientPrivacy, protect
from vafl.privacy.settings import UNLIMITED, PrivacySettings
from vafl.protocol.client import Client
from vafl.protocol.descent import Descent
from vafl.protocol.messages import ClientMessage, Evaluate, Gradient, Refresh, Upload
from vafl.protocol.settings import RuleSettings
from vafl.protocol.stepsizes import constant
from vafl.run.assembly import make_refresh, make_schedule

AUDITED = (
    "a linear client of canaries with the configured mode, clip, noise, neighbours and local steps (one for "
    "extreme slopes); the mechanism audit also uses the configured schedule kind and refresh. Not audited: "
    "the configured model, its layer noise, its batch size and the secure sum"
)
_CONFIDENCE = 0.95
_LOOKS = 2  # consecutive alarms that count as a broken claim
_LOUD = 1e3  # norm of a canary's embedding, in multiples of clip and noise: the clip always takes effect
_STEP_SIZE = 1.0
_TOGETHER = 1000  # the most canaries of one client; each canary needs one feature
_BATCHES = 4  # minibatches per pass over the canaries
_CLEAR = 0.9  # stop once the claimed mu is this large: canaries are most informative for mu near 1
_MOST_ROUNDS = 100
_PROBING = 3  # target signal-to-noise ratio of the probes, in multiples of the claim
_MOST_PROBES = 1000
_MOST_CANARIES = 10**6  # the largest number of canaries that the audit recommends
_LARGEST, _SMALLEST = float(np.finfo(np.float32).max), 2.0**-149  # of float32
_ROUNDED_UP = 0.51 * _SMALLEST  # float32 rounds this up to _SMALLEST, which is almost twice as large


@dataclass(frozen=True)
class Finding:
    """The result of one audit.

    Attributes:
        claimed: the accountant's mu, an upper bound on the leak.
        found: the audit's lower bound on mu, with 95 % confidence.
        accuracy: the share of coins that the audit guessed correctly.
        accuracy_at_half: the expected accuracy if the client added half the noise it claims.
    """

    name: str
    claimed: float
    found: float
    accuracy: float
    accuracy_at_half: float
    canaries: int

    @property
    def power(self) -> float:
        """The probability that the audit would detect a client with half the claimed noise."""
        return self._power(self.canaries)

    @property
    def verdict(self) -> str:
        """`broken`, `holds` or `cannot tell`.

        `holds` requires a power of at least 0.5: the audit would probably have detected half the noise.
        """
        if self.found > self.claimed:
            return "broken"
        return "holds" if self.power >= 0.5 else "cannot tell"

    @property
    def canaries_needed(self) -> int:
        """About how many canaries reach a power of 0.5; 0 if a million do not."""
        count = 100
        while self._power(count) < 0.5:
            count += count // 10
            if count > _MOST_CANARIES:
                return 0
        return count

    def _power(self, canaries: int) -> float:
        """Return the power with this many canaries, for `_LOOKS` independent alarms in a row."""
        # The most correct guesses that raise no alarm, if the claim is true.
        quiet = binom.isf(1 - _CONFIDENCE, canaries, ndtr(self.claimed / 2))
        return float(binom.sf(quiet, canaries, self.accuracy_at_half)) ** _LOOKS


def lower_bound(right: int, of: int) -> float:
    """Return the mu that `right` correct guesses `of` all prove, by the Clopper-Pearson lower bound."""
    chance = float(beta.ppf(1 - _CONFIDENCE, right, of - right + 1)) if right else 0.0
    return max(0.0, 2 * float(ndtri(chance)))


def confirmed(look: Callable[[], Finding]) -> Finding:
    """Repeat an audit that raises an alarm, and return its last result.

    A bound with 95 % confidence accuses an honest client in 5 % of all audits. Two alarms in a row are rare
    enough (0.25 %) to report.
    """
    for _ in range(_LOOKS):
        finding = look()
        if finding.verdict != "broken":
            break
    return finding


def audit_mechanism(config: Config, used: PrivacySettings, canaries: int = 1000, clients: int = 2) -> Finding:
    """Guess the canaries' coins from all their uploads and from all updates of the model.

    Args:
        config: holds the claimed privacy settings, which the accountant uses.
        used: the privacy settings that the client really uses. Tests pass less noise than claimed.
        canaries: the number of canaries, which is the number of coins.
        clients: the number of clients in the run. A refresh may look ahead to their batches.
    """
    coins = _toss(canaries)
    if used.protection.noises_features:
        scored = [_score_release(config.privacy, used, tosses) for tosses in coins]
    else:
        scored = [_score_rounds(config, used, tosses, clients) for tosses in coins]
    costs = np.concatenate([cost for _, cost in scored])
    at_half = float(ndtr(np.sqrt(costs)).mean())  # half the noise doubles mu: Phi(2 mu / 2)
    guesses = [score > 0 for score, _ in scored]
    return _finding(f"mechanism, {used.kind}", _claim(costs), guesses, coins, at_half)


def _toss(canaries: int) -> list[Tensor]:
    """Toss a coin for each canary; return one tensor per client."""
    coins = torch.from_numpy(np.random.default_rng().integers(0, 2, canaries))
    return list(coins.tensor_split(-(-canaries // _TOGETHER)))


def _claim(costs: Doubles) -> float:
    """Return the largest mu that correct guesses may prove, if each canary was charged its mu^2 in `costs`.

    The canaries' costs differ, so this is the mu of their average accuracy, and never more than the largest.
    """
    average = 2 * float(ndtri(ndtr(np.sqrt(costs) / 2).mean()))
    return min(average, math.sqrt(costs.max()))


def _finding(
    name: str, claimed: float, guesses: list[Tensor], coins: list[Tensor], at_half: float
) -> Finding:
    hits = torch.cat(guesses) == torch.cat(coins).bool()
    right, canaries = int(hits.sum()), len(hits)
    return Finding(name, claimed, lower_bound(right, canaries), right / canaries, at_half, canaries)


def _presence(settings: PrivacySettings, coins: Tensor) -> Tensor:
    """Return each canary's scale: 0 or 1 for neighbours `zero_out`, -1 or 1 for `replace`."""
    return coins.float() if settings.neighbours == "zero_out" else 2 * coins.float() - 1


def _middle(settings: PrivacySettings, norm: float) -> float:
    """Return the midpoint between the two values that a canary can show."""
    return norm / 2 if settings.neighbours == "zero_out" else 0.0


def _score_release(claimed: PrivacySettings, used: PrivacySettings, coins: Tensor) -> tuple[Tensor, Doubles]:
    """Return each canary's score, positive if its coin looks like 1, and its claimed cost in mu^2."""
    features = torch.zeros(len(coins), 2)
    features[:, 0] = _LOUD * used.clip * _presence(used, coins)
    records = np.arange(len(coins))
    private = protect(used, nn.Linear(2, 2), features, Ledger.in_memory(len(coins)), records)
    score = private.features[:, 0] - _middle(claimed, claimed.clip)
    return score, np.full(len(coins), claimed.upload_cost)


def _score_rounds(
    config: Config, used: PrivacySettings, coins: Tensor, clients: int
) -> tuple[Tensor, Doubles]:
    """Return each canary's log-likelihood ratio from all that was observed, and its claimed cost in mu^2."""
    claimed, steps, count = config.privacy, config.rule.local_steps, len(coins)
    config = replace(config, schedule=replace(config.schedule, batch_size=-(-count // _BATCHES)))
    client, private = _client(config, used, torch.diag(_presence(used, coins)), count, clients)
    slope = -1e9 if used.protection.noises_updates else 0.0  # large, so that the gradient clip takes effect
    score = torch.zeros(count, dtype=torch.float64)
    for activation in range(1, _MOST_ROUNDS * _BATCHES + 1):
        (upload,) = client.wake()
        moved, refreshed = _answer(client, private, upload, clients, slope)
        for rows, embeddings in map(_embedded, (upload, *refreshed)):
            seen = torch.from_numpy(embeddings[:, 0] - _middle(claimed, claimed.clip)).double()
            score[rows] += seen * _weight(claimed.upload_cost, claimed.noise)
        if used.protection.noises_updates:
            rows, _ = _embedded(upload)
            summed = (moved[rows] - steps * _middle(claimed, claimed.gradient_clip)).double()
            score[rows] += summed * _weight(claimed.update_cost, claimed.gradient_noise)
        if activation % _BATCHES == 0 and _claim(_costs(private, claimed, steps)) >= _CLEAR:
            break
    return score, _costs(private, claimed, steps)


def _costs(private: ClientPrivacy, claimed: PrivacySettings, local_steps: int) -> Doubles:
    """Return the claimed mu^2 of all uploads that the ledger has counted: [canaries]."""
    counts = private.budget.ledger.counts.astype(np.float64)
    batches = counts[KINDS.index("batch")]
    others = counts.sum(0) - batches
    costs: Doubles = batches * claimed.batch_cost(local_steps) + others * claimed.upload_cost
    return costs


def _weight(cost: float, deviation: float) -> float:
    """Return sensitivity over variance: the weight of one observation in the log-likelihood ratio."""
    return math.sqrt(cost) / deviation


def _client(
    config: Config, settings: PrivacySettings, features: Tensor, training_rows: int, clients: int
) -> tuple[Client, ClientPrivacy]:
    """Make a client whose model maps canary i's feature i to a large first coordinate.

    The second coordinate has weight 0 at first. Updates move it, so it shows what the model has learnt.
    """
    rows, columns = features.shape
    model = nn.Linear(columns, 2, bias=False)
    with torch.no_grad():
        model.weight.zero_()
        model.weight[0] = _LOUD * max(settings.clip, settings.gradient_clip, settings.gradient_noise)
    limits = replace(settings, mu_max=settings.mu_max and UNLIMITED, ledger="")
    steps = config.rule.local_steps
    private = protect(limits, model, features, Ledger.in_memory(rows), np.arange(rows), steps)
    schedules = [make_schedule(config, training_rows, index) for index in range(clients)]
    client = Client(
        0,
        private.features,
        private.model,
        Descent(private.model.parameters(), constant(_STEP_SIZE)),
        schedules[0],
        make_refresh(config, 0, schedules),
        RuleSettings(local_steps=steps),
        embed_batch=private.updates,
        perturb=private.release,
        budget=private.budget,
    )
    # The client scales down a gradient that is far larger than earlier ones. A malicious server evades that
    # limit by increasing its gradients slowly. The audit starts with the limit already at its maximum, so
    # that only the clip protects the canaries.
    client.gradient_limit.usual = _LARGEST
    return client, private


def _answer(
    client: Client, private: ClientPrivacy, upload: ClientMessage, clients: int, slope: float
) -> tuple[Tensor, list[ClientMessage]]:
    """Answer an upload with gradient `slope` on the second coordinate.

    The first coordinate fills the clip of the upload. The second one does not, so its gradient reaches the
    model unchanged.

    Returns:
        The sum of gradients of each canary, as the update of the weights shows it, and the client's messages.
    """
    rows, embeddings = _embedded(upload)
    weight = next(private.model.parameters())
    before = weight[1].detach().clone()
    slopes = np.zeros_like(embeddings)
    slopes[:, 1] = slope
    activation = client.activation - 1
    messages = client.receive(Gradient(0, activation, activation, slopes, (client.activation,) * clients))
    return (weight[1].detach() - before) * len(rows) / _STEP_SIZE, messages


def audit_model_channel(config: Config, used: PrivacySettings, canaries: int = 1000) -> Finding:
    """Look for canaries in the uploads of other records: public probes with the same feature.

    A canary's gradient moves the weight of its feature, and a probe's embedding shows that weight. The server
    may request probes until their own noise averages out, so only noise on the updates can hide the canary.
    The claim is therefore the cost of the updates. `embed_only` noises no updates and must fail: its claim is
    sqrt(T_n) Delta/c.
    """
    claimed, steps, noises_updates = config.privacy, config.rule.local_steps, used.protection.noises_updates
    cost = steps * claimed.update_cost if noises_updates else claimed.upload_cost
    rounds = max(1, min(_MOST_ROUNDS, round(1 / cost)))
    claim, coins = math.sqrt(rounds * cost), _toss(canaries)
    shown = used.clip / 2  # size of a moved weight in a probe's embedding, small enough not to be clipped
    asked = min(_MOST_PROBES, math.ceil((_PROBING * claim * used.noise / shown) ** 2))
    # The guesses see the noise of the averaged probes and, if updates are noised, the noise of the updates.
    clarity = shown * math.sqrt(asked) / used.noise * (1 if used.neighbours == "zero_out" else 2)
    at_half = 1 / math.hypot(1 / clarity, 1 / (2 * claim) if noises_updates else 0.0)
    guesses = [_probe(config, used, tosses, rounds, asked) > _middle(used, shown) for tosses in coins]
    return _finding(f"model channel, {used.kind}", claim, guesses, coins, float(ndtr(at_half / 2)))


def _probe(config: Config, used: PrivacySettings, coins: Tensor, rounds: int, asked: int) -> Tensor:
    """Train on the canaries for `rounds` rounds; return the mean of `asked` answers per probe: [canaries]."""
    canaries, steps, noises_updates = len(coins), config.rule.local_steps, used.protection.noises_updates
    shown = used.clip / 2
    sum_of_gradients = steps * (used.gradient_clip if noises_updates else 1.0)
    moved = rounds * _STEP_SIZE * sum_of_gradients / canaries  # how far a present canary moves its weight
    features = torch.cat([torch.diag(_presence(used, coins)), torch.eye(canaries) * shown / moved])
    config = replace(config, schedule=replace(config.schedule, batch_size=canaries, refresh="none"))
    client, private = _client(config, used, features, canaries, 1)
    for _ in range(rounds):
        with torch.no_grad():
            # Keep the first coordinate at 0, so that the upload is not clipped and the gradient passes it.
            next(private.model.parameters())[0] = 0.0
        (upload,) = client.wake()
        _answer(client, private, upload, 1, -1e9 if noises_updates else -1 / canaries)
    probes, seen = np.arange(canaries, 2 * canaries), torch.zeros(canaries, dtype=torch.float64)
    for number in range(asked):
        (refresh,) = client.receive(Evaluate(0, number, probes))
        seen += torch.from_numpy(_embedded(refresh)[1][:, 1]).double() / asked
    return seen


def audit_extreme_slopes(config: Config, used: PrivacySettings, canaries: int = 1000) -> Finding:
    """Guess coins from the updates of a `dp_train` client whose server sends slopes at the limits of float32.

    Each pair of slope and feature would make one intermediate result of the clip almost twice as large if the
    client computed the clip in float32. Return the finding of the worst pair. The claim is the cost of the
    updates alone.
    """
    clip, batch = used.gradient_clip, min(canaries, _TOGETHER)
    pairs = (
        (_LARGEST, clip / (_ROUNDED_UP * batch * _LARGEST)),  # float32 would round up the clip factor
        (1.0, clip / (_ROUNDED_UP * batch)),  # float32 would round up the clipped slope
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
    """Guess the coins of canaries with this feature from the updates after gradients with this slope."""
    claimed = config.privacy
    rounds = max(1, min(_MOST_ROUNDS, round(1 / claimed.update_cost)))
    claim, coins = math.sqrt(rounds * claimed.update_cost), _toss(canaries)
    middle = rounds * _middle(claimed, claimed.gradient_clip)
    guesses = [_updated(config, used, tosses, rounds, slope, feature) > middle for tosses in coins]
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
    client, private = _client(config, used, torch.diag(feature * _presence(used, coins)), count, 1)
    moved = torch.zeros(count, dtype=torch.float64)
    for _ in range(rounds):
        with torch.no_grad():
            # With weights of 0 the upload is not clipped, so the slope passes the clip unchanged.
            next(private.model.parameters()).zero_()
        (upload,) = client.wake()
        moved += _answer(client, private, upload, 1, -slope)[0]
    return moved


def _embedded(message: ClientMessage) -> tuple[RowIds, Matrix]:
    """Return the rows and embeddings of an upload or a refresh."""
    if not isinstance(message, Upload | Refresh):
        raise TypeError(f"a canary client must send an Upload or a Refresh. Found {type(message).__name__}.")
    return message.rows, message.embeddings
