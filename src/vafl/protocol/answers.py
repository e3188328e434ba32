"""The answers that clients may not have applied yet, and the uploads that they will query."""

from collections import deque
from collections.abc import Iterator, Set

from vafl.protocol.messages import Gradient, Upload


class Answers:
    """Keeps answers, so that the server can repeat them after a reconnect.

    Attributes:
        kept: for each client, the answers that it may not have applied, oldest first.
        unasked: client -> the upload that it will query, in query-first order.
    """

    def __init__(self, clients: int) -> None:
        self.kept: list[deque[Gradient]] = [deque() for _ in range(clients)]
        self.unasked: dict[int, Upload] = {}

    def add(self, answer: Gradient) -> None:
        """Keep an answer until its client has applied it."""
        self.kept[answer.client].append(answer)
        if self.unasked:
            self.close(answer.client, answer.activation)

    def close(self, client: int, activation: int) -> None:
        """Forget an upload that was answered, so that it cannot be queried again."""
        if client in self.unasked and self.unasked[client].activation == activation:
            del self.unasked[client]

    def first_unapplied(self, client: int, applied: int) -> Gradient | None:
        """Drop the answers to uploads below `applied`; return the oldest one left, or None."""
        kept = self.kept[client]
        while kept and kept[0].activation < applied:
            kept.popleft()
        return kept[0] if kept else None

    def owed(self, client: int, flights: range, waiting: Set[int]) -> Iterator[tuple[int, Gradient | None]]:
        """Yield the uploads in `flights` that the server is done with, each with its answer; None if lost.

        Uploads that still wait for a step or a query are left out: they will be answered.
        """
        known = {answer.activation: answer for answer in self.kept[client]}
        unasked = {self.unasked[client].activation} if client in self.unasked else set()
        for activation in flights:
            if activation in known or activation not in waiting | unasked:
                yield activation, known.get(activation)
