"""`vafl importance`: measure how much each party's features matter. No party reveals its features."""

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from torch import Tensor

from vafl.arrays import RowIds
from vafl.config import Config
from vafl.errors import Stalled
from vafl.models.metrics import Metrics
from vafl.observe.counting import CountProgress
from vafl.observe.importance import Importance, Measured
from vafl.protocol.importance import ImportanceScorer
from vafl.protocol.messages import EVERYTHING, ServerMessage
from vafl.protocol.prediction_client import PredictionClient
from vafl.run.agreement import rows_at_once
from vafl.run.assembly import limited_threads
from vafl.run.importance_driver import Questions
from vafl.run.local import serve_with
from vafl.run.model_store import model_folder
from vafl.run.permutations import Effect, Study
from vafl.run.predict import Deployed, local_answers
from vafl.run.prediction_driver import Served
from vafl.run.prediction_records import held_out
from vafl.transport.grpc.client import FederationClient
from vafl.transport.grpc.wire import printable, run
from vafl.transport.identity import SERVER

log = logging.getLogger("vafl.importance")

REPEATS, ROWS = 5, 20_000  # defaults of `vafl importance`


def is_local(run_folder: Path, parties: Sequence[str]) -> bool:
    """Return whether the models of all clients are in this run folder."""
    return all(model_folder(run_folder, party).is_dir() for party in parties)


def measure_over_network(
    config: Config,
    run_folder: Path,
    console: Console,
    *,
    repeats: int = REPEATS,
    rows: int = ROWS,
    listening: Callable[[str], None] = lambda address: None,
    accept_ledger: bool = False,
) -> Importance:
    """Measure importance as the server of a federation.

    The clients run `vafl importance`, `vafl predict` or `vafl serve`.

    Args:
        repeats: number of permutations of each group of features.
        rows: the most held-out rows to measure on. If there are more, a random sample is used.
        listening: called with the server's address once clients can connect.
        accept_ledger: continue if the ledger of the label holder's own client lacks its last mark.

    Raises:
        KeyboardInterrupt: a signal ended the measurement.
        Stalled: no client answered.
    """
    deployed = Deployed.load(config, SERVER, run_folder)
    config, scorer = deployed.config, deployed.importance_scorer()
    study = _study(deployed, scorer, repeats, rows)
    questions = Questions(study, config.prediction.patience)
    counted = CountProgress(console, "permutations")
    with limited_threads(config.threads), counted:

        def drive(federation: Served) -> list[ServerMessage]:
            messages = questions(federation)
            _show(counted, study)
            return messages

        federation = deployed.serve(scorer, drive)
        local = local_answers(deployed, federation, accept_ledger=accept_ledger)
        run(_until_measured(federation, local, questions, listening))
        if questions.interrupted:
            raise KeyboardInterrupt
    return _result(study, repeats)


def measure_locally(
    config: Config,
    configs: Callable[[str], Config],
    run_folder: Path,
    console: Console,
    *,
    repeats: int = REPEATS,
    rows: int = ROWS,
) -> Importance:
    """Measure importance with all parties in this process, after a simulation or `vafl up`.

    The same clients answer the same requests as over a network, and private clients charge their ledgers.

    Args:
        configs: returns the configuration of a client, by name.
        repeats, rows: as for `measure_over_network`.
    """
    deployed = Deployed.load(config, SERVER, run_folder)
    scorer = deployed.importance_scorer()
    study = _study(deployed, scorer, repeats, rows)
    counted = CountProgress(console, "permutations")
    clients: list[PredictionClient] = []
    try:
        for party in deployed.parties:
            client_config = _by_column(configs(party))
            clients.append(Deployed.load(client_config, party, run_folder).prediction_client())
        with limited_threads(deployed.config.threads), counted:
            for client in clients:
                _deliver(scorer, clients, scorer.receive(client.join()))
            while not study.is_done:
                _deliver(scorer, clients, study.advance())
                _show(counted, study)
    finally:
        for client in clients:
            client.close()
    return _result(study, repeats)


def _by_column(config: Config) -> Config:
    """Return the configuration with importance measured by column, unless the client is private or refuses.

    On one machine no other party learns the column names. A private client keeps its setting, because every
    column is charged to its ledger.
    """
    if config.privacy.kind != "none" or config.prediction.importance == "none":
        return config
    return replace(config, prediction=replace(config.prediction, importance="columns"))


def _deliver(
    scorer: ImportanceScorer, clients: list[PredictionClient], messages: Sequence[ServerMessage]
) -> None:
    """Deliver the messages, and all messages that the parties send in response."""
    queue = list(messages)
    while queue:
        message = queue.pop(0)
        for reply in clients[message.client].receive(message):
            queue += scorer.receive(reply)


def _study(deployed: Deployed, scorer: ImportanceScorer, repeats: int, rows: int) -> Study:
    config, manifest = deployed.config, deployed.model.manifest
    tested, labels = held_out(config, deployed.model)
    most = min(rows, rows_at_once(config, max(manifest.widths)))
    tested, labels = _sample(tested, labels, most, config.seed)
    metrics = Metrics.of(deployed.loss, manifest.outputs, config.model.metric)
    if deployed.loss != "softmax":
        labels = labels.float()
    return Study(scorer, deployed.parties, tested, labels, metrics, repeats, deployed.decision.calibration)


def _sample(rows: RowIds, labels: Tensor, most: int, seed: int) -> tuple[RowIds, Tensor]:
    """Return a random sample of at most `most` rows, ascending, and their labels."""
    if len(rows) <= most:
        return rows, labels
    chosen = np.sort(np.random.default_rng(seed).permutation(len(rows))[:most])
    return rows[chosen], labels[chosen]


def _show(counted: CountProgress, study: Study) -> None:
    if study.planned:
        counted.reach(study.measured, study.planned)


def _result(study: Study, repeats: int) -> Importance:
    parties: dict[str, Measured] = {}
    features: dict[str, dict[str, Measured]] = {}
    for (client, group), effect in study.effects.items():
        if not effect.loss:
            continue
        name = study.names[client]
        if group == EVERYTHING:
            parties[name] = _measured(effect)
        else:
            features.setdefault(name, {})[group] = _measured(effect)
    refused = {study.names[client]: printable(reason) for (client, _), reason in study.refused.items()}
    for name, reason in refused.items():
        log.warning("%s did not answer for all its features: %s", name, reason)
    if not parties and not features:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise Stalled(
            "VFL-7091",
            f"importance needs at least one client that permutes its features. Found none: {reasons}. Ask "
            'the clients to set prediction.importance = "party" and to check their privacy budgets.',
        )
    return Importance(
        study.headline.name, study.loss.name, study.rows, repeats, study.baseline, parties, features, refused
    )


def _measured(effect: Effect) -> Measured:
    mean, deviation = _mean_and_deviation(effect.loss)
    drop, headline_deviation = _mean_and_deviation(effect.headline) if effect.headline else (None, None)
    return Measured(mean, deviation, drop, headline_deviation, effect.rows)


def _mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


async def _until_measured(
    federation: Served,
    local: FederationClient | None,
    questions: Questions,
    listening: Callable[[str], None],
) -> None:
    def interrupt() -> None:
        questions.interrupted = True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    await serve_with(federation, local, listening)
