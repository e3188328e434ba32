"""Convert a budget to noise and back, for each private mode (privacy.md, sections 4 and 5).

The mu here is the cost of the most used record in a run that uses it as often as planned. Only privacy.mu_max
enforces a limit. `PaperCalibration` has the paper's formula. It is not valid here: it assumes that the server
does not know which records are in a minibatch, but the server needs to know that.
"""

import math
from dataclasses import dataclass
from typing import Literal

from vafl.errors import ConfigError
from vafl.privacy.analysis.accountant import compose
from vafl.privacy.analysis.exposure import Exposure
from vafl.privacy.modes import MODES, PrivateMode, Protection

NOT_VALID = "not valid against the server"


@dataclass(frozen=True)
class Mechanism:
    """A mode with its clips and its neighbouring relation.

    Attributes:
        mode: the privacy mode.
        clip: C, the clip of an upload.
        gradient_clip: G, the clip of a record's gradient, for `dp_train`.
        neighbours: as in `PrivacySettings`; `replace` doubles the sensitivities.
    """

    mode: PrivateMode
    clip: float
    gradient_clip: float = 0.0
    neighbours: Literal["zero_out", "replace"] = "replace"

    def __post_init__(self) -> None:
        _require_positive("clip", self.clip)
        if self.protection.noises_updates:
            _require_positive("gradient_clip", self.gradient_clip)

    @property
    def protection(self) -> Protection:
        return MODES[self.mode]

    @property
    def sensitivity(self) -> float:
        """The largest L2 distance between one upload of two neighbours."""
        return self._clips_apart * self.clip

    @property
    def gradient_sensitivity(self) -> float:
        """The largest L2 distance between the summed gradients of two neighbours."""
        return self._clips_apart * self.gradient_clip

    @property
    def _clips_apart(self) -> int:
        return 1 if self.neighbours == "zero_out" else 2


@dataclass(frozen=True)
class Deviations:
    """Standard deviations: c (`noise`) on an upload, s (`gradient_noise`) on a sum of gradients."""

    noise: float
    gradient_noise: float = 0.0


def calibrate(mechanism: Mechanism, exposure: Exposure, mu: float, share: float = 0.5) -> Deviations:
    """Return the noise with which the most used record costs `mu`.

    Args:
        mechanism: the mode and its clips.
        exposure: how often the run uses the most used record.
        mu: the budget of a record.
        share: for `dp_train`, the share of mu^2 for the uploads. The local updates get the rest.
    """
    _require_positive("mu", mu)
    if not mechanism.protection.noises_updates:
        return Deviations(_upload_distance(mechanism, exposure) / mu)
    if not 0 < share < 1:
        raise ConfigError(
            "VFL-5011", f"the share of mu^2 for uploads must be between 0 and 1. Found {share}."
        )
    updates = math.sqrt(exposure.updates) * mechanism.gradient_sensitivity
    uploads = _upload_distance(mechanism, exposure) / (mu * math.sqrt(share))
    held_out = math.sqrt(exposure.evaluations) * mechanism.sensitivity / mu
    return Deviations(max(uploads, held_out), updates / (mu * math.sqrt(1 - share)))


def guarantee(mechanism: Mechanism, exposure: Exposure, deviations: Deviations) -> float:
    """Return the mu that this noise gives the most used record, if it is used as often as `exposure` says."""
    _require_positive("noise", deviations.noise)
    uploads = _upload_distance(mechanism, exposure) / deviations.noise
    if not mechanism.protection.noises_updates:
        return uploads
    _require_positive("gradient_noise", deviations.gradient_noise)
    updates = math.sqrt(exposure.updates) * mechanism.gradient_sensitivity / deviations.gradient_noise
    held_out = math.sqrt(exposure.evaluations) * mechanism.sensitivity / deviations.noise
    return max(compose([uploads, updates]), held_out)


def _upload_distance(mechanism: Mechanism, exposure: Exposure) -> float:
    """Return the L2 distance between all uploads of two neighbouring data sets, in `exposure`'s run."""
    protection, sensitivity = mechanism.protection, mechanism.sensitivity
    if protection.noises_features:
        return sensitivity
    if protection.carries_records:
        # The record's own uploads differ by the sensitivity. Every other upload may differ by the diameter of
        # the clip ball, since the record has trained the weights.
        others = exposure.vectors - exposure.uploads
        return math.sqrt(exposure.uploads * sensitivity**2 + others * (2 * mechanism.clip) ** 2)
    if protection.noises_updates:
        return math.sqrt(exposure.uploads) * sensitivity  # the callers account for held-out records
    return math.sqrt(max(exposure.uploads, exposure.evaluations)) * sensitivity


@dataclass(frozen=True)
class PaperCalibration:
    """The paper's Theorem 6. It is not valid against the server.

    Args:
        sensitivity: used instead of the paper's B, which depends on the trained weights.
        batch: N_m, the rows of a minibatch.
        rows: N, the training rows.
        steps: K.
        samples: whether K counts processed samples, as in the theorem's text, or minibatch steps.
    """

    sensitivity: float
    batch: int
    rows: int
    steps: float
    samples: bool = False

    @property
    def _queries(self) -> float:
        return self.steps * self.batch if self.samples else self.steps

    def first_order(self, mu: float) -> float:
        """Return the noise c = Delta (N_m/N) sqrt(K) / mu."""
        return self.sensitivity * self.batch / self.rows * math.sqrt(self._queries) / mu

    def first_order_mu(self, noise: float) -> float:
        """Return mu = Delta (N_m/N) sqrt(K) / c: the same formula with c and mu swapped."""
        return self.first_order(noise)

    def central_limit(self, mu: float) -> float:
        """Return the noise c = Delta / sqrt(ln(1 + (mu N/N_m)^2 / K))."""
        return self.sensitivity / math.sqrt(math.log1p((mu * self.rows / self.batch) ** 2 / self._queries))

    def central_limit_mu(self, noise: float) -> float:
        """Return mu = (N_m/N) sqrt(K (e^{(Delta/c)^2} - 1))."""
        exponent = (self.sensitivity / noise) ** 2
        if exponent > 700:  # exp overflows float64 at about 709
            return math.inf
        return self.batch / self.rows * math.sqrt(self._queries * math.expm1(exponent))


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError("VFL-5012", f"{name} must be above 0. Found {value}.")
