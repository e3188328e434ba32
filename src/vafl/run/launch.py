"""Run a simulation from a configuration, show its progress and write its run folder."""

import logging
import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from vafl.config import Config
from vafl.config.run_settings import StopSettings
from vafl.data import leakage
from vafl.data.encoding import Encoder
from vafl.data.partition import Party, VerticalData
from vafl.errors import BudgetExhausted, VaflError
from vafl.models.metrics import by_class
from vafl.names import LOCAL_CLIENT, SERVER
from vafl.observe.evaluation import Clock, Evaluation
from vafl.observe.plots import plot_runs
from vafl.observe.progress import Progress, ShownFigures
from vafl.observe.record import SIMULATED_LEDGERS, RecordedRun, RunFolder, read_run, versions
from vafl.observe.report import write_report
from vafl.observe.status import ClientStatus
from vafl.privacy.settings import LabelSettings, PrivacySettings
from vafl.protocol.settings import RuleSettings
from vafl.protocol.staleness import DelaySummary
from vafl.run.assembly import Run, build
from vafl.run.best import Best
from vafl.run.conclusion import Conclusion, beside_alone, conclude
from vafl.run.continued import beginning_of
from vafl.run.controller import End
from vafl.run.ledgers import read_statements
from vafl.run.model_store import keep_all
from vafl.run.plan import Task, baselines
from vafl.simulation.delays import DelaySettings
from vafl.simulation.simulator import Simulator
from vafl.transport.traffic import Traffic

log = logging.getLogger(__name__)

ALONE = "label holder alone"  # the name of a baseline


def launch(
    config: Config, path: Path, console: Console, *, overwrite: bool = False, earlier: Path | None = None
) -> RecordedRun:
    """Train in a simulation, write the run folder `path` and return the recorded run.

    Build and check everything before the folder is changed. Ctrl-C and SIGTERM end the run early: the models
    are still evaluated and saved, and the run is marked as interrupted.

    Args:
        earlier: the folder of a run whose models this one starts with.

    Raises:
        KeyboardInterrupt: the run was interrupted.
        BudgetExhausted: the privacy budget allowed no update.
    """
    run = build(config, beginning=beginning_of(config, path, earlier))
    with RunFolder(path, overwrite=overwrite) as folder:
        folder.begin(config.to_toml())
        for warning in leakage.warnings(run.data):
            log.warning("%s", warning)
        evaluations, interrupted = _train(run, folder, console)
        run.evaluator.test()  # before the ledgers are saved, because it is charged to them
        conclusion = conclude(config, run.task, run.data, run.evaluator.measured)
        keep_all(run, conclusion.decision, path)
        for ledger, party in zip(run.ledgers, run.data.parties, strict=False):
            ledger.save_copy(path / SIMULATED_LEDGERS / f"{party.name}.ledger")
        counts = [status.activations for status in _clients(run)]
        summary = summarise(
            config,
            run.task,
            run.data,
            evaluations[-1],
            run.delays(),
            counts,
            traffic=run.runtime.traffic if isinstance(run.runtime, Simulator) else (),
            simulated=True,
            interrupted=interrupted,
            conclusion=conclusion,
            best=run.best,
            end=run.end,
        )
        finish(folder, summary, conclusion, config, run.data, console)
    recorded = read_run(path)
    plot_runs([recorded], path / "progress")
    report_run(config, path)
    if interrupted:
        raise KeyboardInterrupt(what_was_reached(recorded))
    require_updates(config, run.end, evaluations[-1].updates)
    return recorded


def finish(
    folder: RunFolder,
    summary: dict[str, Any],
    conclusion: Conclusion,
    config: Config,
    data: VerticalData,
    console: Console,
) -> None:
    """Write the scores and the summary, then add the baseline "label holder alone".

    The baseline needs features at the label holder. It is trained after the clients have disconnected, so
    that they do not wait for it. Ctrl-C skips it.

    Args:
        config: the configuration that the run was started with, before `sized` filled it in for all clients.
        data: the run's data, with the labels that the run was trained on.
    """
    folder.keep_scores(conclusion.scores)
    folder.finish(summary)
    if summary["interrupted"] or LOCAL_CLIENT not in [party.name for party in data.parties]:
        return
    console.print("training a baseline on the label holder's columns alone; press Ctrl-C to skip it")
    began = time.monotonic()
    try:
        reached = train_alone(config, data)
    except VaflError as error:
        console.print(f"the baseline on the label holder's columns failed: {error}", style="yellow")
        return
    except KeyboardInterrupt:
        console.print("skipped the baseline")
        return
    console.print(f"trained the baseline in {time.monotonic() - began:.1f} s")
    folder.keep_scores(beside_alone(conclusion.scores, reached.scores))
    folder.finish({**summary, "baselines": {**summary["baselines"], ALONE: dict(reached.figures)}})


