"""The delay bound D: who must be asked for what before a step, and what if they cannot answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vafl.errors import InvalidMessage
from vafl.protocol.messages import Decline, Refresh, Request
from vafl.protocol.rules import Turn, Unanswered
from vafl.protocol.table import EmbeddingTable


@dataclass
class DelayBound:
    """Sees to it that no step uses a cell older than `limit` iterations.

    While a step waits for fresh cells no other step is made, so nothing ages meanwhile, and once
    every client asked has answered the step can go on: the bound cannot starve itself.

    Attributes:
        limit: D, at least 1.
        policy: what to do about a client that declines or is gone.
        outstanding: the request each client has yet to answer.
        declined: the clients that could not answer, for the step now waiting.
    """

    limit: int
    policy: Unanswered = "wait"
    outstanding: dict[int, Request] = field(default_factory=dict)
    declined: set[int] = field(default_factory=set)
    asked: int = 0

    def check(self, message: Refresh | Decline) -> None:
        """Raises InvalidMessage unless the message answers what that client was asked."""
        request = self.outstanding.get(message.client)
        if request is None or request.number != message.request:
            raise InvalidMessage(f"client {message.client} was not asked request {message.request}.")
        if isinstance(message, Refresh) and not torch.equal(request.rows, message.rows):
            raise InvalidMessage(f"the answer to request {request.number} must hold exactly its rows.")

    def settle(self, message: Refresh | Decline) -> None:
        """Takes note of an answer that was checked."""
        del self.outstanding[message.client]
        if isinstance(message, Decline):
            self.declined.add(message.client)

    def forget(self, client: int) -> None:
        """The client left or came back: what it was asked before no longer counts."""
        self.outstanding.pop(client, None)
        self.declined.discard(client)

    def begin_step(self) -> None:
        """Another step is next: whoever declined for the one before may be asked again."""
        self.declined.clear()

    def stale(self, table: EmbeddingTable, rows: Tensor, iteration: int) -> dict[int, Tensor]:
        """The rows each client would have to refresh before a step may use them all."""
        old = table.delays(rows, iteration) > self.limit
        clients = np.flatnonzero(old.any(axis=0)).tolist()
        return {client: torch.unique(rows[torch.from_numpy(old[:, client])]) for client in clients}

    def ask(self, stale: dict[int, Tensor], absent: set[int]) -> list[Request]:
        """Requests to every client that can be asked and was not yet."""
        requests = []
        for client, rows in stale.items():
            if client not in self.outstanding and client not in self.declined and client not in absent:
                self.outstanding[client] = Request(client, self.asked, rows)
                self.asked += 1
                requests.append(self.outstanding[client])
        return requests

    def must_wait(self, stale: dict[int, Tensor]) -> bool:
        return bool(self.outstanding) or (bool(stale) and self.policy == "wait")

    def to_skip(self, group: Sequence[Turn], stale: dict[int, Tensor]) -> list[Turn]:
        """The turns that cannot be taken under the `skip` policy."""
        if self.policy != "skip" or not stale:
            return []
        missing = torch.cat(list(stale.values()))
        return [turn for turn in group if torch.isin(turn.rows, missing).any()]
