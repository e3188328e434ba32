"""What clients were answered and may not have applied yet, and what they have yet to ask about."""

from collections import deque
from collections.abc import Iterator, Set

from vafl.protocol.messages import Gradient, Upload


class Answers:
    """The server's side of every upload that is not over for its client.

    Attributes:
        kept: of each client, the answers it has not shown to have applied, oldest first.
        unasked: client -> the upload that it will query, where that is another message.
    """

    def __init__(self, clients: int) -> None:
        self.kept: list[deque[Gradient]] = [deque() for _ in range(clients)]
        self.unasked: dict[int, Upload] = {}

    def add(self, answer: Gradient) -> None:
        """Keeps an answer until its client has applied it."""
        self.kept[answer.client].append(answer)
        if self.unasked:
            self.close(answer.client, answer.activation)

    def close(self, client: int, activation: int) -> None:
        """The upload was answered: it cannot be asked about again."""
        if client in self.unasked and self.unasked[client].activation == activation:
            del self.unasked[client]

    def first_unapplied(self, client: int, applied: int) -> Gradient | None:
        """The oldest answer to an upload from number `applied` on; those before are forgotten."""
        kept = self.kept[client]
        while kept and kept[0].activation < applied:
            kept.popleft()
        return kept[0] if kept else None

    def owed(self, client: int, flights: range, waiting: Set[int]) -> Iterator[tuple[int, Gradient | None]]:
        """Those of the uploads that nothing more is done about, each with its answer; None if it is lost."""
        known = {answer.activation: answer for answer in self.kept[client]}
        unasked = {self.unasked[client].activation} if client in self.unasked else set()
        for activation in flights:
            if activation in known or activation not in waiting | unasked:
                yield activation, known.get(activation)
