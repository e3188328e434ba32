"""The update rules: which of the waiting uploads may the server step on now?

`async` steps on every upload. `t-sync` steps once t different clients have uploaded. `sync` steps once all
clients have uploaded a common minibatch. Each rule works with a delay bound D and with both orders of
Algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vafl.arrays import RowIds
from vafl.protocol.settings import RuleSettings


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What the server owes a client for one upload or query.

    Attributes:
        rows: the rows of the upload.
        steps: whether the head steps on these rows.
        answers: whether the client gets the gradient. In upload-first order an upload has both.
    """

    client: int
    activation: int
    rows: RowIds
    steps: bool
    answers: bool


@dataclass(frozen=True)
class Rule:
    """Picks the turns of the next step.

    Attributes:
        quorum: how many different clients a step needs.
        common_rows: whether all of them must have uploaded the same rows.
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
        """Return the oldest turns of `quorum` different clients, uploads before queries; empty if too few."""
        group = _oldest(waiting, self.quorum, steps=True)
        if group or not waiting:
            return group
        if self.common_rows:
            # A query waits for the step of its own round. It does not wait for the queries of other clients,
            # which may have left.
            unfinished = {turn.client for turn in waiting if turn.steps}
            return [turn for turn in waiting if turn.client not in unfinished][:1]
        return _oldest(waiting, self.quorum, steps=False)


def _oldest(turns: Sequence[Turn], quorum: int, *, steps: bool) -> list[Turn]:
    """Return the oldest turn of each of the first `quorum` clients, among uploads (`steps`) or queries.

    The result is empty if there are fewer clients.
    """
    group: dict[int, Turn] = {}
    for turn in turns:
        if turn.steps is steps:
            group.setdefault(turn.client, turn)
            if len(group) == quorum:
                return list(group.values())
    return []
