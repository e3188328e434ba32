"""Statements: the privacy spent on records, parties and people, as `vafl privacy` reports it."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl

from vafl.arrays import Doubles
from vafl.privacy.analysis.accountant import epsilon
from vafl.privacy.analysis.calibration import NOT_VALID, PaperCalibration
from vafl.privacy.ledger.accounts import KINDS
from vafl.privacy.ledger.ledger import Ledger
from vafl.privacy.settings import PrivacySettings

_BINS = 20


@dataclass(frozen=True)
class Statement:
    """The privacy spent on one party's records.

    Args:
        party: the party's name.
        ledger: the party's ledger.
        settings: the run's privacy settings, which set the cost of the next upload and the limit.
        batch: the rows of a minibatch, for the paper's formula.
        local_steps: the number of local updates per minibatch.
    """

    party: str
    ledger: Ledger
    settings: PrivacySettings
    batch: int
    local_steps: int = 1

    @property
    def mu(self) -> Doubles:
        """[records]: the mu spent on each, in the unit of the settings' neighbours.

        It includes the cost that `embed_only` charges to a record for uploads of others.
        """
        return self.settings.clips_apart * np.sqrt(self.ledger.accounts.total)

    @property
    def mu_together(self) -> float:
        """An upper bound on mu between all records at once and their neighbours.

        Each upload has independent noise, so mu^2 adds up. A sum of gradients has one noise for the whole
        batch, and the B records of the batch together move the sum by up to B clips.
        """
        ledger, shared = self.ledger, 0.0
        for run, rows in zip(ledger.spenders, ledger.batch_rows, strict=True):
            if run.settings.protection.noises_updates:
                others = min(run.batch, len(ledger.ids)) - 1
                update = run.settings.update_cost / run.settings.clips_apart**2
                shared += rows * others * run.local_steps * update
        return self.settings.clips_apart * math.sqrt(float(ledger.accounts.total.sum()) + shared)

    def two_values(self, mu: float) -> float:
        """Return mu between any two values of a record on which `mu` is spent."""
        return 2 / self.settings.clips_apart * mu

    def left(self, spent: float) -> int | None:
        """Return how many more minibatches a record may be in after mu `spent`; None if there is no limit."""
        settings = self.settings
        if math.isinf(settings.limit) or settings.protection.noises_features:
            return None
        cost = settings.batch_cost(self.local_steps)
        return math.floor(max(0.0, settings.limit**2 - spent**2) / cost * (1 + 1e-12))

    def record(self, record: str) -> dict[str, Any] | None:
        """Return what was spent on one record, and what is left; None if it has no account."""
        account, limit = self.ledger.account(record), self.settings.limit
        if account is None:
            return None
        mu = float(self.mu[account])
        return {
            "record": record,
            "neighbours": self.settings.neighbours,
            "mu": mu,
            "mu_two_values": self.two_values(mu),
            "epsilon": epsilon(mu, self.settings.delta),
            "delta": self.settings.delta,
            "mu_max": _finite(limit),
            "mu_left": None if math.isinf(limit) else math.sqrt(max(0.0, limit**2 - mu**2)),
            "minibatches_left": self.left(mu),
            "uploads": dict(zip(KINDS, self.ledger.counts[:, account].tolist(), strict=True)),
        }

    def as_json(self) -> dict[str, Any]:
        """Return the whole statement for JSON output."""
        mu, settings = self.mu, self.settings
        most = float(mu.max())
        finite = mu[np.isfinite(mu)]
        counts, edges = np.histogram(finite, bins=_BINS)
        return {
            "party": self.party,
            "mode": settings.kind,
            "neighbours": settings.neighbours,
            "records": len(self.ledger.ids),
            "runs": [asdict(spender) for spender in self.ledger.spenders],
            "ledgers_accepted": list(self.ledger.accepted),
            "mu_any_record": most,
            "mu_two_values": self.two_values(most),
            "mu_median": float(np.median(mu)),
            "epsilon_any_record": epsilon(most, settings.delta),
            "delta": settings.delta,
            "mu_all_records_together": self.mu_together,
            "mu_max": _finite(settings.limit),
            "minibatches_left": self.left(most),
            "uploads": {kind: int(self.ledger.counts[place].sum()) for place, kind in enumerate(KINDS)},
            "histogram": {"edges": edges.tolist(), "records": counts.tolist()},
            "paper": self._paper(),
        }

    def _paper(self) -> dict[str, Any] | None:
        """Return the mu of the paper's theorem, which assumes that the server does not know the batches."""
        settings, batches = self.settings, int(self.ledger.counts[KINDS.index("batch")].sum()) / self.batch
        if not (settings.protection.exposes_model and settings.clip and settings.noise and batches):
            return None
        sensitivity = settings.noise * math.sqrt(settings.upload_cost)
        paper = PaperCalibration(sensitivity, self.batch, len(self.ledger.ids), batches)
        return {"mu": paper.first_order_mu(settings.noise), "valid": False, "why": NOT_VALID}


def person(statements: Sequence[Statement], record: str | None = None) -> dict[str, Any]:
    """Add up what several clients have spent on one person: mu^2 adds up over clients.

    Records with the same id are the same person, at any client. If the ledgers of some clients are not
    available, the result also has an estimate: each of those counts as the mean of the available ledgers.

    Args:
        statements: one per client whose ledger is available.
        record: the person's id; None reports the person with the largest spending.
    """
    ids = pl.concat([statement.ledger.ids for statement in statements])
    settings = statements[0].settings  # one unit for all ledgers: mu^2 adds up only for the same neighbours
    totals = np.concatenate([statement.ledger.accounts.total for statement in statements])
    spent = pl.Series("spent", totals * settings.clips_apart**2)
    people = pl.DataFrame({"id": ids, "spent": spent})
    if record is not None:
        people = people.filter(pl.col("id") == record)
    together = people.group_by("id", maintain_order=True).agg(pl.col("spent").sum(), pl.len())
    worst = together.sort("spent", descending=True, maintain_order=True).row(0, named=True)
    delta = settings.delta
    names = {name for statement in statements for run in statement.ledger.spenders for name in run.parties}
    clients = max(len(statements), len(names))
    estimate = None
    if clients > len(statements):
        estimate = _mu_and_epsilon(math.sqrt(worst["spent"] * clients / len(statements)), delta)
    return {
        "record": worst["id"],
        "neighbours": settings.neighbours,
        "ledgers_with_it": worst["len"],
        "ledgers": len(statements),
        "clients": clients,
        "delta": delta,
        **_mu_and_epsilon(math.sqrt(worst["spent"]), delta),
        "if_other_clients_spent_as_much": estimate,
    }


def _mu_and_epsilon(mu: float, delta: float) -> dict[str, float]:
    return {"mu": mu, "epsilon": epsilon(mu, delta)}


def _finite(value: float) -> float | None:
    """Return None instead of infinity."""
    return value if math.isfinite(value) else None
