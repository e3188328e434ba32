"""Build the objects of a run from its plan. This module is the only one that connects all packages."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from vafl.privacy.mechanism.client_privacy import ClientPrivacy, protect
from vafl.privacy.mechanism.labels import GradientMask
from vafl.protocol.bound import DelayBound
from vafl.protocol.centralised import Centralised
from vafl.protocol.client import AtEvaluation, Client
from vafl.protocol.descent import Descent
from vafl.protocol.lead import Lead
from vafl.protocol.marks import MarkMemory
from vafl.protocol.refresh import (
    Lookahead,
    NoRefresh,
    RandomRefresh,
    RefreshAll,
    RefreshPolicy,
    RefreshTime,
)
from vafl.protocol.rules import Rule
from vafl.protocol.schedule import BatchSchedule, parse_refresh
from vafl.protocol.secure_sum.fixed_point import decode
from vafl.protocol.secure_sum.masks import KeyAgreement, KeySigner, NoKeySigner
from vafl.protocol.secure_sum.sender import MaskedSender
from vafl.protocol.secure_sum.sum_table import SumTable
from vafl.protocol.secure_sum.training import TrainingSums
from vafl.protocol.server import RECALL_ROWS, Server
from vafl.protocol.staleness import DelaySummary
from vafl.protocol.table import EmbeddingTable
from vafl.run.best import BestModels
from vafl.run.controller import End
from vafl.run.drawn_labels import draw_once
from vafl.run.evaluator import Evaluator
from vafl.run.ledgers import is_entered, ledger_path, open_ledger
from vafl.run.plan import Beginning, Plan, Task, make_plan
from vafl.run.simulation_driver import CentralisedRuntime, SimulationDriver, measure
from vafl.simulation.simulator import Simulator
from vafl.transport.codec import Codec

# Random streams: distinct numbers keep the schedules and the refreshes of all clients independent.
_COMMON_STREAM = 0  # clients have the streams 1..M
_PRIVATE_STREAMS = 1_000_000
_REFRESH_STREAMS = 2_000_000


@dataclass
class Run:
    """A simulated run that is ready to train. Callers may inspect and change its objects.

    Attributes:
        ledgers: the privacy ledgers of the private clients, in memory.
        best: the models of the best evaluation, if the last `train` kept them.
        ended: the reason why the last `train` ended.
    """

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
        self,
        observe: Callable[[Evaluation], None] = lambda evaluation: None,
        *,
        keep_best: bool | None = None,
    ) -> list[Evaluation]:
        """Train until a stop criterion holds, and return all evaluations. Set `end` to the reason.

        Args:
            observe: called with every evaluation as soon as it is measured.
            keep_best: whether to restore the models of the best evaluation at the end. That evaluation is
                then `best.evaluation`. None restores them if stop.patience is set.
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
        """Return how stale each client's embeddings were when used; empty for a centralised run."""
        return self.runtime.server.delays.summaries() if isinstance(self.runtime, Simulator) else []


def build(config: Config, data: VerticalData | None = None, beginning: Beginning | None = None) -> Run:
    """Build every object of a simulated run.

    A simulation sends nothing to another machine, so the ledgers of private clients stay in memory.

    Args:
        data, beginning: as for `make_plan`.

    Raises:
        ConfigError, DataError: as for `make_plan`.
    """
    plan = with_drawn_labels(make_plan(config, data, beginning=beginning))
    config = plan.config
    centralised = config.rule.name == "centralised"
    privacies = [None if centralised else make_privacy(plan, index) for index in range(len(plan.models))]
    models, features = plan.models, [party.features for party in plan.data.parties]
    for index, privacy in enumerate(privacies):
        if privacy is not None:  # evaluate what the server would receive, not the features behind it
            features[index] = privacy.features
            models = [*models[:index], privacy.whole_model(), *models[index + 1 :]]
    evaluator = Evaluator(
        models,
        features,
        plan.head,
        plan.data.labels,
        plan.task.metrics,
        plan.data.parts,
        summed=config.model.combine == "sum",
        undo=plan.undo,
        budgets=[privacy.budget for privacy in privacies if privacy is not None],
    )
    runtime = CentralisedRuntime(_centralised(plan)) if centralised else _simulator(plan, privacies)
    ledgers = [privacy.budget.ledger for privacy in privacies if privacy is not None]
    return Run(config, plan.data, plan.task, plan.models, plan.head, runtime, evaluator, ledgers)


