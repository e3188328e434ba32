"""From a configuration to objects: the only file that wires every room."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from vafl.config import Config
from vafl.data.partition import VerticalData, partition
from vafl.data.sources import load
from vafl.errors import ConfigError
from vafl.models.losses import LOSSES, Metric, metric
from vafl.protocol.bound import DelayBound
from vafl.protocol.centralised import Centralised
from vafl.protocol.client import Client
from vafl.protocol.delays import DelaySummary
from vafl.protocol.rules import Rule
from vafl.protocol.schedule import (
    BatchSchedule,
    Lookahead,
    NoRefresh,
    RandomRefresh,
    Refresh,
    RefreshAll,
    parse_refresh,
)
from vafl.protocol.server import Server
from vafl.protocol.table import EmbeddingTable
from vafl.runtime.simulator import Simulator
from vafl.runtime.training import CentralisedRuntime, Evaluator, Point, measure, train

_COMMON_STREAM = 0  # clients have the streams 1..M
_PRIVATE_STREAMS = 1_000_000
_REFRESH_STREAMS = 2_000_000


@dataclass(frozen=True)
class Task:
    """What the labels make of the run: how many outputs, which loss, which metric."""

    outputs: int
    loss: str
    metric: Metric

    @classmethod
    def of(cls, config: Config, data: VerticalData) -> "Task":
        classes = 0 if data.classes is None else len(data.classes)
        loss = config.model.loss
        if loss == "auto":
            loss = "squared" if not classes else "binary" if classes == 2 else "softmax"
        _check_loss(loss, classes)
        outputs = classes if loss == "softmax" else 1
        return cls(outputs, loss, metric(config.model.metric_for(loss), loss))


def _check_loss(loss: str, classes: int) -> None:
    fits = {"softmax": classes >= 2, "binary": classes == 2, "squared": True}[loss]
    if not fits:
        found = f"{classes} classes" if classes else "numbers"
        raise ConfigError(
            f'model.loss = "{loss}" does not fit labels with {found}. Use loss = "auto", or set data.task.'
        )


@dataclass
class Run:
    """A run ready to go: the objects underneath, for whoever wants to look at them or change them."""

    config: Config
    data: VerticalData
    task: Task
    models: list[nn.Module]
    head: nn.Module
    runtime: Simulator | CentralisedRuntime
    evaluator: Evaluator

    def train(self, observe: Callable[[Point], None] = lambda point: None) -> list[Point]:
        """Trains until a stop criterion holds; `observe` sees every evaluation as it is made."""
        with _threads(self.config.threads):
            return train(
                self.runtime,
                self.evaluator,
                self.task.metric,
                self.config.stop,
                self.config.evaluation,
                observe,
            )

    def measure(self) -> Point:
        """An evaluation, now."""
        return measure(self.runtime, self.evaluator)

    def delays(self) -> list[DelaySummary]:
        """How stale each client's embeddings were when used; none for a centralised run."""
        return self.runtime.server.delays.summaries() if isinstance(self.runtime, Simulator) else []


def build(config: Config, data: VerticalData | None = None) -> Run:
    """Makes every object of a run. `data` replaces what the config's data section would load.

    Raises:
        ConfigError, DataError: before anything was trained or written.
    """
    if data is None:
        loaded = load(config.data, config.seed)
        data = partition(loaded, config.partition, config.data.scale)
    config.schedule.check_rows(data.rows)
    config.rule.check_clients(len(data.parties))
    config.delays.check_clients(len(data.parties))
    task = Task.of(config, data)
    if task.loss != "softmax":
        data = _float_labels(data)
    models, head = _models(config, data, task)
    runtime = _runtime(config, data, task, models, head)
    tests = [party.test for party in data.parties]
    summed = config.model.combine == "sum"
    evaluator = Evaluator(models, tests, head, data.test_labels, task.metric, summed=summed)
    return Run(config, data, task, models, head, runtime, evaluator)


def _float_labels(data: VerticalData) -> VerticalData:
    return VerticalData(data.parties, data.train_labels.float(), data.test_labels.float(), data.classes)


def _models(config: Config, data: VerticalData, task: Task) -> tuple[list[nn.Module], nn.Module]:
    """Initial parameters come from the run's seed, and torch's global generator is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        models = [config.model.make_embedding(party.train.shape[1:], task.outputs) for party in data.parties]
        return models, config.model.make_head(len(models), task.outputs)


def _runtime(
    config: Config, data: VerticalData, task: Task, models: list[nn.Module], head: nn.Module
) -> Simulator | CentralisedRuntime:
    if config.rule.name == "centralised":
        return CentralisedRuntime(_centralised(config, data, task, models, head))
    server = make_server(config, data, task, head)
    clients = [make_client(config, data, index, model) for index, model in enumerate(models)]
    return Simulator(server, clients, config.delays, config.seed)


def make_server(config: Config, data: VerticalData, task: Task, head: nn.Module) -> Server:
    """The server of a run: labels, head, an empty table."""
    width = config.model.embedding_width(task.outputs)
    clients = len(data.parties)
    table = EmbeddingTable(data.rows, [width] * clients, summed=config.model.combine == "sum")
    rule = config.rule
    return Server(
        table,
        data.train_labels,
        head,
        LOSSES[task.loss],
        config.optimiser.descent(head.parameters(), server=True),
        Rule.of(rule, clients),
        DelayBound(rule.delay_bound, rule.when_unanswered) if rule.delay_bound else None,
    )


def make_client(config: Config, data: VerticalData, index: int, model: nn.Module) -> Client:
    """One client of a run, with its own features only."""
    perturbation = config.privacy.perturbation()
    return Client(
        index,
        data.parties[index].train,
        model,
        config.optimiser.descent(model.parameters()),
        make_schedule(config, data.rows, index),
        make_refresh(config, data.rows, index, len(data.parties)),
        config.rule,
        l2=config.optimiser.l2,
        perturb=perturbation,
    )


def make_schedule(config: Config, rows: int, index: int) -> BatchSchedule:
    """The minibatches of client `index`; all clients have the same ones under the sync rule."""
    settings = config.schedule
    if config.rule.name in ("sync", "centralised"):
        stream = _COMMON_STREAM
    else:
        stream = index + 1 + (_PRIVATE_STREAMS if settings.seed == "private" else 0)
    return BatchSchedule(settings.kind, rows, settings.batch_size, config.seed, stream)


def make_refresh(config: Config, rows: int, index: int, clients: int) -> Refresh:
    """Which rows client `index` refreshes; nothing is ever stale under the sync rule."""
    name, count = parse_refresh(config.schedule.refresh)
    if name == "none" or config.rule.name == "sync":
        return NoRefresh()
    if name == "all":
        return RefreshAll()
    if name == "lookahead":
        return Lookahead(index, [make_schedule(config, rows, other) for other in range(clients)])
    seed = np.random.SeedSequence((config.seed, _REFRESH_STREAMS + index))
    return RandomRefresh(rows, count, np.random.Generator(np.random.Philox(seed)))


def _centralised(
    config: Config, data: VerticalData, task: Task, models: list[nn.Module], head: nn.Module
) -> Centralised:
    descents = [config.optimiser.descent(model.parameters()) for model in models]
    descents.append(config.optimiser.descent(head.parameters(), server=True))
    return Centralised(
        [party.train for party in data.parties],
        data.train_labels,
        models,
        head,
        LOSSES[task.loss],
        descents,
        make_schedule(config, data.rows, 0),
        summed=config.model.combine == "sum",
        l2=config.optimiser.l2,
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
