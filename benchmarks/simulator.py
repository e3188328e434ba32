"""Measure what the simulator costs beyond the arithmetic of its updates.

The same history runs twice: in the simulator, and in a bare loop. The loop gets the rows of every update and
the sum of the other clients' embeddings, so only the arithmetic is left. Both must end with the same
parameters. The figures are CPU time of one thread, so other work on the machine does not count.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import process_time

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.harness import REPEATS, Figure, benchmark, interleave, ratios
from vafl.config import Config
from vafl.config.run_settings import StopSettings
from vafl.data.partition import Party, VerticalData
from vafl.data.split import Parts
from vafl.models.settings import EmbeddingSettings, ModelSettings
from vafl.protocol.messages import ClientMessage, Refresh, ServerMessage, Upload
from vafl.protocol.schedule import ScheduleSettings
from vafl.protocol.settings import OptimiserSettings
from vafl.run.assembly import Run, build, limited_threads
from vafl.simulation.simulator import Simulator

CLASSES = 10
STEP_SIZE, L2 = 0.1, 0.001


@benchmark(target=1.5)
def sim_overhead_lr() -> Figure:
    """Logistic regression on MNIST's shape: 60,000 x 784 over 7 clients, batches of 600."""
    data = random_data(60_000, [(112,)] * 7)
    plain = _overhead(
        data,
        EmbeddingSettings(),
        ModelSettings(),
        ScheduleSettings(batch_size=600, refresh="none"),
        updates=70,
    )
    ahead = _overhead(
        data, EmbeddingSettings(), ModelSettings(), ScheduleSettings(batch_size=600), updates=28
    )
    return Figure(plain.samples, {**plain.detail, "lookahead": ahead.summary()})


@benchmark(target=1.1)
def sim_overhead_cnn() -> Figure:
    """The 7-layer CNN on one grey 28 x 28 image a client, 4 clients, batches of 32."""
    data = random_data(2_000, [(1, 28, 28)] * 4)
    embedding, schedule = EmbeddingSettings("cnn"), ScheduleSettings(batch_size=32, refresh="none")
    return _overhead(data, embedding, ModelSettings(head="mlp"), schedule, updates=8)


def random_data(rows: int, shapes: Sequence[tuple[int, ...]], test_rows: int = 100) -> VerticalData:
    """Return random features and labels; `shapes` has the shape of each client's features."""
    random = np.random.default_rng(0)

    parts = Parts(rows, test=test_rows)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(random.random((parts.total, *shape), np.float32))

    parties = [Party(f"client-{n}", draw(own)) for n, own in enumerate(shapes, 1)]
    labels = torch.from_numpy(random.integers(CLASSES, size=parts.total))
    return VerticalData(tuple(parties), labels, parts, tuple(map(str, range(CLASSES))))


@limited_threads(1)
def _overhead(
    data: VerticalData,
    embedding: EmbeddingSettings,
    model: ModelSettings,
    schedule: ScheduleSettings,
    updates: int,
) -> Figure:
    """Return the time of `updates` updates in the simulator over their time in the bare loop."""
    optimiser = OptimiserSettings(step_size=STEP_SIZE, l2=L2)
    endless = StopSettings(updates=10**9)
    config = Config(embedding=embedding, model=model, schedule=schedule, optimiser=optimiser, stop=endless)
    moves = _record(build(config, data), updates * (REPEATS + 1))
    run = build(config, data)
    loops = [kind(build(config, data), moves) for kind in (BareLoop, LoopWithTable)]
    actions = [lambda: _advance(run, updates), *(lambda loop=loop: loop.replay(updates) for loop in loops)]
    simulator, bare, with_table = interleave(*actions, clock=process_time)
    for loop in loops:
        _require_same_parameters(run, loop)
    detail = {
        "simulator_us": _microseconds(simulator, updates),
        "bare_us": _microseconds(bare, updates),
        "over_a_loop_with_its_own_table": Figure(ratios(simulator, with_table)).summary(),
    }
    return Figure(ratios(simulator, bare), detail)


def _microseconds(seconds: Sequence[float], updates: int) -> float:
    return round(Figure(seconds).quartiles[1] / updates * 1e6, 1)


@dataclass(frozen=True)
class Move:
    """The arithmetic of one message: a step on these rows, or only their embedding (`others` is None).

    Attributes:
        others: [batch, width], the sum of the other clients' embeddings in the table.
    """

    client: int
    rows: Tensor
    others: Tensor | None