def train_alone(config: Config, data: VerticalData) -> Conclusion:
    """Train the same model on the label holder's features alone, in this process.

    Returns:
        The baseline's metrics and scores on the held-out rows, "validation" and "test".
    """
    own, width = config.parties.get(SERVER), config.model.width
    alone = replace(
        config,
        parties={} if own is None else {SERVER: replace(own, privacy=None)},
        model=replace(config.model, width=width if isinstance(width, int) else width.get(SERVER, 0)),
        rule=RuleSettings(name="centralised"),
        privacy=PrivacySettings(mode="none"),
        labels=LabelSettings(),  # `data` already has the randomised labels
        delays=DelaySettings(),
    )
    label_holder = tuple(party for party in data.parties if party.name == LOCAL_CLIENT)
    run = build(alone, replace(data, parties=label_holder))
    run.train()
    run.evaluator()
    run.evaluator.test()
    return conclude(alone, run.task, run.data, run.evaluator.measured)


def report_run(config: Config, path: Path) -> Path:
    """Write the report of a finished run and return its path, `path`/report.html.

    Args:
        config: The run's configuration, which locates the privacy ledgers.
        path: The run folder.
    """
    accounts = [statement.as_json() for statement in read_statements(config, path)]
    return write_report(path, accounts)


def what_was_reached(recorded: RecordedRun) -> str:
    """Return the message for a user who interrupted a run."""
    return f"{recorded.summary['updates']:,} updates were made, and what they reached is in {recorded.path}"


def require_updates(config: Config, end: End | None, updates: int) -> None:
    """Raise BudgetExhausted if the privacy budgets did not allow a single update."""
    if end is not None and end.is_in_vain(updates):
        raise BudgetExhausted(
            "VFL-7101",
            f"privacy.mu_max must allow every client some uploads. Found {config.privacy.limit:g}, and no "
            "update was made: the first uploads would exceed the budget. Raise privacy.mu_max or the noise. "
            "`vafl calibrate` computes the noise for a budget. `vafl privacy` shows what earlier runs have "
            "spent.",
        )


def _train(run: Run, folder: RunFolder, console: Console) -> tuple[list[Evaluation], bool]:
    """Train until the run ends or is interrupted; show and record every evaluation.

    Returns:
        The evaluations, and whether the run was interrupted.
    """
    evaluations: list[Evaluation] = []

    def observe(evaluation: Evaluation) -> None:
        evaluations.append(evaluation)
        folder.append(evaluation)
        progress.observe(evaluation)

    with _progress(run, folder.path, console) as progress, _signals_interrupt():
        try:
            run.train(observe)
        except KeyboardInterrupt:
            if not evaluations:
                raise  # interrupted before the first evaluation: there is no result to save
            return evaluations, True
    return evaluations, False


def _progress(run: Run, folder: Path, console: Console) -> Progress:
    config = run.config
    sizes = f"{len(run.data.parties)} clients, {run.data.rows:,} training rows"
    title = f"{config.rule.name}: {config.data.title}, {sizes}, {embeddings(config)}"
    if config.rule.name == "centralised" and config.privacy.kind != "none":
        title += ", without the noise of [privacy]"
    return Progress(
        console,
        folder,
        title,
        shown_figures(run.task, run.data),
        run.runtime,
        partial(share_done, run.runtime, config.stop),
        lambda: _clients(run),
        run.delays,
    )


def embeddings(config: Config) -> str:
    """Return the embeddings of the parties, for titles: "tabular embedding", "cnn, lstm embeddings"."""
    own = [settings.embedding.model for settings in config.parties.values() if settings.embedding is not None]
    names = list(dict.fromkeys(own or [config.embedding.model]))
    return f"{', '.join(names)} embedding{'s' if len(names) > 1 else ''}"


def shown_figures(task: Task, data: VerticalData) -> ShownFigures:
    """Return the facts about a run's metrics that its progress display needs."""
    return ShownFigures(task.metrics.headline.name, data.parts.watched, baselines(task, data))