def _simulator(plan: Plan, privacies: Sequence[ClientPrivacy | None]) -> Simulator:
    config, parties = plan.config, range(len(plan.models))
    schedules = [make_schedule(config, plan.data.rows, index) for index in parties]
    clients = [make_client(plan, index, schedules, privacy) for index, privacy in enumerate(privacies)]
    names, codec = [party.name for party in plan.data.parties], Codec(config.network.encoding)
    local = names.index(LOCAL_CLIENT) if LOCAL_CLIENT in names else None
    return Simulator(make_server(plan), clients, config.delays, config.seed, codec, local)


def with_drawn_labels(plan: Plan, path: Path | None = None) -> Plan:
    """Return the plan with the labels to train on: randomised if labels.epsilon is set.

    Args:
        path: the file that keeps the randomised labels, unless labels.file names another. None keeps them in
            memory only.
    """
    config, settings, data = plan.config, plan.config.labels, plan.data
    if not settings.epsilon:
        return plan
    path = Path(settings.file) if settings.file else path
    classes = len(data.classes or ())
    table = config.holder_table
    name = config.data.label if table is None else table.label
    drawn = draw_once(data.labels[data.train], classes, settings.epsilon, name, data.record_digest, path)
    return replace(plan, data=replace(data, labels=torch.cat([drawn, data.labels[data.rows :]])))


def make_server(
    plan: Plan,
    table: EmbeddingTable | None = None,
    marks: MarkMemory | None = None,
    *,
    run: int = 0,
    recall_rows: int = RECALL_ROWS,
) -> Server:
    """Create the server of a run.

    Args:
        table: the embedding table; None creates an empty one in memory.
        marks: stores the marks of the clients' ledgers; None keeps them in memory.
        run: the random number that identifies the run.
        recall_rows: the largest number of lost rows in one request.
    """
    config, clients = plan.config, len(plan.data.parties)
    rule = config.rule
    return Server(
        table or make_table(plan, plan.data.rows),
        plan.data.labels[plan.data.train].numpy(),
        plan.head,
        plan.loss,
        _descent(config.of(LABEL_HOLDER), plan.head, server=True),
        Rule.of(rule, clients),
        DelayBound(rule.delay_bound, rule.when_unanswered) if rule.delay_bound else None,
        GradientMask.of(config.labels),
        plan.weights,
        marks=marks,
        run=run,
        last_iteration=config.stop.updates,
        recall_rows=recall_rows,
        sums=TrainingSums(clients, decode) if config.privacy.secure_sum else None,
        lead=Lead(rule.lead, math.ceil(plan.data.rows / config.schedule.batch_size), clients)
        if rule.lead and rule.name != "sync"
        else None,
    )


def make_table(plan: Plan, rows: int) -> EmbeddingTable:
    """Return an empty table in memory. Under a secure sum it stores only the sums of the embeddings."""
    client_widths = widths(plan)
    if plan.config.privacy.secure_sum:
        return SumTable(rows, len(client_widths), client_widths[0])
    return EmbeddingTable(rows, client_widths, summed=plan.config.model.combine == "sum")


def widths(plan: Plan | Run) -> list[int]:
    """Return the embedding width of each client."""
    return plan.config.model.widths([party.name for party in plan.data.parties], plan.task.outputs)


