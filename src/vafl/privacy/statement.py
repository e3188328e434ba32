"""What a ledger says, in the words a privacy officer asks in."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vafl.errors import DataError
from vafl.privacy.accountant import epsilon
from vafl.privacy.calibration import NOT_VALID, PaperCalibration
from vafl.privacy.ledger import KINDS, Ledger
from vafl.privacy.settings import PrivacySettings

_BINS = 20


@dataclass(frozen=True)
class Statement:
    """The account of one party's records.

    Args:
        ledger: as it stands.
        settings: of the run; they say what the next upload costs and where the limit is.
        batch: rows of a minibatch, for the paper's formula.
        local_steps: updates a minibatch is used for.
    """

    party: str
    ledger: Ledger
    settings: PrivacySettings
    batch: int
    local_steps: int = 1

    @property
    def mu(self) -> npt.NDArray[np.float64]:
        """[records]: what each record has spent, as the ledger has it."""
        return np.sqrt(self.ledger.spent)

    @property
    def valid_mu(self) -> npt.NDArray[np.float64]:
        """[records]: the same, with what `embed_only` spends on a record by uploading others."""
        if self.settings.kind != "embed_only":
            return self.mu
        later = np.where(self.ledger.first_use > 0, self.ledger.vectors - self.ledger.first_use, 0.0)
        clip, noise = self.settings.clip, self.settings.noise
        through_others = later * (2 * clip / noise) ** 2 if clip and noise else np.where(later > 0, np.inf, 0)
        return np.sqrt(self.ledger.spent + through_others)

    def left(self, spent: float) -> int | None:
        """Minibatches a record that has spent so much mu may still be in; None if there is no limit."""
        settings = self.settings
        if not settings.mu_max:
            return None
        if settings.kind == "release_once":
            return 0 if spent else 1
        cost = settings.batch_cost(self.local_steps)
        return max(0, math.floor((settings.mu_max**2 - spent**2) / cost * (1 + 1e-12)))

    def record(self, number: int) -> dict[str, Any]:
        """What was spent on one record, by what, and what is left."""
        if not 0 <= number < self.ledger.records:
            raise DataError(f"a record must be in 0..{self.ledger.records - 1}. Found {number}.")
        mu = float(self.valid_mu[number])
        uploads = {kind: int(self.ledger.counts[place, number]) for place, kind in enumerate(KINDS)}
        return {
            "record": number,
            "mu": mu,
            "epsilon": epsilon(mu, self.settings.delta),
            "uploads": uploads,
            "minibatches_left": self.left(mu),
        }

    def as_json(self) -> dict[str, Any]:
        mu, settings = self.valid_mu, self.settings
        most = float(mu.max())
        finite = mu[np.isfinite(mu)]
        counts, edges = np.histogram(finite, bins=_BINS)
        return {
            "party": self.party,
            "mode": settings.kind,
            "records": self.ledger.records,
            "mu_any_record": most,
            "mu_median": float(np.median(mu)),
            "epsilon_any_record": epsilon(most, settings.delta),
            "delta": settings.delta,
            "mu_all_records_together": float(np.sqrt((mu**2).sum())),
            "mu_max": settings.mu_max or None,
            "minibatches_left": self.left(most),
            "uploads": {kind: int(self.ledger.counts[place].sum()) for place, kind in enumerate(KINDS)},
            "histogram": {"edges": edges.tolist(), "records": counts.tolist()},
            "paper": self._paper(),
        }

    def _paper(self) -> dict[str, Any] | None:
        """What the paper's theorem would say; it counts on the server not knowing who is in a batch."""
        settings, batches = self.settings, int(self.ledger.counts[KINDS.index("batch")].sum()) / self.batch
        if settings.kind not in ("dp_train", "embed_only") or not (
            settings.clip and settings.noise and batches
        ):
            return None
        sensitivity = settings.noise * math.sqrt(settings.upload_cost)
        paper = PaperCalibration(sensitivity, self.batch, self.ledger.records, batches)
        return {"mu": paper.first_order_mu(settings.noise), "valid": False, "why": NOT_VALID}
