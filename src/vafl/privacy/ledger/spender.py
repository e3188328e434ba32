"""A spender: one run of a party, as its ledger records it."""

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from vafl.privacy.settings import PrivacySettings


@dataclass(frozen=True)
class Spender:
    """A run of this party.

    Attributes:
        run: the run's folder; empty for a simulation.
        purpose: what the uploads are for.
        parties: the names of all parties in the run.
        settings: the privacy settings of the run.
        batch: the rows of a minibatch.
        local_steps: the number of local updates per minibatch.
        began: the start time, as ISO 8601.
    """

    run: str
    purpose: Literal["training", "prediction"]
    parties: tuple[str, ...]
    settings: PrivacySettings
    batch: int = 1
    local_steps: int = 1
    began: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"), compare=False)

    @property
    def dearest_upload(self) -> float:
        """The largest mu^2 that one upload of this run can cost a record, including the updates after it."""
        return self.settings.batch_cost(self.local_steps if self.purpose == "training" else 0)

    def as_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of(cls, content: bytes) -> "Spender":
        facts = json.loads(content)
        settings = {name: _frozen(value) for name, value in facts.pop("settings").items()}
        return cls(
            settings=PrivacySettings(**settings), **{name: _frozen(value) for name, value in facts.items()}
        )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
