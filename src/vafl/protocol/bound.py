"""The delay bound D: which embeddings to request before a step, and what to do without an answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vafl.arrays import RowIds
from vafl.protocol.messages import Request
from vafl.protocol.requests import Requests
from vafl.protocol.rules import Turn
from vafl.protocol.settings import Unanswered
from vafl.protocol.table import EmbeddingTable


@dataclass
class DelayBound:
    """Ensures that no step uses a cell with a delay of more than `limit` iterations.

    The server makes no other step while one is blocked, so no cell ages in the meantime. Once every client
    asked has answered, the step can go on. So the bound cannot block itself.

    Attributes:
        limit: D, at least 1.
        policy: what to do about a client that declines or is absent.
        asked: for the blocked step, the number of each client's request that is not answered yet.
        declined: for the blocked step, the clients that could not answer.
        skipped_rows: the number of rows in uploads skipped since the last step. A large number means that no
            step is possible.
        lacking: the clients whose fresh cells were missing for the last skipped uploads.
    """

    limit: int
    policy: Unanswered = "wait"
    asked: dict[int, int] = field(default_factory=dict)
    declined: set[int] = field(default_factory=set)
    skipped_rows: int = 0
    lacking: frozenset[int] = frozenset()

    def note_answer(self, client: int, number: int, *, declined: bool) -> None:
        """Note that a client has answered or declined a request."""
        if self.asked.get(client) == number:
            del self.asked[client]
            if declined:
                self.declined.add(client)

    def waits_for(self, client: int, number: int) -> bool:
        """Return whether the blocked step needs the answer to this request, however long it takes."""
        return self.policy == "wait" and self.asked.get(client) == number

    def forget(self, client: int) -> None:
        """Forget the requests and refusals of a client that left or joined again."""
        self.asked.pop(client, None)
        self.declined.discard(client)
        self.skipped_rows = 0

    def begin_step(self) -> None:
        """Start with another step. Clients that declined for the last one may be asked again."""
        self.declined.clear()

    def stale(self, table: EmbeddingTable, rows: RowIds, iteration: int) -> dict[int, RowIds]:
        """Return, for each client, those of the rows whose cells are beyond the bound."""
        old = table.delays(rows, iteration) > self.limit
        clients = np.flatnonzero(old.any(axis=0)).tolist()
        return {client: np.unique(rows[old[:, client]]) for client in clients}

    def ask(self, stale: dict[int, RowIds], silent: set[int], requests: Requests) -> list[Request]:
        """Return requests for stale rows, except to clients already asked, that declined, or are `silent`."""
        new = []
        for client, rows in stale.items():
            if client not in self.asked and client not in self.declined and client not in silent:
                new.append(requests.make(client, rows))
                self.asked[client] = new[-1].number
        return new

    @property
    def hopeless(self) -> bool:
        """Return whether the blocked step can never be made: a client declines once its budget is spent."""
        return self.policy == "wait" and bool(self.declined)

    def must_wait(self, stale: dict[int, RowIds]) -> bool:
        """Return whether the step is blocked."""
        return bool(self.asked) or (bool(stale) and self.policy == "wait")

    def to_skip(self, group: Sequence[Turn], stale: dict[int, RowIds]) -> list[Turn]:
        """Return the turns that the `skip` policy gives up: those with stale rows."""
        if self.policy != "skip" or not stale:
            return []
        missing = np.concatenate(list(stale.values()))
        return [turn for turn in group if np.isin(turn.rows, missing).any()]

    def note_skipped(self, skipped: Sequence[Turn], stale: dict[int, RowIds]) -> None:
        """Count the skipped rows; start again from 0 if nothing was skipped, because the step is made."""
        self.skipped_rows = self.skipped_rows + sum(len(turn.rows) for turn in skipped) if skipped else 0
        self.lacking = frozenset(stale) if skipped else frozenset()
