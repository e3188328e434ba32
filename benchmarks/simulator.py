"""What the simulator costs beyond the arithmetic of the updates it makes.

The same history is run twice: by the simulator, and by a bare loop that is handed every update's rows
and what the table held for the other clients, so that nothing is left to do but the mathematics. Both
end in the same parameters, or the benchmark fails.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from time import process_time

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.harness import REPEATS, Figure, benchmark, interleave, ratios
from vafl.build import Run, build
from vafl.config import Config
from vafl.data.partition import Party, VerticalData
from vafl.models.settings import ModelSettings
from vafl.protocol.descent import OptimiserSettings
from vafl.protocol.messages import ClientMessage, Refresh, ServerMessage, Upload
from vafl.protocol.schedule import ScheduleSettings
from vafl.runtime.simulator import Simulator
from vafl.runtime.training import StopSettings

CLASSES = 10
STEP_SIZE, L2 = 0.1, 0.001
CLASS_NAMES = tuple(map(str, range(CLASSES)))


@benchmark(target=1.5)
def sim_overhead_lr() -> Figure:
    """Logistic regression on MNIST's shape: 60,000 x 784 over 7 clients, batches of 600."""
    data = random_data(60_000, [(112,)] * 7)
    model = ModelSettings()
    plain = _overhead(data, model, ScheduleSettings(batch_size=600, refresh="none"), updates=70)
    ahead = _overhead(data, model, ScheduleSettings(batch_size=600, refresh="lookahead"), updates=28)
    return Figure(plain.samples, {**plain.detail, "lookahead": _summary(ahead)})


@benchmark(target=1.1)
def sim_overhead_cnn() -> Figure:
    """The 7-layer CNN on one grey 28 x 28 image a client, 4 clients, batches of 32."""
    data = random_data(2_000, [(1, 28, 28)] * 4)
    model = ModelSettings(embedding="cnn", head="mlp")
    return _overhead(data, model, ScheduleSettings(batch_size=32, refresh="none"), updates=4)


def random_data(rows: int, shapes: list[tuple[int, ...]], test_rows: int = 100) -> VerticalData:
    """Noise with labels, shaped like a data set; numpy draws it, as numpy holds what is read from files."""
    random = np.random.default_rng(0)
    parties = tuple(
        Party(
            f"client-{number}",
            torch.from_numpy(random.random((rows, *shape), np.float32)),
            torch.from_numpy(random.random((test_rows, *shape), np.float32)),
        )
        for number, shape in enumerate(shapes, 1)
    )
    labels = torch.from_numpy(random.integers(CLASSES, size=rows + test_rows))
    return VerticalData(parties, labels[:rows], labels[rows:], CLASS_NAMES)


def _overhead(data: VerticalData, model: ModelSettings, schedule: ScheduleSettings, updates: int) -> Figure:
    """Time of `updates` updates by the simulator over their time in the bare loop."""
    optimiser = OptimiserSettings(step_size=STEP_SIZE, l2=L2)
    endless = StopSettings(updates=10**9)
    config = Config(model=model, schedule=schedule, optimiser=optimiser, stop=endless)
    moves = _record(build(config, data), updates * (REPEATS + 1))
    run, bare = build(config, data), Bare(build(config, data), moves)
    torch.set_num_threads(config.threads)
    whole, alone = interleave(
        lambda: _advance(run, updates), lambda: bare.replay(updates), clock=process_time
    )
    _require_same_parameters(run, bare)
    per_update = {"simulator_us": _microseconds(whole, updates), "bare_us": _microseconds(alone, updates)}
    return Figure(ratios(whole, alone), per_update)


def _summary(figure: Figure) -> dict[str, object]:
    lower, median, upper = figure.quartiles
    return {"value": median, "quartiles": [lower, upper], **figure.detail}


def _microseconds(seconds: list[float], updates: int) -> float:
    return round(Figure(seconds).quartiles[1] / updates * 1e6, 1)


@dataclass(frozen=True)
class Move:
    """One message as arithmetic: a step on these rows, or only their embedding (others is None).

    Attributes:
        others: [batch, width], the sum of the other clients' embeddings in the table.
    """

    client: int
    rows: Tensor
    others: Tensor | None


def _record(run: Run, updates: int) -> Iterator[Move]:
    """The history of a run, move by move."""
    server = _simulator(run).server
    receive, moves = server.receive, list[Move]()

    def receive_and_note(message: ClientMessage) -> list[ServerMessage]:
        replies = receive(message)
        if isinstance(message, Upload):
            others = server.table.read(message.rows) - message.embeddings
            moves.append(Move(message.client, message.rows, others))
        elif isinstance(message, Refresh):
            moves.append(Move(message.client, message.rows, None))
        return replies

    server.receive = receive_and_note  # type: ignore[method-assign]
    _advance(run, updates)
    return iter(moves)


def _advance(run: Run, updates: int) -> None:
    end = run.runtime.updates + updates
    while run.runtime.updates < end:
        run.runtime.advance()


class Bare:
    """The updates of a run with nothing around them: no table, messages, checks, events or records."""

    def __init__(self, run: Run, moves: Iterator[Move]) -> None:
        self.models, self.head = run.models, run.head
        self._parameters = [list(model.parameters()) for model in run.models]
        self._head_parameters = list(run.head.parameters())
        self._features = [party.train for party in run.data.parties]
        self._labels, self._moves = run.data.train_labels, moves

    def replay(self, updates: int) -> None:
        """The next moves, up to and with so many steps."""
        while updates:
            move = next(self._moves)
            if move.others is None:
                with torch.no_grad():
                    self._embed(move)
            else:
                self._step(move, move.others)
                updates -= 1

    def _embed(self, move: Move) -> Tensor:
        embeddings: Tensor = self.models[move.client](self._features[move.client].index_select(0, move.rows))
        return embeddings

    def _step(self, move: Move, others: Tensor) -> None:
        outputs = self.head(others + self._embed(move))
        loss = F.cross_entropy(outputs, self._labels.index_select(0, move.rows))
        mine = self._parameters[move.client]
        gradients = torch.autograd.grad(loss, [*mine, *self._head_parameters])
        with torch.no_grad():
            for parameter, gradient in zip(mine, gradients, strict=False):
                parameter.sub_(gradient.add_(parameter, alpha=L2), alpha=STEP_SIZE)
            for parameter, gradient in zip(self._head_parameters, gradients[len(mine) :], strict=True):
                parameter.sub_(gradient, alpha=STEP_SIZE)


def _require_same_parameters(run: Run, bare: Bare) -> None:
    """All but the models still waiting for an answer, which the bare loop has given already."""
    pairs = [(run.head, bare.head)]
    clients = _simulator(run).clients
    pairs += [(client.model, bare.models[client.index]) for client in clients if not client.waiting]
    for ours, theirs in pairs:
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other)


def _simulator(run: Run) -> Simulator:
    if not isinstance(run.runtime, Simulator):
        raise TypeError(f"a simulated run is needed. Found {type(run.runtime).__name__}.")
    return run.runtime
