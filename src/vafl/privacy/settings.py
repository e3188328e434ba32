"""The [privacy] and [labels] settings: how clients protect their records, and what protects the labels.

`vafl.privacy.modes` defines what each privacy mode noises, needs, forbids and guarantees.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from vafl.errors import ConfigError
from vafl.privacy.modes import DEFAULT_PRIVATE_MODE, MODES, NOISE_SETTINGS, Mode, Protection
from vafl.scope import Scope, setting

Neighbours = Literal["zero_out", "replace"]
GUARANTEED: tuple[Mode, ...] = tuple(name for name, mode in MODES.items() if mode.guaranteed)
FEWEST_SUMMED = 3  # clients in a secure sum
UNLIMITED: Literal["unlimited"] = "unlimited"


@dataclass(frozen=True)
class PrivacySettings:
    """How every client protects its records.

    Attributes:
        mode: `release_once` clips and noises the features once, then trains on the noised features. If the
            model begins with frozen layers, it noises the outputs of those layers instead. `frozen` noises
            every upload and does not train the embedding. `dp_train` noises every upload and every local
            update. `embed_only` (the paper) noises uploads only, which guarantees next to nothing for a
            trained embedding. `none` adds no noise. `auto` means `dp_train` if `noise` is set, else `none`.
        clip: C, the largest norm of one record's noised vector. Longer vectors are scaled down to it.
        noise: c, the standard deviation of the Gaussian noise on that vector.
        gradient_clip: G, the largest norm of one record's gradient in a local update.
        gradient_noise: s, the standard deviation of the Gaussian noise on the sum of those gradients.
        neighbours: the two data sets that an observer must not be able to tell apart. `replace`: one record
            has either of any two values (sensitivity 2C). `zero_out`: the client uploads a record's values,
            or zeros instead (sensitivity C, half the mu for the same noise). No client ever uploads zeros:
            for a record that it lacks, a model still uploads its bias. Two cases that can occur are
            therefore up to twice that mu apart.
        layers: standard deviations of the noise before the hidden layers' activations: one per layer, or one
            for all. This is the paper's smoothing. It adds no privacy.
        layer_noise: the distribution of that noise.
        placement: where noise is added: before the activations, as in the paper's equation, or to the
            layers' outputs, as in its appendix.
        mu_max: the budget: the most mu that may be spent on any record, over all runs in the ledger. A client
            does not make an upload that would exceed it. `release_once`, `frozen` and `dp_train` need it.
            "unlimited" answers every request; the noise of many answers averages out.
        delta: the delta for which mu is also reported as (epsilon, delta).
        ledger: a folder for the ledgers, which every run continues. A relative path starts at the config
            file's folder. Empty stores them beside the party's data, or in the run folder if no source names
            any.
        secure_sum: clients mask their uploads, so the server learns only the sum over all clients for each
            row, never one client's embedding. Needs linear embeddings, the bias head, the sync rule, at least
            3 clients, and records that all clients have. The sum, the gradients and the final models are the
            same as without it.
    """

    mode: Literal["auto", "none", "release_once", "frozen", "dp_train", "embed_only"] = "auto"
    clip: float = 0.0
    noise: float = 0.0
    gradient_clip: float = 0.0
    gradient_noise: float = 0.0
    neighbours: Neighbours = "replace"
    layers: tuple[float, ...] = ()
    layer_noise: Literal["uniform", "gaussian"] = "uniform"
    placement: Literal["pre-activation", "output"] = "pre-activation"
    mu_max: float | Literal["unlimited"] | None = setting(None, scope=Scope.PARTY)
    delta: float = setting(1e-5, scope=Scope.PARTY)
    ledger: str = setting("", scope=Scope.PARTY, is_path=True)
    secure_sum: bool = False

    def __post_init__(self) -> None:
        for name in NOISE_SETTINGS:
            self._require_not_negative(name, getattr(self, name))
        for deviation in self.layers:
            self._require_not_negative("layers", deviation)
        if not 0 < self.delta < 1:
            raise ConfigError("VFL-5101", f"privacy.delta must be between 0 and 1. Found {self.delta}.")
        missing = [name for name in self.protection.needs if not getattr(self, name)]
        if missing:
            raise ConfigError(
                "VFL-5102",
                f"privacy.mode {self.kind} needs {', '.join(f'privacy.{name}' for name in missing)} above 0. "
                "Run `vafl calibrate` to find values for a budget.",
            )
        self._check_unused()
        number = isinstance(self.mu_max, float | int) and 0 < self.mu_max < math.inf
        if not (number or self.mu_max is None or self.mu_max == UNLIMITED):
            raise ConfigError(
                "VFL-5106",
                f'privacy.mu_max must be a number above 0, or "{UNLIMITED}". Found {self.mu_max!r}.',
            )

    def check_budget(self) -> None:
        """Check that a mode with a guarantee has a budget.

        Without one, a server could request one record until the noise of the answers averages out.

        Raises:
            ConfigError: there is none. A party without records needs none, so the constructor allows it.
        """
        if self.protection.guaranteed and self.mu_max is None:
            raise ConfigError(
                "VFL-5105",
                f"privacy.mode {self.kind} needs a budget: privacy.mu_max, the most mu that may be spent on "
                "one record. Found none. `vafl calibrate` prints a [privacy] section for a budget. Set "
                f'privacy.mu_max = "{UNLIMITED}" to answer every request, no matter how often the server '
                "requests a record.",
            )

    def check_clients(self, clients: int) -> None:
        """Raise ConfigError if a secure sum has too few clients to hide each one's part."""
        if self.secure_sum and clients < FEWEST_SUMMED:
            raise ConfigError(
                "VFL-5103",
                f"privacy.secure_sum needs at least {FEWEST_SUMMED} clients: in a sum of two, a client that "
                f"learns the sum can subtract its own part. Found {clients}. Split the columns among more "
                "clients, or remove privacy.secure_sum.",
            )

    @staticmethod
    def _require_not_negative(name: str, value: float) -> None:
        if not 0 <= value < math.inf:
            raise ConfigError("VFL-5104", f"privacy.{name} must be 0 or more. Found {value}.")

    def _check_unused(self) -> None:
        """Refuse settings that have no effect in this mode: a user who sets them expects protection."""
        unused = [f"privacy.{name}" for name in self.protection.forbids if getattr(self, name)]
        if unused:
            raise ConfigError(
                "VFL-5107",
                f"privacy.mode {self.kind} makes no use of {', '.join(unused)}. Remove it, or choose another "
                f"privacy.mode. The modes with a guarantee for every record are {', '.join(GUARANTEED)}.",
            )

    @property
    def kind(self) -> Mode:
        """The mode, with `auto` resolved."""
        if self.mode != "auto":
            return self.mode
        return DEFAULT_PRIVATE_MODE if self.noise else "none"

    @property
    def protection(self) -> Protection:
        """What the mode noises, needs, forbids and guarantees."""
        return MODES[self.kind]

    @property
    def limit(self) -> float:
        """The most mu that may be spent on one record; infinite without a budget."""
        return math.inf if self.mu_max is None or self.mu_max == UNLIMITED else self.mu_max

    @property
    def upload_cost(self) -> float:
        """The mu^2 that one upload of a record costs that record; infinite without a clip or noise."""
        return _cost(self._sensitivity(self.clip), self.noise)

    @property
    def update_cost(self) -> float:
        """The mu^2 that one noised local update costs each record in its batch."""
        return _cost(self._sensitivity(self.gradient_clip), self.gradient_noise)

    @property
    def carried_cost(self) -> float:
        """The mu^2 that one upload costs every other record that the embedding was trained on without noise.

        The sensitivity is 2C for both kinds of neighbours, because the weights may move an upload between any
        two points of the clip ball. The cost is exact for `zero_out`. For `replace` it is pessimistic: the
        ledger's entries count four times there.
        """
        if not self.protection.carries_records:
            return 0.0
        return _cost(2 * self.clip or math.inf, self.noise)

    def batch_cost(self, local_steps: int = 1) -> float:
        """Return the mu^2 that a minibatch costs each of its records: an upload and `local_steps` updates."""
        return self.upload_cost + (local_steps * self.update_cost if self.protection.noises_updates else 0.0)

    @property
    def clips_apart(self) -> int:
        """The largest distance between the uploads of two neighbours, in multiples of the clip: 1 or 2."""
        return 1 if self.neighbours == "zero_out" else 2

    def _sensitivity(self, norm: float) -> float:
        return self.clips_apart * norm if norm else math.inf


