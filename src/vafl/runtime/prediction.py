"""How long a prediction waits, how much it asks for at a time, and what it keeps."""

import math
from dataclasses import dataclass

from vafl.errors import ConfigError


@dataclass(frozen=True)
class PredictionSettings:
    """How a trained model is used, in batches (`vafl predict`) and live (`vafl serve`).

    Attributes:
        chunk: rows that clients are asked for at a time, in a batch.
        patience: seconds a client has to answer for a chunk, or to come back; then its default is used.
        deadline: seconds a live question may wait for clients; then the defaults of the late ones are used.
        gather: seconds a live question waits for others, to be asked together with them.
        cache: the live server keeps embeddings and uses them again, which costs a private client nothing;
            false asks each time, for features that change.
        largest_request: ids in one live request.
    """

    chunk: int = 4096
    patience: float = 60.0
    deadline: float = 1.0
    gather: float = 0.002
    cache: bool = True
    largest_request: int = 1000

    def __post_init__(self) -> None:
        for name in ("chunk", "patience", "deadline", "largest_request"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"prediction.{name} must be above 0. Found {getattr(self, name)}.")
        if not 0 <= self.gather < self.deadline:
            raise ConfigError(
                f"prediction.gather must be 0 or more, and below the deadline. Found {self.gather}."
            )
