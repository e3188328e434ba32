"""From a plan to the objects of a run: the only file that wires every room."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import nn

from vafl.config import Config
from vafl.data.partition import VerticalData
from vafl.data.settings import LABEL_HOLDER
from vafl.names import LOCAL_CLIENT
from vafl.observe.evaluation import Evaluation
from vafl.privacy.ledger.ledger import Ledger
from vafl.privacy.mechanism.client_privacy import ClientPrivacy, guard
from vafl.privacy.mechanism.labels import GradientMask
from vafl.protocol.bound import DelayBound
from vafl.protocol.centralised import Centralised
from vafl.protocol.client import Client
from vafl.protocol.descent import Descent
from vafl.protocol.marks import MarkMemory
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
from vafl.protocol.secure_sum.client import MaskedClient
from vafl.protocol.secure_sum.fixed_point import decode
from vafl.protocol.secure_sum.masks import KeyAgreement, KeySigner, NoKeySigner
from vafl.protocol.secure_sum.server import MaskedServer, SumTable
from vafl.protocol.server import Server
from vafl.protocol.staleness import DelaySummary
from vafl.protocol.table import EmbeddingTable
from vafl.run.best import BestModels
from vafl.run.controller import End
from vafl.run.drawn_labels import draw_once
from vafl.run.evaluator import Evaluator
from vafl.run.ledgers import is_entered, ledger_path, open_ledger
from vafl.run.plan import Plan, Task, make_plan
from vafl.run.simulation_driver import CentralisedRuntime, SimulationDriver, measure
from vafl.simulation.simulator import Simulator
from vafl.transport.codec import Codec

_COMMON_STREAM = 0  # clients have the streams 1..M
_PRIVATE_STREAMS = 1_000_000
_REFRESH_STREAMS = 2_000_000


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
    ledgers: list[Ledger]
    best: BestModels | None = None
    end: End | None = None

    def train(
        self, observe: Callable[[Evaluation], None] = lambda point: None, *, keep_best: bool | None = None
    ) -> list[Evaluation]:
        """Train until a stop criterion holds, and return all evaluations. Why it ended is then in `end`.

        Args:
            observe: called with every evaluation as it is made.
            keep_best: whether to go back to the models of the best evaluation at the end. That evaluation is
                then `best.point`. None does so if the run has stop.patience.
        """
        keep_best = self.config.stop.patience > 0 if keep_best is None else keep_best
        self.best = BestModels([*self.models, self.head], self.evaluator.measured) if keep_best else None
        driver = SimulationDriver(
            self.runtime,
            self.evaluator,
            self.task.metrics,
            self.config.stop,
            self.config.evaluation,
            observe,
            self.best,
        )
        try:
            with limited_threads(self.config.threads):
                driver.train()
        finally:
            self.end = driver.controller.end
        return driver.evaluations

    def measure(self) -> Evaluation:
        """Evaluate the models as they are now."""
        return measure(self.runtime, self.evaluator, self.task.metrics.headline.name)

    def delays(self) -> list[DelaySummary]:
        """How stale each client's embeddings were when used; none for a centralised run."""
        return self.runtime.server.delays.summaries() if isinstance(self.runtime, Simulator) else []


def build(config: Config, data: VerticalData | None = None) -> Run:
    """Makes every object of a simulated run; `data` and errors as for `make_plan`.

    Nothing leaves the machine in a simulation: private clients' ledgers are kept in memory.
    """
    plan = with_drawn_labels(make_plan(config, data))
    config = plan.config
    centralised = config.rule.name == "centralised"
    guards = [None if centralised else make_guard(plan, index) for index in range(len(plan.models))]
    models, features = plan.models, [party.features for party in plan.data.parties]
    for index, own in enumerate(guards):
        if own is not None:  # measured is what the server would see
            features[index] = own.features
            models = [*models[:index], own.whole_model(), *models[index + 1 :]]
    evaluator = Evaluator(
        models,
        features,
        plan.head,
        plan.data.labels,
        plan.task.metrics,
        plan.data.parts,
        summed=config.model.combine == "sum",
        undo=plan.undo,
        budgets=[own.budget for own in guards if own is not None],
    )
    runtime = CentralisedRuntime(_centralised(plan)) if centralised else _simulator(plan, guards)
    ledgers = [own.budget.ledger for own in guards if own is not None]
    return Run(config, plan.data, plan.task, plan.models, plan.head, runtime, evaluator, ledgers)


