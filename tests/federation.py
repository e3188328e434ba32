"""Small federations for tests: synthetic data, whole runs, and messages in an order that a test chooses."""

from collections import deque
from copy import deepcopy

import numpy as np
import torch

from vafl.config import from_document
from vafl.data.partition import Party, VerticalData
from vafl.data.split import Parts
from vafl.protocol.messages import Leave, Welcome
from vafl.protocol.staleness import DelayLog
from vafl.protocol.table import FOREVER
from vafl.run.assembly import Run, build


def vertical_data(rows=20, clients=2, shape=(3,), classes=3, seed=0) -> VerticalData:
    """Return random features of this shape for every party. With classes = 0, the task is a regression."""
    generator = torch.Generator().manual_seed(seed)
    features = [_with_tests(torch.randn(rows, *shape, generator=generator)) for _ in range(clients)]
    parties = [Party(f"client-{i}", own) for i, own in enumerate(features, 1)]
    if classes:
        labels = torch.arange(rows) % classes
        names = tuple(map(str, range(classes)))
    else:
        labels, names = torch.randn(rows, generator=generator), None
    return VerticalData(tuple(parties), _with_tests(labels), Parts(rows, test=rows // 2), names)


def _with_tests(values: torch.Tensor) -> torch.Tensor:
    """Return the data with the first half of the rows as test rows, too."""
    return torch.cat([values, values[: len(values) // 2]])


def run_of(data: VerticalData | None = None, **sections) -> Run:
    """Return a run on synthetic or given data, with small defaults that `sections` may replace."""
    document = {
        "seed": sections.pop("seed", 1),
        "schedule": {"batch_size": 4, "refresh": "none"},
        "optimiser": {"step_size": 0.2},
        "delays": {"kind": "fixed"},
        "stop": {"updates": 20},
        "evaluation": {"every": 10},
    }
    for name, values in sections.items():
        document[name] = {**document.get(name, {}), **values}
    return build(from_document(document), vertical_data() if data is None else data)


def parameters(run: Run) -> list[torch.Tensor]:
    """Return copies of the parameters of all parties' models, then of the head."""
    return [p.detach().clone() for module in (*run.models, run.head) for p in module.parameters()]


def snapshot(server) -> dict:
    """Return a deep copy of all server state that a message could change."""
    table, bound = server.table, server.bound
    state = {
        "cells": table.cells.copy(),
        "sums": None if table.sums is None else table.sums.copy(),
        "stored_at": table.stored_at.copy(),
        "head": [p.detach().clone() for p in server.head.parameters()],
        "iteration": server.iteration,
        "activations": list(server.activations),
        "absent": set(server.absent),
        "finished": set(server.finished),
        "met": set(server._met),
        "sequences": list(server._sequences),
        "waiting": [id(turn) for turn in server._waiting],
        "group": [id(turn) for turn in server._group],
        "answerable": {client: id(upload) for client, upload in server._answers.unasked.items()},
        "answers": [[id(answer) for answer in answers] for answers in server._answers.kept],
        "durable": list(server.durable),
        "requests": {number: id(request) for number, request in server.requests._open.items()},
        "numbered": server.requests.made,
        "optimiser": deepcopy(server.descent.state()),
        "delays": deepcopy(server.delays.summaries()),
    }
    if bound is not None:
        state |= {"declined": set(bound.declined), "asked": dict(bound.asked)}
    return state


def same(one, other) -> bool:
    """Return whether two (nested) snapshots are equal, and tensors equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


class SeenDelays(DelayLog):
    """A delay log that also keeps every delay that a step used, including the active client's own."""

    def __init__(self, clients, bound=None):
        super().__init__(clients, bound)
        self.used = []

    def record(self, table, rows, iteration, own):
        self.used.append((table.delays(rows, iteration), own))
        super().record(table, rows, iteration, own)

    def largest(self) -> int:
        return max((int(delays.max()) for delays, _ in self.used), default=0)


class Exchange:
    """Carries messages between a run's server and clients, in order per client and direction only.

    `moves()` lists what could happen next, and `play(move)` makes it happen. The test decides the order. The
    simulator's clock is not used, and the server does not stop at a last iteration. A client that leaves
    loses the messages under way to and from it. A client that joins reports its position.
    """

    def __init__(self, run: Run):
        self.run, self.server, self.clients = run, run.runtime.server, run.runtime.clients
        self.server.last_iteration, bound = FOREVER, self.server.bound
        self.server.delays = self.seen = SeenDelays(len(self.clients), bound.limit if bound else None)
        self.up = [deque() for _ in self.clients]
        self.down = [deque() for _ in self.clients]
        self.here = [True] * len(self.clients)

    def moves(self) -> list[tuple[str, int]]:
        found = []
        for client in self.clients:
            i = client.index
            found += [("up", i)] * bool(self.up[i]) + [("down", i)] * bool(self.down[i])
            if self.here[i] and not client.waiting:
                found.append(("wake", i))
        return found

    def play(self, move: tuple[str, int]) -> None:
        what, i = move
        if what == "wake":
            self.up[i].extend(self.clients[i].wake())
        elif what == "up":
            self._dispatch(self.server.receive(self.up[i].popleft()))
        else:
            message = self.down[i].popleft()
            self.up[i].extend(self.clients[i].receive(message))
            self.here[i] = self.here[i] or isinstance(message, Welcome)

    def leave(self, i: int) -> None:
        self._begin_life(i, Leave(i))

    def join(self, i: int) -> None:
        self._begin_life(i, self.clients[i].join())

    def _begin_life(self, i, message) -> None:
        self.here[i] = False  # until the welcome is read
        self.up[i].clear()
        self.down[i].clear()
        self._dispatch(self.server.receive(message))

    def _dispatch(self, replies) -> None:
        for reply in replies:
            if reply.client not in self.server.absent:
                self.down[reply.client].append(reply)

    def turn(self, i: int) -> None:
        """Play one client's whole activation: it wakes, and all messages to and from it arrive."""
        self.play(("wake", i))
        self.deliver()

    def deliver(self) -> None:
        """Deliver all messages under way, until only wakes are left."""
        while moves := [move for move in self.moves() if move[0] != "wake"]:
            self.play(moves[0])