def share_done(clock: Clock, stop: StopSettings) -> float:
    """Return the completed share of a run, from 0 to 1, by the limit that will be reached first."""
    by_time = clock.now / stop.seconds if stop.seconds else 0.0
    return min(1.0, max(clock.updates / stop.updates, by_time))


def _clients(run: Run) -> list[ClientStatus]:
    if not isinstance(run.runtime, Simulator):
        return []
    server = run.runtime.server
    rows = zip(run.data.parties, server.activations, run.runtime.traffic, strict=True)
    return [
        ClientStatus(party.name, count, traffic.bytes_up, traffic.bytes_down, index in server.absent)
        for index, (party, count, traffic) in enumerate(rows)
    ]


def summarise(
    config: Config,
    task: Task,
    data: VerticalData,
    last: Evaluation,
    delays: Sequence[DelaySummary],
    activations: Sequence[int],
    *,
    traffic: Sequence[Traffic],
    simulated: bool,
    interrupted: bool,
    conclusion: Conclusion,
    best: Best | None = None,
    end: End | None,
) -> dict[str, Any]:
    """Return the content of summary.json, for any kind of run.

    Args:
        data: the run's data, with the labels it was trained on. They determine the trivial baseline.
        last: the last evaluation.
        delays, activations: of each client.
        traffic: the bytes that each client sent and received; empty for a centralised run.
        simulated: whether the seconds in `last` are those of the simulator's clock.
        conclusion: the results of the kept models on the held-out rows.
        best: the best evaluation, if its models are the ones that are kept.
        end: the reason why the run ended; None if it is not known.
    """
    kept = last if best is None or best.evaluation is None else best.evaluation
    names, classes = [party.name for party in data.parties], data.classes or ()
    watched = data.parts.watched
    figures, outputs = {watched: kept.metrics, **conclusion.figures}, conclusion.outputs
    several = task.loss == "softmax" and task.outputs > 2
    return {
        "data": config.data.title,
        "classes": list(classes),
        "rows": _row_counts(data),
        "columns": {party.name: _columns(party) for party in data.parties},
        "rule": config.rule.name,
        "clients": len(names),
        "updates": last.updates,
        "seconds": last.seconds,
        # Not from `last`: the clients sent their embeddings of the test rows after that evaluation.
        "bytes_up": sum(moved.bytes_up for moved in traffic),
        "bytes_down": sum(moved.bytes_down for moved in traffic),
        "traffic": {
            name: {"bytes_up": moved.bytes_up, "bytes_down": moved.bytes_down}
            for name, moved in zip(names, traffic, strict=False)
        },
        "simulated": simulated,
        "metric": {
            "name": task.metrics.headline.name,
            "value": figures[watched].get(task.metrics.headline.name),
        },
        "unanswered": kept.unanswered,
        "kept": {
            "updates": kept.updates,
            "seconds": kept.seconds,
            "selected_by": None if best is None else task.metrics.select.name,
            "validation": figures.get("validation"),
            "test": figures.get("test"),
            "classes": by_class(outputs["test"], data.labels[data.test], classes)
            if several and "test" in outputs
            else None,
        },
        "calibration": conclusion.calibration,
        "decision": conclusion.threshold,
        "baselines": baselines(task, data),
        "watched": watched,
        "delays": {name: asdict(delay) for name, delay in zip(names, delays, strict=False)},
        "activations": dict(zip(names, activations, strict=False)),
        "labels": config.labels.report(len(classes)),
        "privacy": {"mode": config.privacy.kind, "secure_sum": config.privacy.secure_sum},
        "ended": "" if end is None else end.text,
        "ending": None if end is None else end.reason.name,
        "interrupted": interrupted,
        "seed": config.seed,
        "versions": versions(),
    }


def _row_counts(data: VerticalData) -> dict[str, int]:
    """Return the number of rows in each part."""
    return asdict(data.parts)


def _columns(party: Party) -> int | None:
    """Return how many columns a party uses, or how many numbers a record has without columns.

    None if this process does not know it.
    """
    if not party.features.numel():
        return None
    if isinstance(party.encoder, Encoder):
        return len(party.encoder.columns)
    return math.prod(party.features.shape[1:] if party.encoder is None else party.encoder.record_shape)


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, as Ctrl-C does, inside the block."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