@dataclass(frozen=True)
class LabelSettings:
    """What protects the training labels.

    Attributes:
        epsilon: the epsilon of randomised response: each label is kept with probability
            e^epsilon/(e^epsilon + k - 1), else replaced by another of the k classes. 0 uses the true labels.
            Evaluations always use the true labels of held-out rows. Clients do not receive the results, but
            they notice when a run ends and, with stop.patience, which evaluations were the best so far.
        file: the file that stores the randomised labels. Runs that share it spend epsilon once in total;
            every other run spends it again. Empty stores them in the server's state in the run folder; a
            simulation then does not store them.
        gradient_clip: the largest norm of each row of the gradients that the server returns. 0 does not clip.
            This is a heuristic without a guarantee.
        gradient_noise: the standard deviation of the Gaussian noise on the gradients that the server returns.
            0 adds no noise. This is a heuristic without a guarantee.
    """

    epsilon: float = 0.0
    file: str = setting("", is_path=True)
    gradient_clip: float = 0.0
    gradient_noise: float = 0.0

    def __post_init__(self) -> None:
        for name in ("epsilon", "gradient_clip", "gradient_noise"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ConfigError("VFL-5108", f"labels.{name} must be 0 or more. Found {value}.")
        if self.file and not self.epsilon:
            raise ConfigError(
                "VFL-5109",
                f'labels.file stores the labels of randomised response. Found "{self.file}" with '
                "labels.epsilon = 0. Set labels.epsilon, or remove labels.file.",
            )

    @property
    def leak(self) -> str:
        """A warning about unprotected labels; empty if randomised response protects them."""
        if self.epsilon:
            return ""
        return (
            "gradients reveal the training labels to every client: vafl audit recovers all of them. To "
            "protect the labels of a classification with randomised response, set labels.epsilon (it is 0)"
        )

    def check_classes(self, classes: int) -> None:
        """Raise ConfigError if randomised response is configured for a regression (`classes` is 0)."""
        if self.epsilon and not classes:
            raise ConfigError(
                "VFL-5110",
                "labels.epsilon needs a classification: randomised response replaces a class by another. "
                f"Found {self.epsilon} with a regression. Set it to 0, or group the labels into classes.",
            )

    def report(self, classes: int) -> dict[str, Any]:
        """Return the label settings for a run's summary."""
        kept = keep_probability(self.epsilon, classes) if self.epsilon else 1.0
        return {
            "epsilon": self.epsilon or None,
            "kept_with_probability": kept,
            "file": self.file or None,
            "heuristics": {"gradient_clip": self.gradient_clip, "gradient_noise": self.gradient_noise},
        }


def keep_probability(epsilon: float, classes: int) -> float:
    """Return the probability of keeping a label: e^epsilon / (e^epsilon + classes - 1).

    The formula is divided by e^epsilon, so that a large epsilon does not overflow.
    """
    return 1 / (1 + (classes - 1) * math.exp(-epsilon))


def _cost(sensitivity: float, deviation: float) -> float:
    """Return the mu^2 of one release of the Gaussian mechanism."""
    return (sensitivity / deviation) ** 2 if deviation else math.inf
