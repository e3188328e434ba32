"""Runs a configuration with everything around it: progress on the terminal, a folder with the record."""

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
from vafl.data.partition import Party, VerticalData
from vafl.errors import BudgetExhausted, VaflError
from vafl.models.metrics import by_class
from vafl.names import LOCAL_CLIENT
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
from vafl.run.controller import End
from vafl.run.ledgers import read_statements
from vafl.run.model_store import keep_all
from vafl.run.plan import Task, baselines
from vafl.simulation.delays import DelaySettings
from vafl.simulation.simulator import Simulator
from vafl.transport.traffic import Traffic

log = logging.getLogger(__name__)

ALONE = "label holder alone"  # the name of a baseline


def launch(config: Config, path: Path, console: Console, *, overwrite: bool = False) -> RecordedRun:
    """Trains as `config` says and writes the run folder `path`.

    Everything is built and checked before the folder is touched. An interrupt (Ctrl-C, SIGTERM) ends
    the run early but orderly: what was reached is evaluated, saved and marked as interrupted.
    """
    run = build(config)
    with RunFolder(path, overwrite=overwrite) as folder:
        folder.begin(config.to_toml())
        for warning in leakage.warnings(run.data):
            log.warning("%s", warning)
        points, interrupted = _train(run, folder, console)
        run.evaluator.test()  # charged, too
        conclusion = conclude(config, run.task, run.data, run.evaluator.measured)
        keep_all(run, conclusion.decision, path)
        for ledger, party in zip(run.ledgers, run.data.parties, strict=False):
            ledger.save_copy(path / SIMULATED_LEDGERS / f"{party.name}.ledger")
        counts = [status.activations for status in _clients(run)]
        summary = summarise(
            config,
            run.task,
            run.data,
            points[-1],
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
    require_updates(config, run.end, points[-1].updates)
    return recorded


def finish(
    folder: RunFolder,
    summary: dict[str, Any],
    conclusion: Conclusion,
    config: Config,
    data: VerticalData,
    console: Console,
) -> None:
    """Write the scores and the summary; then add what the label holder's features reach alone, if it has any.

    The run is over by then and its clients have gone, so nobody waits for this baseline. Ctrl-C skips it.

    Args:
        config: as the run was started with, before its sizes were set for all clients.
        data: with the labels that the run was trained on.
    """
    folder.keep_scores(conclusion.scores)
    folder.finish(summary)
    if summary["interrupted"] or LOCAL_CLIENT not in [party.name for party in data.parties]:
        return
    console.print("training on the label holder's columns alone, for comparison; Ctrl-C skips it")
    began = time.monotonic()
    try:
        reached = train_alone(config, data)
    except VaflError as error:
        console.print(f"the label holder's columns alone could not be trained on: {error}", style="yellow")
        return
    except KeyboardInterrupt:
        console.print("skipped")
        return
    console.print(f"trained on them in {time.monotonic() - began:.1f} s")
    folder.keep_scores(beside_alone(conclusion.scores, reached.scores))
    folder.finish({**summary, "baselines": {**summary["baselines"], ALONE: dict(reached.figures)}})


def train_alone(config: Config, data: VerticalData) -> Conclusion:
    """Train the same model on the label holder's features alone; nothing is sent to anyone.

    Returns:
        Its metrics and scores on the held-out rows, "validation" and "test".
    """
    alone = replace(
        config,
        rule=RuleSettings(name="centralised"),
        privacy=PrivacySettings(mode="none"),
        labels=LabelSettings(),  # `data` has the labels that were drawn
        delays=DelaySettings(),
    )
    own = tuple(party for party in data.parties if party.name == LOCAL_CLIENT)
    run = build(alone, replace(data, parties=own))
    run.train()
    run.evaluator()
    run.evaluator.test()
    return conclude(alone, run.task, run.data, run.evaluator.measured)


def report_run(config: Config, path: Path) -> Path:
    """Write the report of a finished run and return its path, `path`/report.html.

    Args:
        config: The run's; it says where the privacy ledgers are.
        path: The run folder.
    """
    accounts = [statement.as_json() for statement in read_statements(config, path)]
    return write_report(path, accounts)


def what_was_reached(recorded: RecordedRun) -> str:
    """What whoever ended a run is told."""
    return f"{recorded.summary['updates']:,} updates were made, and what they reached is in {recorded.path}"


def require_updates(config: Config, end: End | None, updates: int) -> None:
    """Raise BudgetExhausted if the privacy budgets did not allow a single update."""
    if end is not None and end.is_in_vain(updates):
        raise BudgetExhausted(
            "VFL-7101",
            f"privacy.mu_max must allow every client some uploads. Found {config.privacy.limit:g}, and no "
            "update was made: the first uploads would cost more than is left. Raise it or the noise; "
            "`vafl calibrate` says what noise a budget needs, `vafl privacy` what earlier runs have spent.",
        )


def _train(run: Run, folder: RunFolder, console: Console) -> tuple[list[Evaluation], bool]:
    """Trains to the end or to an interrupt; every evaluation is shown and recorded as it is made."""
    points: list[Evaluation] = []

    def observe(point: Evaluation) -> None:
        points.append(point)
        folder.append(point)
        progress.observe(point)

    with _progress(run, folder.path, console) as progress, _signals_interrupt():
        try:
            run.train(observe)
        except KeyboardInterrupt:
            if not points:
                raise  # told twice: there is no result, not even of the first models
            return points, True
    return points, False


def _progress(run: Run, folder: Path, console: Console) -> Progress:
    config = run.config
    sizes = f"{len(run.data.parties)} clients, {run.data.rows:,} training rows"
    title = f"{config.rule.name}: {config.data.title}, {sizes}, {config.model.embedding} embedding"
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


def shown_figures(task: Task, data: VerticalData) -> ShownFigures:
    """Return what the display of a run says about its metrics."""
    return ShownFigures(task.metrics.headline.name, data.parts.watched, baselines(task, data))


def share_done(clock: Clock, stop: StopSettings) -> float:
    """How much of a run is over, from 0 to 1, by the limit that is nearest."""
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
        data: with the labels that the run was trained on, which give the trivial baseline.
        last: the last evaluation.
        conclusion: what the kept models give on the held-out rows.
        traffic: what each client sent and received over the network by now; empty if all data are in one
            place.
        simulated: whether `last` has the seconds of the simulator's clock.
        best: the best evaluation, if its models are the ones that are kept.
        end: why the run ended; None if that is not known.
    """
    kept = last if best is None or best.point is None else best.point
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
        # `last` was measured before the test rows were asked for.
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
    """Return the number of rows by part."""
    return asdict(data.parts)


def _columns(party: Party) -> int | None:
    """Return how many columns of its table a party uses; None if that is not known here."""
    if party.encoder is not None:
        return len(party.encoder.columns)
    return math.prod(party.features.shape[1:]) if party.features.numel() else None


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
