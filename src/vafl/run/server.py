"""The server's part of a run: its durable state, progress, evaluation and the run folder.

`ServerRun.run` does everything in this order:

    plan and check ──> lock the run folder ──> restore or create the state ──> serve ──> conclude ──> report

Invariants:

- A configuration that cannot run fails before the run folder is changed.
- A checkpoint exists from before the first client connects, so a killed server can always be resumed.
- The first SIGINT or SIGTERM ends the run after a last evaluation. The second ends it at once.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from vafl.config import Config
from vafl.data import leakage
from vafl.errors import RunError, VaflError
from vafl.files import make_private_folder
from vafl.names import LOCAL_CLIENT
from vafl.observe.evaluation import Evaluation
from vafl.observe.plots import plot_runs
from vafl.observe.progress import Progress
from vafl.observe.record import RecordedRun, RunFolder, read_run
from vafl.observe.status import ClientStatus
from vafl.protocol.server import RECALL_ROWS, Server
from vafl.run.agreement import STATE, make_terms, over_network, require_same_run, rows_at_once
from vafl.run.assembly import limited_threads, widths
from vafl.run.conclusion import Conclusion, conclude
from vafl.run.continued import beginning_of, keep_encoder
from vafl.run.controller import Phase, RunController
from vafl.run.credentials import load_credentials
from vafl.run.launch import (
    finish,
    report_run,
    require_updates,
    share_done,
    shown_figures,
    summarise,
    what_was_reached,
)
from vafl.run.local import local_client, serve_with
from vafl.run.marks import MarkFile, marks_path
from vafl.run.model_store import keep_head, run_name, stand_ins
from vafl.run.network_driver import NetworkDriver
from vafl.run.plan import Plan, make_plan, sized
from vafl.run.server_state import ServerState
from vafl.transport.grpc.admission import require_free
from vafl.transport.grpc.client import FederationClient
from vafl.transport.grpc.server import FederationServer
from vafl.transport.grpc.wire import run
from vafl.transport.identity import SERVER, Credentials

log = logging.getLogger("vafl.server")

_WATCHED_EVERY = 1.0  # seconds between two calls of `ServerRun.watch`


@dataclass
class ServerRun:
    """Run the server, show its progress and write the run folder.

    Args:
        prepare: called when the run folder exists and is empty; returns the configuration to use from then
            on.
        watch: called every second; an exception that it raises ends the run.
        accept_ledger: continue if the ledger of the label holder's own client lacks its last mark.
        earlier: the folder of a run whose models this one starts with.
    """

    config: Config
    path: Path
    console: Console
    resume: bool = False
    overwrite: bool = False
    prepare: Callable[[], Config] | None = None
    watch: Callable[[], None] = lambda: None
    accept_ledger: bool = False
    earlier: Path | None = None

    def run(self, listening: Callable[[str], None] = lambda address: None) -> RecordedRun:
        """Serve until the run is over, write the run folder and return the recorded run.

        Args:
            listening: called with the server's address once clients can connect.

        Raises:
            KeyboardInterrupt: a signal ended the run. The run folder is complete if the run was evaluated.
        """
        original = self.config = over_network(self.config)
        beginning = beginning_of(self.config, self.path, self.earlier, party=SERVER, resume=self.resume)
        plan = make_plan(self.config, party=SERVER, beginning=beginning)
        self.config = plan.config
        if self.prepare is None:
            load_credentials(self.config, SERVER)  # fail before the run folder is changed
        if self.resume:
            require_same_run(self.path / STATE / SERVER, make_terms(plan))
        most_rows = rows_at_once(self.config, max(widths(plan)))  # fail early, too
        require_free(self.config.network.address)
        opened = RunFolder(self.path, overwrite=self.overwrite, resume=self.resume)
        with opened as folder, limited_threads(self.config.threads):
            if self.prepare is not None:
                prepared = over_network(self.prepare())
                self.config = sized(prepared, plan.data.rows, len(plan.data.parties))
            credentials = load_credentials(self.config, SERVER)
            make_private_folder(self.path / STATE)
            for own in plan.data.parties if self.earlier is not None else ():
                if own.name == LOCAL_CLIENT:
                    keep_encoder(self.path / STATE / LOCAL_CLIENT, own.encoder)
            marks = MarkFile(marks_path(self.config, self.path), [party.name for party in plan.data.parties])
            recall_rows = min(RECALL_ROWS, most_rows)
            state = ServerState(
                plan, self.path / STATE / SERVER, resume=self.resume, marks=marks, recall_rows=recall_rows
            )
            folder.begin(self.config.to_toml())
            if leak := self.config.labels.leak:
                log.warning("%s", leak)
            for warning in leakage.warnings(plan.data):
                log.warning("%s", warning)
            evaluations = folder.rewind(state.facts.get("account", {}).get("seconds", 0.0))
            observers = [evaluations.append, folder.append]
            driver, federation = self._assemble(plan, state, credentials, evaluations, observers, most_rows)
            local = local_client(
                replace(plan, config=self.config),
                self.path,
                state.terms,
                federation,
                credentials,
                resume=self.resume,
                accept_ledger=self.accept_ledger,
            )
            with (
                self._progress(state.plan, federation, driver) as progress,
                nullcontext() if local is None else local.saved(),
            ):
                observers.append(progress.observe)
                local_federation = None if local is None else local.federation
                run(_serve(federation, driver.controller, listening, self.watch, local_federation))
            require_updates(self.config, driver.controller.end, state.server.iteration)
            if driver.controller.has_result or state.server.iteration:
                defaults = stand_ins(plan.data, state.server.table, driver.measured)
                conclusion = conclude(self.config, plan.task, state.plan.data, state.outputs)
                keep_head(plan, conclusion.decision, defaults, self.path, run_name(state.server.run))
                summary = self._summary(state.plan, federation, evaluations, driver, conclusion)
                finish(folder, summary, conclusion, original, state.plan.data, self.console)
            self._require_result(driver.controller, state.server.iteration)
        recorded = read_run(self.path)
        plot_runs([recorded], self.path / "progress")
        report_run(self.config, self.path)
        if driver.controller.interrupted:
            raise KeyboardInterrupt(what_was_reached(recorded))
        return recorded

    def _assemble(
        self,
        plan: Plan,
        state: ServerState,
        credentials: Credentials | None,
        evaluations: Sequence[Evaluation],
        observers: Sequence[Callable[[Evaluation], None]],
        most_rows: int,
    ) -> tuple[NetworkDriver, FederationServer[Server]]:
        """Create the driver, and the server that calls it.

        Args:
            evaluations: those from before this process.
            observers: called with each evaluation, in order.
            most_rows: rows of embeddings that fit into one message.
        """

        def observe(evaluation: Evaluation) -> None:
            for each in observers:
                each(evaluation)

        config, data = self.config, plan.data
        best = state.best if config.stop.patience else None
        tests = data.test if data.parts.validation else slice(0, 0)
        controller = RunController(
            config.stop,
            config.evaluation,
            plan.task.metrics,
            has_test_rows=tests.stop > tests.start,
            checkpoint_every=config.network.checkpoint_every,
            has_result=bool(evaluations),
        )
        for evaluation in evaluations:
            controller.recall(evaluation)
        if best is not None and best.evaluation is not None and best.evaluation not in evaluations:
            # A crash removed this evaluation from the history, but its models are still on disk.
            controller.recall(best.evaluation)
        driver = NetworkDriver(
            controller=controller,
            best=best,
            held_out=np.arange(data.held_out.start, data.held_out.stop),
            labels=data.labels[data.held_out],
            tests=np.arange(tests.start, tests.stop),
            test_labels=data.labels[tests],
            metrics=plan.task.metrics,
            loss=plan.loss,
            observe=observe,
            checkpoint=lambda: state.save(federation.account()),
            answer_timeout=config.network.answer_timeout,
            most_rows=most_rows,
            undo=state.plan.undo,
            outputs=state.outputs,
        )
        names = [party.name for party in plan.data.parties]
        federation = FederationServer(state.server, names, state.terms, config.network, credentials, driver)
        if account := state.facts.get("account"):
            federation.resume(account)
        return driver, federation

    def _progress(self, plan: Plan, federation: FederationServer[Server], driver: NetworkDriver) -> Progress:
        def clients() -> list[ClientStatus]:
            connected, vitals, server = federation.connections, federation.vitals, federation.server
            rows = zip(federation.parties, server.activations, federation.traffic, strict=True)
            return [
                ClientStatus(
                    name,
                    count,
                    traffic.bytes_up,
                    traffic.bytes_down,
                    index not in connected,
                    silent=0.0
                    if index in server.finished or server.owes_reply(index)
                    else federation.silence(index),
                    alarms=tuple(f"{alarm.kind}: {alarm.text}" for alarm in vitals.alarms(index)),
                )
                for index, (name, count, traffic) in enumerate(rows)
            ]

        config, sizes = self.config, f"{len(federation.parties)} clients, {plan.data.rows:,} training rows"
        title = f"{config.rule.name} over {config.network.security}: {config.data.title}, {sizes}"
        return Progress(
            self.console,
            self.path,
            title,
            shown_figures(plan.task, plan.data),
            federation,
            partial(share_done, federation, config.stop),
            clients,
            federation.server.delays.summaries,
            lambda: federation.to_come or driver.waiting,
        )

    def _summary(
        self,
        plan: Plan,
        federation: FederationServer[Server],
        evaluations: list[Evaluation],
        driver: NetworkDriver,
        conclusion: Conclusion,
    ) -> dict[str, Any]:
        server = federation.server
        unmeasured = Evaluation(federation.now, federation.updates, *federation.bytes_moved, None, None)
        summary = summarise(
            self.config,
            plan.task,
            plan.data,
            evaluations[-1] if evaluations else unmeasured,
            server.delays.summaries(),
            server.activations,
            traffic=federation.traffic,
            simulated=False,
            interrupted=driver.controller.interrupted,
            conclusion=conclusion,
            best=driver.best,
            end=driver.controller.end,
        )
        return {
            **summary,
            "missing_at_start": federation.missing_at_start,
            "violations": federation.violations,
            "clients_seen": federation.vitals.report(),
            "model_alarms": federation.vitals.model_report(),
            "durable": list(server.durable),
        }

    def _require_result(self, controller: RunController, updates: int) -> None:
        """Raise RunError if the run ended without an evaluation. The trained models are on disk by then."""
        if controller.has_result:
            return
        if controller.interrupted:
            raise KeyboardInterrupt
        kept = f'The models after {updates:,} updates are in "{self.path}".' if updates else ""
        raise RunError(
            "VFL-7213",
            "a run needs at least one evaluation, for which clients must send embeddings of the held-out "
            f"rows. Found none in {updates:,} updates. The log names the clients that did not answer. {kept} "
            "Repair those clients, then restart every party with --resume.",
        )


class _ToldTwice(Exception):
    """A second signal arrived: stop without the last evaluation."""


async def _serve(
    federation: FederationServer[Server],
    controller: RunController,
    listening: Callable[[str], None],
    watch: Callable[[], None],
    local: FederationClient | None = None,
) -> None:
    def interrupt() -> None:
        if controller.phase is Phase.ENDED:
            log.info("the run has already ended; notifying its clients")
            return
        if controller.interrupted:
            federation.fail(
                _ToldTwice(), "the server was stopped at once; restart with --resume when it is back"
            )
        else:
            log.info("stopping: evaluating and saving the models first; signal again to stop at once")
        controller.interrupt()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    watching = asyncio.create_task(_watch(federation, watch))
    try:
        await serve_with(federation, local, listening)
    except _ToldTwice:
        raise KeyboardInterrupt from None
    finally:
        watching.cancel()


async def _watch(federation: FederationServer[Server], watch: Callable[[], None]) -> None:
    try:
        while True:
            await asyncio.sleep(_WATCHED_EVERY)
            watch()
    except VaflError as error:
        federation.fail(error)