def make_privacy(
    plan: Plan, index: int, run: Path | None = None, *, accept_ledger: bool = False
) -> ClientPrivacy | None:
    """Return the noise and accounting of client `index`; None if neither its settings nor a ledger need them.

    Args:
        run: the run folder; None for a simulation.
        accept_ledger: continue if the ledger lacks the last mark that the server received.
    """
    data, party = plan.data, plan.data.parties[index]
    config = plan.config.of(party.name)
    path = None if run is None else ledger_path(config, party.name, run)
    if not is_entered(config, party.name, path):
        return None
    names = [each.name for each in data.parties]
    ids = data.ids_of(party)
    ledger, accounts = open_ledger(
        config, party.name, ids, data.source, names, run=run, path=path, accept_ledger=accept_ledger
    )
    return protect(
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
    privacy: ClientPrivacy | None = None,
    *,
    with_held_out: bool = False,
    signer: KeySigner | None = None,
    private_seed: int | None = None,
    refresh_rows: int | None = None,
    refresh_time: RefreshTime | None = None,
    at_evaluation: AtEvaluation | None = None,
) -> Client:
    """Create one client of a run. It gets no features of other parties.

    Args:
        schedules: the schedules of all clients, which clients in one process may share; None creates them.
        privacy: makes the client private.
        with_held_out: whether it has the features of the held-out rows, too, so that it can answer for them.
        signer: signs the keys of a secure sum; None leaves them unsigned, for parties in one process.
        private_seed: the seed of a private schedule; None uses the run's seed.
        refresh_time: limits the time spent on look-ahead refreshes; None sets no limit.
        refresh_rows, at_evaluation: as for `Client`.
    """
    party = plan.data.parties[index]
    config = plan.config.of(party.name)
    rows, clients = plan.data.rows, len(plan.data.parties)
    schedules = schedules or [make_schedule(config, rows, client, private_seed) for client in range(clients)]
    model = plan.models[index] if privacy is None else privacy.model
    features = party.features if with_held_out else party.features[plan.data.train]
    sender = None
    if config.privacy.secure_sum:
        names = [party.name for party in plan.data.parties]
        keys = KeyAgreement(config.network.run_id, names, index, signer or NoKeySigner())
        sender = MaskedSender(index, keys)
    return Client(
        index,
        features if privacy is None else privacy.features,
        model,
        _descent(config, model, average=privacy is None or privacy.updates is None),
        schedules[index],
        make_refresh(config, index, schedules, refresh_time),
        config.rule,
        l2=config.optimiser.l2,
        embed_batch=privacy.updates if privacy else None,
        perturb=privacy.release if privacy else None,
        budget=privacy.budget if privacy else None,
        refresh_rows=refresh_rows,
        at_evaluation=at_evaluation,
        sender=sender,
    )


def _descent(config: Config, model: nn.Module, *, server: bool = False, average: bool = True) -> Descent:
    if average and config.optimiser.average:
        return Descent.averaging(config.optimiser, model, server=server)
    return Descent.of(config.optimiser, model.parameters(), server=server)


def make_schedule(config: Config, rows: int, index: int, private_seed: int | None = None) -> BatchSchedule:
    """Return the minibatch schedule of client `index`. Under the sync rule all clients share one schedule."""
    settings = config.schedule
    if config.rule.name in ("sync", "centralised"):
        stream = _COMMON_STREAM
    else:
        stream = index + 1 + (_PRIVATE_STREAMS if settings.seed == "private" else 0)
    seed = config.seed if private_seed is None else private_seed
    return BatchSchedule(settings.kind, rows, settings.batch_size, seed, stream)


def make_refresh(
    config: Config, index: int, schedules: Sequence[BatchSchedule], time: RefreshTime | None = None
) -> RefreshPolicy:
    """Return the rule by which client `index` refreshes rows. The sync rule needs none: no row is stale."""
    name, count = parse_refresh(config.schedule.refresh)
    if name == "none" or config.rule.name == "sync":
        return NoRefresh()
    if name == "all":
        return RefreshAll()
    if name == "lookahead":
        return Lookahead(index, schedules, time)
    schedule = schedules[index]
    key = np.random.SeedSequence((schedule.seed, _REFRESH_STREAMS + index))
    return RandomRefresh(schedule.rows, count, np.random.Generator(np.random.Philox(key)))


def _centralised(plan: Plan) -> Centralised:
    config = plan.config
    modules = [*plan.models, plan.head]
    owners = [*(config.of(party.name) for party in plan.data.parties), config.of(LABEL_HOLDER)]
    descents = [
        _descent(own, module, server=module is plan.head) for own, module in zip(owners, modules, strict=True)
    ]
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
    """Limit torch and the BLAS library of NumPy to `count` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with threadpool_limits(count, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)