def _simulator(plan: Plan, guards: Sequence[ClientPrivacy | None]) -> Simulator:
    config, parties = plan.config, range(len(plan.models))
    schedules = [make_schedule(config, plan.data.rows, index) for index in parties]
    clients = [make_client(plan, index, schedules, own) for index, own in enumerate(guards)]
    names, codec = [party.name for party in plan.data.parties], Codec(config.network.encoding)
    local = names.index(LOCAL_CLIENT) if LOCAL_CLIENT in names else None
    return Simulator(make_server(plan), clients, config.delays, config.seed, codec, local)


def with_drawn_labels(plan: Plan, path: Path | None = None) -> Plan:
    """The plan as the server trains by it: with labels drawn by randomised response, if the run says so.

    They are kept in `path` unless labels.file names another place.
    """
    config, settings, data = plan.config, plan.config.labels, plan.data
    if not settings.epsilon:
        return plan
    path = Path(settings.file) if settings.file else path
    classes = len(data.classes or ())
    name = config.tables[LABEL_HOLDER].label if config.tables else config.data.label
    known = data.labels[data.train]
    drawn = draw_once(known, classes, settings.epsilon, name, data.record_digest, path)
    return replace(plan, data=replace(data, labels=torch.cat([drawn, data.labels[data.rows :]])))


def make_server(plan: Plan, table: EmbeddingTable | None = None, marks: MarkMemory | None = None) -> Server:
    """Make the server of a run: labels, head, and an empty table unless one is given.

    `marks` remembers the marks of the clients' ledgers, by default only while the server lives.
    """
    config, clients = plan.config, len(plan.data.parties)
    rule, table = config.rule, table or make_table(plan, plan.data.rows)
    others = (
        plan.data.labels[plan.data.train].numpy(),
        plan.head,
        plan.loss,
        _descent(config, plan.head, server=True),
        Rule.of(rule, clients),
        DelayBound(rule.delay_bound, rule.when_unanswered) if rule.delay_bound else None,
        GradientMask.of(config.labels),
        plan.weights,
    )
    if isinstance(table, SumTable):
        server: Server = MaskedServer(table, *others, decode=decode, marks=marks)
    else:
        server = Server(table, *others, marks=marks)
    server.last_iteration = config.stop.updates
    return server


def make_table(plan: Plan, rows: int) -> EmbeddingTable:
    """An empty table, in this process's memory; of a secure sum it has the sums only."""
    own = widths(plan)
    if plan.config.privacy.secure_sum:
        return SumTable(rows, len(own), own[0])
    return EmbeddingTable(rows, own, summed=plan.config.model.combine == "sum")


def widths(plan: Plan) -> list[int]:
    """The embedding width of each client."""
    return [plan.config.model.embedding_width(plan.task.outputs)] * len(plan.data.parties)


def make_guard(
    plan: Plan, index: int, run: Path | None = None, *, accept_ledger: bool = False
) -> ClientPrivacy | None:
    """Make what keeps client `index` private or accountable, if its settings or its ledger ask for that.

    Args:
        run: the run's folder; None for a simulation.
        accept_ledger: go on if the ledger lacks the last mark that the server received.
    """
    config, data = plan.config, plan.data
    party = data.parties[index]
    path = None if run is None else ledger_path(config, party.name, run)
    if not is_entered(config, party.name, path):
        return None
    names = [own.name for own in data.parties]
    ids = data.ids_of(party)
    ledger, accounts = open_ledger(
        config, party.name, ids, data.source, names, run=run, path=path, accept_ledger=accept_ledger
    )
    return guard(
        config.privacy,
        plan.models[index],
        party.features,
        ledger,
        accounts,
        config.rule.local_steps,
    )


