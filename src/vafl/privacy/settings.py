"""The [privacy] and [labels] sections: what a private client does, and what protects the labels."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from vafl.errors import ConfigError
from vafl.scope import Scope, setting

Mode = Literal["none", "release_once", "frozen", "dp_train", "embed_only"]
Neighbours = Literal["zero_out", "replace"]
GUARANTEED: tuple[Mode, ...] = ("release_once", "frozen", "dp_train")  # each record has a guarantee
FEWEST_SUMMED = 3
UNLIMITED: Literal["unlimited"] = "unlimited"
_POSITIVE = ("clip", "noise", "gradient_clip", "gradient_noise")
NEEDS: dict[Mode, tuple[str, ...]] = {  # above 0
    "none": (),
    "release_once": ("clip", "noise"),
    "frozen": ("clip", "noise"),
    "dp_train": ("clip", "noise", "gradient_clip", "gradient_noise"),
    "embed_only": (),
}


@dataclass(frozen=True)
class PrivacySettings:
    """How every client protects its records.

    Attributes:
        mode: `release_once` clips and noises the features once (of a model that begins with frozen layers:
            what those make of them) and trains on that; `frozen` noises every upload of an embedding that
            is not trained; `dp_train` noises every upload and every local update; `embed_only` (the paper)
            noises uploads only, which guarantees a trained client next to nothing; `none`. `auto` is
            dp_train if `noise` is set, else none.
        clip: C, the largest norm of what is noised, for one record.
        noise: c, the standard deviation of the Gaussian noise on it.
        gradient_clip: G, the largest norm of one record's gradient in a local update.
        gradient_noise: s, the standard deviation of the Gaussian noise on the sum of those gradients.
        neighbours: which two cases must not be told apart. `replace`: one record has any two values
            (sensitivity 2C). `zero_out`: one record has its values, or zeros are uploaded for it (sensitivity
            C, half the mu for the same noise). It assumes that zeros can be uploaded, which no client does:
            for a record that it lacks, a model still uploads its bias. Two cases that can occur are up to
            twice that mu apart.
        layers: standard deviations of noise before the hidden layers' activations, one each, or one for
            all: the paper's smoothing. It earns no privacy.
        layer_noise: that noise's distribution.
        placement: whether noise comes before the activations, as in the paper's equation, or on the
            layers' outputs, as in its appendix.
        mu_max: the budget, needed by `release_once`, `frozen` and `dp_train`: the most mu that may be spent
            on any record, over all runs in the ledger. An upload beyond it is not made. "unlimited" answers
            whatever the server asks; the noise of many answers averages out.
        delta: for which mu is also given as (epsilon, delta).
        ledger: a folder for the ledgers, to go on with in every run; a relative path is taken from the config
            file's folder. Empty means beside the party's table; in the run's folder where there is none.
        secure_sum: uploads are masked, and the server learns the sum over all clients of each row only,
            never one client's embedding. For linear embeddings, the bias head and the sync rule, at least 3
            clients, and records that all of them have. The sum, the gradients and the final models are as
            without it.
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
        for name in _POSITIVE:
            self._check(name, getattr(self, name))
        for deviation in self.layers:
            self._check("layers", deviation)
        if not 0 < self.delta < 1:
            raise ConfigError("VFL-5101", f"privacy.delta must be between 0 and 1. Found {self.delta}.")
        missing = [name for name in NEEDS[self.kind] if not getattr(self, name)]
        if missing:
            raise ConfigError(
                "VFL-5102",
                f"privacy.mode {self.kind} needs {', '.join(f'privacy.{name}' for name in missing)} above 0. "
                "`vafl calibrate` finds values for a budget. Mode embed_only is the paper's noise, which "
                "guarantees no record anything.",
            )
        self._check_unused()
        self._check_budget()

    def check_clients(self, clients: int) -> None:
        """Raises ConfigError where so few clients cannot hide in their sum."""
        if self.secure_sum and clients < FEWEST_SUMMED:
            raise ConfigError(
                "VFL-5103",
                f"privacy.secure_sum needs at least {FEWEST_SUMMED} clients: in a sum of two, each client "
                f"that learns it knows the other's part. Found {clients}. Split the columns among more "
                "clients, or leave privacy.secure_sum out.",
            )

    @staticmethod
    def _check(name: str, value: float) -> None:
        if not 0 <= value < math.inf:
            raise ConfigError("VFL-5104", f"privacy.{name} must be 0 or more. Found {value}.")

    def _check_budget(self) -> None:
        """Without a budget a server could ask for one record until its noise has averaged out."""
        if self.kind in GUARANTEED and self.mu_max is None:
            raise ConfigError(
                "VFL-5105",
                f"privacy.mode {self.kind} needs a budget: privacy.mu_max, the most mu that may be spent on "
                "one record. Found none. `vafl calibrate` prints a [privacy] section for a budget. Set "
                f'privacy.mu_max = "{UNLIMITED}" to answer every request, however often the server asks for '
                "a record.",
            )
        number = isinstance(self.mu_max, float | int) and 0 < self.mu_max < math.inf
        if not (number or self.mu_max is None or self.mu_max == UNLIMITED):
            raise ConfigError(
                "VFL-5106",
                f'privacy.mu_max must be a number above 0, or "{UNLIMITED}". Found {self.mu_max!r}.',
            )

    def _check_unused(self) -> None:
        """Refuse settings that do nothing in this mode: a user who sets them expects protection."""
        useless = {
            "none": (*_POSITIVE, "mu_max", "layers"),
            "release_once": ("gradient_clip", "gradient_noise", "layers"),
            "frozen": ("gradient_clip", "gradient_noise"),
            "dp_train": (),
            "embed_only": ("gradient_clip", "gradient_noise", "mu_max"),
        }[self.kind]
        found = [f"privacy.{name}" for name in useless if getattr(self, name)]
        if found:
            raise ConfigError(
                "VFL-5107",
                f"privacy.mode {self.kind} makes no use of {', '.join(found)}. Leave that out, or choose "
                "another privacy.mode: only release_once, frozen and dp_train guarantee a record anything.",
            )

    @property
    def kind(self) -> Mode:
        """The mode, with `auto` resolved."""
        if self.mode != "auto":
            return self.mode
        return "dp_train" if self.noise else "none"

    @property
    def limit(self) -> float:
        """The most mu that may be spent on one record; infinite without a budget."""
        return math.inf if self.mu_max is None or self.mu_max == UNLIMITED else self.mu_max

    @property
    def upload_cost(self) -> float:
        """mu^2 that one upload of a record costs it; infinite if nothing bounds it."""
        return _cost(self._sensitivity(self.clip), self.noise)

    @property
    def update_cost(self) -> float:
        """mu^2 that one local update with a record costs it, where updates are noised."""
        return _cost(self._sensitivity(self.gradient_clip), self.gradient_noise)

    @property
    def carried_cost(self) -> float:
        """mu^2 that one upload costs every other record that the embedding was trained on without noise.

        Whoever the neighbours are: that is exact by `zero_out`, and by `replace`, where all a ledger holds
        counts four times, more than need be."""
        return _cost(2 * self.clip or math.inf, self.noise) if self.kind == "embed_only" else 0.0

    def batch_cost(self, local_steps: int = 1) -> float:
        """mu^2 that being in one minibatch costs a record: an upload, and the updates that follow."""
        return self.upload_cost + (local_steps * self.update_cost if self.kind == "dp_train" else 0.0)

    @property
    def clips_apart(self) -> int:
        """The sensitivity in clips: how far apart the uploads of two neighbours may be."""
        return 1 if self.neighbours == "zero_out" else 2

    def _sensitivity(self, norm: float) -> float:
        return self.clips_apart * norm if norm else math.inf