def _record(run: Run, updates: int) -> list[Move]:
    """Return the moves of a run."""
    server = _simulator(run).server
    receive, moves = server.receive, list[Move]()

    def receive_and_note(message: ClientMessage) -> list[ServerMessage]:
        replies = receive(message)
        if isinstance(message, Upload):
            others = server.table.read(message.rows) - message.embeddings
            moves.append(Move(message.client, torch.from_numpy(message.rows), torch.from_numpy(others)))
        elif isinstance(message, Refresh):
            moves.append(Move(message.client, torch.from_numpy(message.rows), None))
        return replies

    server.receive = receive_and_note  # type: ignore[method-assign]
    _advance(run, updates)
    return moves


def _advance(run: Run, updates: int) -> None:
    end = run.runtime.updates + updates
    while run.runtime.updates < end:
        run.runtime.advance()


class BareLoop:
    """The bare updates of a run: no table, messages, checks, events or records."""

    def __init__(self, run: Run, moves: Iterable[Move]) -> None:
        self.models, self.head = run.models, run.head
        self._parameters = [list(model.parameters()) for model in run.models]
        self._head_parameters = list(run.head.parameters())
        self._features = [party.features[run.data.train] for party in run.data.parties]
        self._labels, self._moves = run.data.labels[run.data.train], iter(moves)

    def replay(self, updates: int) -> None:
        """Make the next moves, up to and including this many steps."""
        while updates:
            move = next(self._moves)
            if move.others is None:
                with torch.no_grad():
                    self._refresh(move)
            else:
                self._update(move, move.others)
                updates -= 1

    def _embed(self, move: Move) -> Tensor:
        embeddings: Tensor = self.models[move.client](self._features[move.client].index_select(0, move.rows))
        return embeddings

    def _refresh(self, move: Move) -> None:
        self._embed(move)

    def _update(self, move: Move, others: Tensor) -> None:
        self._step(move, self._embed(move), others)

    def _step(self, move: Move, embeddings: Tensor, others: Tensor) -> None:
        outputs = self.head(others + embeddings)
        loss = F.cross_entropy(outputs, self._labels.index_select(0, move.rows))
        own, heads = self._parameters[move.client], self._head_parameters
        gradients = torch.autograd.grad(loss, [*own, *heads])
        with torch.no_grad():
            for parameter, gradient in zip(own, gradients, strict=False):
                parameter.sub_(gradient.add_(parameter, alpha=L2), alpha=STEP_SIZE)
            for parameter, gradient in zip(heads, gradients[len(own) :], strict=True):
                parameter.sub_(gradient, alpha=STEP_SIZE)


class LoopWithTable(BareLoop):
    """A bare loop that gets only the rows, and keeps the clients' embeddings itself, in float32."""

    def __init__(self, run: Run, moves: Iterable[Move]) -> None:
        super().__init__(run, moves)
        rows, width = _simulator(run).server.table.rows, _simulator(run).server.table.widths[0]
        self._cells = [torch.zeros(rows, width) for _ in self.models]
        self._sums = torch.zeros(rows, width)

    def _refresh(self, move: Move) -> None:
        self._store(move, self._embed(move))

    def _update(self, move: Move, others: Tensor) -> None:
        embeddings = self._embed(move)
        self._step(move, embeddings, self._store(move, embeddings.detach()))

    def _store(self, move: Move, embeddings: Tensor) -> Tensor:
        """Store a client's embeddings and return the sum of the other clients'."""
        cells = self._cells[move.client]
        others = self._sums.index_select(0, move.rows).sub_(cells.index_select(0, move.rows))
        cells.index_copy_(0, move.rows, embeddings)
        self._sums.index_copy_(0, move.rows, others + embeddings)
        return others


def _require_same_parameters(run: Run, loop: BareLoop) -> None:
    """Check that both have the same parameters, except clients whose answer is still under way."""
    pairs = [(run.head, loop.head)]
    clients = _simulator(run).clients
    pairs += [(client.model, loop.models[client.index]) for client in clients if not client.waiting]
    for ours, theirs in pairs:
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other)


def _simulator(run: Run) -> Simulator:
    if not isinstance(run.runtime, Simulator):
        raise TypeError(f"a simulated run is needed. Found {type(run.runtime).__name__}.")
    return run.runtime
