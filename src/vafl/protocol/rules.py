"""The update rules as one switch: which waiting uploads may the server act on now?

`async` acts on every upload; `t-sync` once t different clients have uploaded; `sync` once all have,
on a common minibatch. Each composes with a delay bound D and with both orders of Algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from vafl.errors import ConfigError
from vafl.protocol.messages import LARGEST_WINDOW

RuleName = Literal["async", "t-sync", "sync", "centralised"]
Order = Literal["upload-first", "query-first"]
Unanswered = Literal["wait", "skip", "use"]


@dataclass(frozen=True)
class RuleSettings:
    """When the server acts.

    Attributes:
        name: `async`, `t-sync`, `sync`, or `centralised` (all columns in one place: the ceiling).
        t: for `t-sync`, how many different clients a step waits for.
        delay_bound: D; before a step uses a cell older than D iterations, the server asks its client
            for a fresh embedding. 0 means no bound.
        when_unanswered: what to do when that client cannot answer: `wait` for it, `skip` the upload
            that needs it, or `use` the stale cell and report it.
        order: `upload-first` is Algorithm 1 as written; `query-first` is its footnote: the client
            asks for the gradient of its last upload, updates, then picks and uploads anew.
        start: cells nobody has uploaded yet count as `zeros`, or each client's first act is a full
            `upload`.
        window: uploads a client may have in flight, so that a long way to the server does not throttle it;
            what its model misses meanwhile counts as delay. 0 is 2 over a network, and 1 in a simulation,
            with delays injected for an experiment, under sync and in query-first order.
        local_steps: Q, the client's steps on one answer (the same gradient, re-applied).
    """

    name: RuleName = "async"
    t: int = 2
    delay_bound: int = 0
    when_unanswered: Unanswered = "wait"
    order: Order = "upload-first"
    start: Literal["zeros", "upload"] = "zeros"
    window: int = 0
    local_steps: int = 1

    def __post_init__(self) -> None:
        if self.t < 1:
            raise ConfigError(f"rule.t must be 1 or more. Found {self.t}. t = 1 is the async rule.")
        if self.delay_bound < 0:
            raise ConfigError(
                f"rule.delay_bound must be at least 1, or 0 for no bound. Found {self.delay_bound}."
            )
        if not 0 <= self.window <= LARGEST_WINDOW:
            raise ConfigError(
                f"rule.window must be 1 to {LARGEST_WINDOW}, or 0 for what suits. Found {self.window}."
            )
        if self.window > 1 and not self._may_pipeline:
            raise ConfigError(
                f'rule.window = {self.window} needs order = "upload-first" and a rule other than sync, whose '
                "rounds are one upload each. Set rule.window to 1."
            )
        if self.local_steps < 1:
            raise ConfigError(f"rule.local_steps must be 1 or more. Found {self.local_steps}.")

    @property
    def _may_pipeline(self) -> bool:
        return self.order == "upload-first" and self.name != "sync"

    def pipelined(self) -> "RuleSettings":
        """With two uploads in flight, where the rule allows it and no other window is set."""
        return replace(self, window=self.window or (2 if self._may_pipeline else 1))

    def check_clients(self, clients: int) -> None:
        """Raises ConfigError where the rule cannot be followed by so many clients."""
        if self.name == "t-sync" and self.t > clients:
            raise ConfigError(
                f"rule.t must be at most the number of clients, {clients}. Found {self.t}. "
                f"Set rule.t to {clients} or less; t = {clients} waits for everyone."
            )


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Something a client is owed: a step of the server, a gradient, or (as written) both."""

    client: int
    activation: int
    rows: Tensor
    steps: bool
    answers: bool


@dataclass(frozen=True)
class Rule:
    """Picks the turns of the next step.

    Attributes:
        quorum: how many different clients a step takes.
        common_rows: whether they must all have uploaded the same rows.
    """

    quorum: int
    common_rows: bool = False

    @classmethod
    def of(cls, settings: RuleSettings, clients: int) -> "Rule":
        settings.check_clients(clients)
        if settings.name == "async":
            return cls(1)
        if settings.name == "t-sync":
            return cls(settings.t)
        return cls(clients, common_rows=True)

    def ready(self, waiting: Sequence[Turn]) -> list[Turn]:
        """The oldest turns of `quorum` different clients that are of one kind, or none yet."""
        uploads = [turn for turn in waiting if turn.steps]
        queries = [turn for turn in waiting if not turn.steps]
        if self.common_rows:  # a query waits for its round, not for other queries: their clients may be gone
            unfinished = {turn.client for turn in uploads}
            over = [turn for turn in queries if turn.client not in unfinished]
            return _oldest(uploads, self.quorum) or over[:1]
        return _oldest(uploads, self.quorum) or _oldest(queries, self.quorum)


def _oldest(turns: Sequence[Turn], quorum: int) -> list[Turn]:
    """The oldest turn of each of the first `quorum` clients; none if there are fewer."""
    group: dict[int, Turn] = {}
    for turn in turns:
        group.setdefault(turn.client, turn)
        if len(group) == quorum:
            return list(group.values())
    return []