@dataclass(frozen=True)
class LabelSettings:
    """What protects the training labels.

    Attributes:
        epsilon: of randomised response: each label is kept with probability e^epsilon/(e^epsilon + k - 1),
            else replaced by another of the k classes; 0 uses the labels as they are. Labels of held-out rows
            are never drawn: evaluations use them as they are. Clients are told no figure of those, but notice
            when a run ends and, with stop.patience, which evaluations were the best so far.
        file: where the drawn labels are kept; runs that share it spend epsilon once, all others once each.
            Empty means the server's state in the run folder, and nowhere for a simulation.
        gradient_clip: largest norm of a row of the gradients the server returns; 0 leaves them as they are.
            A heuristic: it proves nothing.
        gradient_noise: standard deviation of the Gaussian noise on the gradients the server returns; 0 adds
            none. A heuristic: it proves nothing.
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
                f'labels.file keeps labels drawn by randomised response. Found "{self.file}" with '
                "labels.epsilon = 0. Set epsilon, or leave out file.",
            )

    @property
    def leak(self) -> str:
        """What the parties must know about unprotected labels; empty if randomised response protects them."""
        if self.epsilon:
            return ""
        return (
            "gradients reveal the training labels to every client: vafl audit recovers all of them. To "
            "protect the labels of a classification by randomised response, set labels.epsilon (it is 0)"
        )

    def check_classes(self, classes: int) -> None:
        if self.epsilon and not classes:
            raise ConfigError(
                "VFL-5110",
                f"labels.epsilon is for classes. Found {self.epsilon} with a regression, whose labels are no "
                "classes to draw from. Set it to 0, or group the labels into classes.",
            )

    def report(self, classes: int) -> dict[str, Any]:
        """What a run's summary says of its labels."""
        kept = keep_probability(self.epsilon, classes) if self.epsilon else 1.0
        return {
            "epsilon": self.epsilon or None,
            "kept_with_probability": kept,
            "file": self.file or None,
            "heuristics": {"gradient_clip": self.gradient_clip, "gradient_noise": self.gradient_noise},
        }


def keep_probability(epsilon: float, classes: int) -> float:
    """e^epsilon / (e^epsilon + classes - 1): that of keeping a label."""
    return 1 / (1 + (classes - 1) * math.exp(-epsilon))


def _cost(sensitivity: float, deviation: float) -> float:
    return (sensitivity / deviation) ** 2 if deviation else math.inf
