"""The sections [stop], [evaluation] and [prediction]: when a run ends, what it measures, how it predicts."""

import math
from dataclasses import dataclass
from typing import Literal

from vafl.errors import ConfigError
from vafl.models.metrics import MetricName
from vafl.scope import Scope, setting


@dataclass(frozen=True)
class StopSettings:
    """A run ends at the first of these.

    Attributes:
        updates: the number of server steps. 0 derives it from schedule.epochs.
        seconds: the time on the run's clock. 0 sets no limit.
        metric: the value of the headline metric (model.metric) to reach. Leave it out for no limit.
        patience: the number of evaluations in a row without a better one. 0 sets no limit. A run with
            patience keeps the models of its best evaluation, whatever ends it.
        select: the metric that decides which of two evaluations is better, for patience and for the models to
            keep: `loss` (log loss, or the root mean squared error of numbers) or a name that model.metric
            takes.
    """

    updates: int = 1000
    seconds: float = 0.0
    metric: float | None = None
    patience: int = setting(0, scope=Scope.TRAINING)
    select: MetricName = "loss"

    def __post_init__(self) -> None:
        if self.patience < 0:
            raise ConfigError(
                "VFL-1001", f"stop.patience must be 1 or more, or 0 for no limit. Found {self.patience}."
            )
        if self.updates < 0:
            raise ConfigError(
                "VFL-1002",
                f"stop.updates must be 1 or more, or 0 to follow schedule.epochs. Found {self.updates}.",
            )
        if not 0 <= self.seconds < math.inf:
            raise ConfigError(
                "VFL-1003", f"stop.seconds must be above 0, or 0 for no limit. Found {self.seconds}."
            )
        if self.metric is not None and not math.isfinite(self.metric):
            raise ConfigError(
                "VFL-1004", f"stop.metric must be a number. Found {self.metric}. Leave it out for no target."
            )


@dataclass(frozen=True)
class EvaluationSettings:
    """How often the model is measured on the validation rows, or on the test rows if there are none.

    Attributes:
        every: updates between two evaluations. 0 evaluates once per epoch of the clients.
        every_seconds: seconds between two evaluations on the run's clock. If above 0, it replaces `every`.
    """

    every: int = 50
    every_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError(
                "VFL-1005",
                f"evaluation.every must be 1 or more, or 0 for once per epoch. Found {self.every}.",
            )
        if not 0 <= self.every_seconds < math.inf:
            raise ConfigError(
                "VFL-1006", f"evaluation.every_seconds must be 0 or more. Found {self.every_seconds}."
            )


@dataclass(frozen=True)
class PredictionSettings:
    """How a trained model is used, in batches (`vafl predict`) and live (`vafl serve`).

    Attributes:
        chunk: `vafl predict` requests this number of rows at a time.
        patience: seconds a client has to answer for a chunk, or to come back. After that, the server uses the
            client's default embedding.
        deadline: seconds that a live request may wait for clients. After that, the server uses the default
            embeddings of the late ones.
        gather: seconds that a live request waits for others, so that clients are asked for all of them
            together.
        cache: whether the live server keeps embeddings and uses them again, which costs a private client
            nothing. Set false for features that change.
        largest_request: the most ids in one live request.
        importance: which importance a client lets the server measure (`vafl importance`). `party`: that of
            all its features together, and of each group in its source's `groups`. `columns`: that of each
            column, too; the server learns the columns' names, and each record's values up to a scale if
            embeddings have no noise. `none`: no importance.
    """

    chunk: int = 4096
    patience: float = 60.0
    deadline: float = 1.0
    gather: float = 0.002
    cache: bool = True
    largest_request: int = 1000
    importance: Literal["none", "party", "columns"] = "party"

    def __post_init__(self) -> None:
        for name in ("chunk", "patience", "deadline", "largest_request"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    "VFL-1007", f"prediction.{name} must be above 0. Found {getattr(self, name)}."
                )
        if not 0 <= self.gather < self.deadline:
            raise ConfigError(
                "VFL-1008",
                f"prediction.gather must be 0 or more, and below the deadline. Found {self.gather}.",
            )
