"""A limit on how far fast clients may run ahead of slow ones (`rule.lead`).

A run that is planned in epochs ends after a number of updates. Without a limit, the fast clients would use
them up: of a client that needs fifty times as long for an upload, the head would hardly learn anything. Its
uploads would also be the most valuable ones, because the fast clients repeat what they have shown before.
"""

from collections.abc import Sequence, Set

from vafl.protocol.rules import Turn


class Lead:
    """Holds back the uploads of clients that are too far ahead of the slowest client.

    Only clients that are present and have not finished count. After a client has joined, all counts start
    again, so the others do not wait until it has caught up.

    Args:
        factor: how many times as many uploads as the slowest client another one may make; at least 1.
        start: uploads that each client may make before that; at least 1.
        clients: their number.
    """

    def __init__(self, factor: float, start: int, clients: int) -> None:
        self._factor, self._start = factor, start
        self._since = [0] * clients

    def restart(self, activations: Sequence[int]) -> None:
        """Count from these numbers of uploads on."""
        self._since = list(activations)

    def within(self, waiting: Sequence[Turn], activations: Sequence[int], away: Set[int]) -> list[Turn]:
        """Return the turns of clients that are not too far ahead. The slowest client's are always among them.

        Args:
            activations: the number of uploads of each client.
            away: clients that do not count.
        """
        counts = [
            made - since
            for client, (made, since) in enumerate(zip(activations, self._since, strict=True))
            if client not in away
        ]
        if not counts:
            return list(waiting)
        most = self._factor * min(counts) + self._start
        return [turn for turn in waiting if turn.activation - self._since[turn.client] < most]
