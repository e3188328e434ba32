"""The delay bound D: who must be asked for what before a step, and what if they cannot answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vafl.protocol.messages import Request
from vafl.protocol.requests import Requests
from vafl.protocol.rows import Rows
from vafl.protocol.rules import Turn
from vafl.protocol.settings import Unanswered
from vafl.protocol.table import EmbeddingTable


@dataclass
class DelayBound:
    """Sees to it that no step uses a cell older than `limit` iterations.

    While a step waits for fresh cells no other step is made, so nothing ages meanwhile, and once
    every client asked has answered the step can go on: the bound cannot starve itself.

    Attributes:
        limit: D, at least 1.
        policy: what to do about a client that declines or is gone.
        asked: the number of the request each client has yet to answer for the step now waiting.
        declined: the clients that could not answer, for the step now waiting.
        skipped_rows: rows of uploads skipped since the last step: many mean that no step can be made.
        lacking: the clients whose cells the last of them lacked.
    """

    limit: int
    policy: Unanswered = "wait"
    asked: dict[int, int] = field(default_factory=dict)
    declined: set[int] = field(default_factory=set)
    skipped_rows: int = 0
    lacking: frozenset[int] = frozenset()

    def settle(self, client: int, number: int, *, declined: bool) -> None:
        """Takes note of a client's answer."""
        if self.asked.get(client) == number:
            del self.asked[client]
            if declined:
                self.declined.add(client)

    def waits_for(self, client: int, number: int) -> bool:
        """Whether the step now waiting needs this very answer, however long it takes."""
        return self.policy == "wait" and self.asked.get(client) == number

    def forget(self, client: int) -> None:
        """The client left or came back: whether it could answer before no longer counts."""
        self.asked.pop(client, None)
        self.declined.discard(client)
        self.skipped_rows = 0

    def begin_step(self) -> None:
        """Another step is next: whoever declined for the one before may be asked again."""
        self.declined.clear()

    def stale(self, table: EmbeddingTable, rows: Rows, iteration: int) -> dict[int, Rows]:
        """The rows each client would have to refresh before a step may use them all."""
        old = table.delays(rows, iteration) > self.limit
        clients = np.flatnonzero(old.any(axis=0)).tolist()
        return {client: np.unique(rows[old[:, client]]) for client in clients}

    def ask(self, stale: dict[int, Rows], silent: set[int], requests: Requests) -> list[Request]:
        """Requests to every client that can be asked and was not yet; the `silent` cannot."""
        made = []
        for client, rows in stale.items():
            if client not in self.asked and client not in self.declined and client not in silent:
                made.append(requests.make(client, rows))
                self.asked[client] = made[-1].number
        return made

    @property
    def hopeless(self) -> bool:
        """Whether the step now waiting will never be made: who declines has spent its records' budgets."""
        return self.policy == "wait" and bool(self.declined)

    def must_wait(self, stale: dict[int, Rows]) -> bool:
        return bool(self.asked) or (bool(stale) and self.policy == "wait")

    def to_skip(self, group: Sequence[Turn], stale: dict[int, Rows]) -> list[Turn]:
        """The turns that cannot be taken under the `skip` policy."""
        if self.policy != "skip" or not stale:
            return []
        missing = np.concatenate(list(stale.values()))
        return [turn for turn in group if np.isin(turn.rows, missing).any()]

    def note_skipped(self, skipped: Sequence[Turn], stale: dict[int, Rows]) -> None:
        """Takes note of what was skipped instead of the step, or of nothing: then the step is made."""
        self.skipped_rows = self.skipped_rows + sum(len(turn.rows) for turn in skipped) if skipped else 0
        self.lacking = frozenset(stale) if skipped else frozenset()
