"""The update rules as one switch: which waiting uploads may the server act on now?

`async` acts on every upload; `t-sync` once t different clients have uploaded; `sync` once all have,
on a common minibatch. Each composes with a delay bound D and with both orders of Algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vafl.protocol.rows import Rows
from vafl.protocol.settings import RuleSettings


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Something a client is owed: a step of the server, a gradient, or (as written) both."""

    client: int
    activation: int
    rows: Rows
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
        group = _oldest(waiting, self.quorum, steps=True)
        if group or not waiting:
            return group
        if self.common_rows:  # a query waits for its round, not for other queries: their clients may be gone
            unfinished = {turn.client for turn in waiting if turn.steps}
            return [turn for turn in waiting if turn.client not in unfinished][:1]
        return _oldest(waiting, self.quorum, steps=False)


def _oldest(turns: Sequence[Turn], quorum: int, *, steps: bool) -> list[Turn]:
    """The oldest turn, among those that step or do not, of each of the first `quorum` clients; none if there
    are fewer."""
    group: dict[int, Turn] = {}
    for turn in turns:
        if turn.steps is steps:
            group.setdefault(turn.client, turn)
            if len(group) == quorum:
                return list(group.values())
    return []