def make_client(
    plan: Plan,
    index: int,
    schedules: Sequence[BatchSchedule] | None = None,
    own: ClientPrivacy | None = None,
    *,
    with_held_out: bool = False,
    witness: KeySigner | None = None,
    own_seed: int | None = None,
) -> Client:
    """One client of a run, with its own features only; of the held-out rows too if it is asked for those.

    Clients in one process may share all `schedules`. `own` makes the client private. `witness` vouches for
    the keys of a secure sum; parties on one machine may do without. `own_seed` is what a private schedule
    is drawn from, if not the run's seed.
    """
    config, party = plan.config, plan.data.parties[index]
    rows, clients = plan.data.rows, len(plan.data.parties)
    schedules = schedules or [make_schedule(config, rows, client, own_seed) for client in range(clients)]
    model = plan.models[index] if own is None else own.model
    features = party.features if with_held_out else party.features[plan.data.train]
    kind: Callable[..., Client] = Client
    if config.privacy.secure_sum:
        names = [party.name for party in plan.data.parties]
        keys = KeyAgreement(config.network.run_id, names, index, witness or NoKeySigner())
        kind = partial(MaskedClient, keys=keys)
    return kind(
        index,
        features if own is None else own.features,
        model,
        _descent(config, model, average=own is None or own.updates is None),
        schedules[index],
        make_refresh(config, index, schedules),
        config.rule,
        l2=config.optimiser.l2,
        embed_batch=own.updates if own else None,
        perturb=own.release if own else None,
        budget=own.budget if own else None,
    )


def _descent(config: Config, model: nn.Module, *, server: bool = False, average: bool = True) -> Descent:
    if average and config.optimiser.average:
        return Descent.averaging(config.optimiser, model, server=server)
    return Descent.of(config.optimiser, model.parameters(), server=server)


def make_schedule(config: Config, rows: int, index: int, own_seed: int | None = None) -> BatchSchedule:
    """The minibatches of client `index`; all clients have the same ones under the sync rule."""
    settings = config.schedule
    if config.rule.name in ("sync", "centralised"):
        stream = _COMMON_STREAM
    else:
        stream = index + 1 + (_PRIVATE_STREAMS if settings.seed == "private" else 0)
    seed = config.seed if own_seed is None else own_seed
    return BatchSchedule(settings.kind, rows, settings.batch_size, seed, stream)


def make_refresh(config: Config, index: int, schedules: Sequence[BatchSchedule]) -> Refresh:
    """Which rows client `index` refreshes; nothing is ever stale under the sync rule."""
    name, count = parse_refresh(config.schedule.refresh)
    if name == "none" or config.rule.name == "sync":
        return NoRefresh()
    if name == "all":
        return RefreshAll()
    if name == "lookahead":
        return Lookahead(index, schedules)
    own = schedules[index]
    key = np.random.SeedSequence((own.seed, _REFRESH_STREAMS + index))
    return RandomRefresh(own.rows, count, np.random.Generator(np.random.Philox(key)))


def _centralised(plan: Plan) -> Centralised:
    config = plan.config
    modules = [*plan.models, plan.head]
    descents = [_descent(config, module, server=module is plan.head) for module in modules]
    *models, head = (descent.trains(module) for descent, module in zip(descents, modules, strict=True))
    return Centralised(
        [party.features[plan.data.train] for party in plan.data.parties],
        plan.data.labels[plan.data.train],
        models,
        head,
        plan.loss,
        descents,
        make_schedule(config, plan.data.rows, 0),
        summed=config.model.combine == "sum",
        l2=config.optimiser.l2,
        weights=plan.weights,
    )


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """Lets torch, and numpy's products, use so many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with threadpool_limits(count, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)
