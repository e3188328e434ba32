"""The durable state of parties: it exists from the start, and is never lost by accident."""

import asyncio
import io
import math
import os
import signal
import threading
from copy import deepcopy
from dataclasses import asdict

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.federation import same
from vafl.config import from_document, read_config
from vafl.config.run_settings import EvaluationSettings, StopSettings
from vafl.errors import RemoteFault, RunFolderError
from vafl.folders import HeldFolder
from vafl.models.metrics import Metrics
from vafl.models.store import read_model
from vafl.observe.evaluation import Evaluation
from vafl.observe.record import RunFolder
from vafl.protocol.messages import Evaluate, Welcome
from vafl.run.agreement import make_terms, require_same_run
from vafl.run.assembly import make_client
from vafl.run.best import BestEmbedding
from vafl.run.checkpoint import has_checkpoint, load_checkpoint
from vafl.run.client import ClientState, run_client, run_until_over
from vafl.run.controller import RunController
from vafl.run.model_store import run_name
from vafl.run.plan import make_plan
from vafl.run.server import ServerRun, _serve
from vafl.run.server_state import ServerState
from vafl.transport.grpc.worker import Worker
from vafl.transport.traffic import Traffic

LOOPBACK = {"security": "plaintext"}
DOCUMENT = {"data": {"name": "iris"}, "network": LOOPBACK}
CONFIG = from_document(DOCUMENT)
TERMS = make_terms(make_plan(CONFIG))


def kept_by_a_client(path):
    """Write the state of client-1 after three activations."""
    client = make_client(make_plan(CONFIG), 0)
    client.activation = 3
    ClientState(client, path / "state" / "client-1", 100, TERMS, resume=False)


def kept_by_a_server(path):
    """Write the state of a server whose run has ended."""
    with RunFolder(path) as folder:
        ServerState(make_plan(CONFIG), path / "state" / "server", resume=False)
        folder.begin(CONFIG.to_toml())
        folder.append(Evaluation(1.5, 20, 1, 2, None, 0.75))
        folder.finish({"metric": {"name": "accuracy", "value": 0.75}})


def contents(path):
    return {entry: entry.read_bytes() for entry in path.rglob("*") if entry.is_file()}


def resume_server(config, path):
    ServerRun(config, path, Console(file=io.StringIO()), resume=True).run()


def resume_client(config, path):
    run_client(config, "client-1", path, resume=True)


@pytest.mark.parametrize(
    ("kept", "resume"), [(kept_by_a_server, resume_server), (kept_by_a_client, resume_client)]
)
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"seed": 7}, r"VFL-7001.*seed was 0, is now 7"),  # the same sizes, but other rows
        ({"partition": {"clients": 3}}, "VFL-7001"),
        ({"schedule": {"batch_size": 7}}, r"VFL-7001.*schedule\.batch_size was 32, is now 7"),
        ({"embedding": {"model": "mlp"}, "model": {"head": "linear", "width": 3}}, "VFL-7001"),
    ],
)
def test_a_run_is_resumed_on_its_own_terms_or_left_as_it_is(tmp_path, kept, resume, other, said):
    kept(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(RunFolderError, match=said):
        resume(from_document({**DOCUMENT, **other}), tmp_path)
    after = contents(tmp_path)
    assert {entry: after[entry] for entry in before} == before


def test_what_may_change_at_a_resume(tmp_path):
    kept_by_a_server(tmp_path)
    network = {"address": "127.0.0.1:9", "encoding": "int8", "patience": 9.0, **LOOPBACK}
    training = {"optimiser": {"step_size": 0.01}, "rule": {"when_unanswered": "use"}}
    other = {"stop": {"updates": 9, "seconds": 8.0}, "evaluation": {"every": 6}, **training}
    plan = make_plan(from_document({**DOCUMENT, "network": network, **other}))
    require_same_run(tmp_path / "state" / "server", make_terms(plan))


def test_a_client_killed_before_its_first_checkpoint_can_be_resumed(tmp_path):
    plan = make_plan(CONFIG)
    ClientState(make_client(plan, 0), tmp_path, 100, TERMS, resume=False)
    client = make_client(plan, 0)
    ClientState(client, tmp_path, 100, TERMS, resume=True)
    assert client.activation == 0


def test_a_server_killed_before_its_first_checkpoint_can_be_resumed(tmp_path):
    ServerState(make_plan(CONFIG), tmp_path, resume=False)
    assert ServerState(make_plan(CONFIG), tmp_path, resume=True).server.iteration == 0


def test_a_resumed_server_goes_on_counting(tmp_path):
    state = ServerState(make_plan(CONFIG), tmp_path, resume=False)
    state.server.table.stored_at[:2] = [[100_000, 99_997], [100_000, 0]]
    state.server.delays.record(state.server.table, np.arange(2), 100_000, 0)
    account = {"seconds": 1.5, "traffic": [asdict(Traffic(1, 2, 3))] * 2, "violations": {"client-1": 4}}
    state.save(account)
    resumed = ServerState(make_plan(CONFIG), tmp_path, resume=True)
    assert resumed.server.delays.summaries() == state.server.delays.summaries()
    assert resumed.facts["account"] == account


def test_a_clients_checkpoint_is_not_replaced_by_accident(tmp_path):
    kept_by_a_client(tmp_path)
    with pytest.raises(RunFolderError, match="VFL-7041"):
        run_client(CONFIG, "client-1", tmp_path)


def test_a_client_that_was_refused_may_try_again_with_another_configuration(tmp_path, monkeypatch):
    def refused(_):
        raise RemoteFault(
            "VFL-0001", "the server refused client-1: optimiser.step_size 0.1 at the server, 50.0 here"
        )

    other = from_document({**DOCUMENT, "optimiser": {"step_size": 50.0}})
    monkeypatch.setattr("vafl.run.client.run_until_over", refused)
    with pytest.raises(RemoteFault):
        run_client(other, "client-1", tmp_path)
    monkeypatch.setattr("vafl.run.client.run_until_over", over)
    assert run_client(CONFIG, "client-1", tmp_path) == "over"
    assert read_config(tmp_path / "config.toml").optimiser == CONFIG.optimiser


def refuse(federation):
    raise RemoteFault("VFL-0001", "the server refused client-1: the terms differ")


def refuse_later(federation):
    federation.welcomed = True
    refuse(federation)


def test_a_client_that_is_refused_leaves_nothing_new_and_shows_no_progress(tmp_path, monkeypatch):
    monkeypatch.setattr("vafl.run.client.run_until_over", refuse)
    shown = io.StringIO()
    with pytest.raises(RemoteFault):
        run_client(CONFIG, "client-1", tmp_path / "runs" / "bank", console=Console(file=shown))
    assert list(tmp_path.iterdir()) == []
    assert shown.getvalue() == ""


@pytest.mark.parametrize("kept", [kept_by_a_server, kept_by_a_client])
def test_a_client_that_is_refused_leaves_what_was_there(tmp_path, monkeypatch, kept):
    kept(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    monkeypatch.setattr("vafl.run.client.run_until_over", refuse)
    with pytest.raises(RemoteFault):
        run_client(CONFIG, "client-2", tmp_path)
    assert contents(tmp_path).keys() - before.keys() <= {tmp_path / "config.toml"}
    assert before.items() <= contents(tmp_path).items()


def test_a_client_that_is_refused_after_it_was_admitted_keeps_its_state(tmp_path, monkeypatch):
    monkeypatch.setattr("vafl.run.client.run_until_over", refuse_later)
    with pytest.raises(RemoteFault):
        run_client(CONFIG, "client-1", tmp_path)
    assert has_checkpoint(tmp_path / "state" / "client-1")


def over(federation):
    """End the run normally before anything has happened."""
    federation.ended = "over"
    return federation.ended


def test_a_client_that_is_back_when_all_is_over_knows_of_which_run_its_model_is(tmp_path, monkeypatch):
    """The run may end before the client is welcomed. Prediction would refuse a model without a run."""

    def welcomed(federation):
        federation.client.receive(Welcome(0, 0, (0, 0), run=77))
        raise KeyboardInterrupt

    monkeypatch.setattr("vafl.run.client.run_until_over", welcomed)
    with pytest.raises(KeyboardInterrupt):
        run_client(CONFIG, "client-1", tmp_path)
    monkeypatch.setattr("vafl.run.client.run_until_over", over)
    run_client(CONFIG, "client-1", tmp_path, resume=True)
    assert read_model(tmp_path / "models" / "client-1").manifest.run == run_name(77)


@pytest.mark.parametrize("refresh", ["none", "random:20"])
def test_nobody_can_compute_a_private_schedule_and_a_client_that_goes_on_keeps_it(
    tmp_path, monkeypatch, refresh
):
    schedule = {"seed": "private", "refresh": refresh}
    config = from_document({"data": {"name": "iris"}, "schedule": schedule, "network": LOOPBACK})

    def drawn(client):
        return [client._schedule.batch(3).tolist(), client._refresh.rows([0, 0]).tolist()]

    def over(federation):
        seen.append(drawn(federation.client))
        return "over"

    seen = []
    monkeypatch.setattr("vafl.run.client.run_until_over", over)
    run_client(config, "client-1", tmp_path / "one")
    run_client(config, "client-1", tmp_path / "one", resume=True)
    run_client(config, "client-1", tmp_path / "other")
    assert seen[0] == seen[1]
    by_seed = drawn(make_client(make_plan(config), 0))
    for mine, others in ((seen[0], seen[2]), (seen[0], by_seed), (seen[2], by_seed)):
        assert mine[0] != others[0]
        assert refresh == "none" or mine[1] != others[1]


@pytest.mark.parametrize("how", [{"resume": True}, {"overwrite": True}])
def test_a_second_client_on_one_folder_is_refused(tmp_path, how):
    """Its checkpoints would replace those of the first client, which has other uploads in flight."""
    kept_by_a_client(tmp_path)
    with (
        HeldFolder(tmp_path / "state" / "client-1"),
        pytest.raises(RunFolderError, match="VFL-1041"),
    ):
        run_client(CONFIG, "client-1", tmp_path, **how)


def test_a_client_saves_itself_when_the_server_has_gone_back(tmp_path):
    """Otherwise its checkpoint would name an iteration that the server counts a second time."""
    client = make_client(make_plan(CONFIG), 0)
    client.iteration = 40
    state = ClientState(client, tmp_path, 100, TERMS, resume=False)
    client.receive(Welcome(0, 30, (0, 0)))
    state.save_if_due()
    assert load_checkpoint(tmp_path)[1]["iteration"] == 30


class Busy:
    """A client with a long turn, during which the user presses Ctrl-C twice."""

    over = False

    async def run(self):
        worker = Worker(pytest.fail)
        worker.do(self._turn)
        try:
            await asyncio.Event().wait()
        finally:
            await worker.stop()

    def _turn(self):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(0.2)
        self.over = True


def test_a_second_interrupt_does_not_end_a_client_amid_a_turn():
    """The client saves its state next. A turn that still runs would make that state inconsistent."""
    busy = Busy()
    with pytest.raises(KeyboardInterrupt):
        run_until_over(busy)
    assert busy.over


def test_ctrl_c_when_a_run_has_ended_does_not_make_it_an_interrupted_one():
    """The signal arrives while the server notifies its clients, which may take some seconds."""
    controller = RunController(StopSettings(), EvaluationSettings(), Metrics.of("binary", 1))
    controller.saved()

    class Federation:
        async def serve(self, listening):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.1)

    asyncio.run(_serve(Federation(), controller, print, lambda: None))
    assert not controller.interrupted


def moved(module):
    """Change the parameters of a module, and return a copy of its state."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    return deepcopy(module.state_dict())


def client_that_keeps_its_best(folder, *, resume):
    best = BestEmbedding(folder, resume=resume)
    return make_client(make_plan(CONFIG), 0, with_held_out=True, at_evaluation=best)


@pytest.mark.parametrize("resume", [False, True])
def test_a_client_goes_back_to_its_model_of_the_best_evaluation(tmp_path, resume):
    """Each request has the number of best evaluations so far: here the first, the third and the fourth.

    The client missed the fourth evaluation, so the server used its embeddings of the third.
    """
    client, rows = client_that_keeps_its_best(tmp_path, resume=False), np.array([149])
    said, models = [], []
    for number, best in enumerate((0, 1, 1, 3)):
        models.append(moved(client.model))
        said += client.receive(Evaluate(0, number, rows, best))
        if resume:
            client = client_that_keeps_its_best(tmp_path, resume=True)
            client.load(models[-1])
    moved(client.model)
    for _ in range(2):  # the message may be repeated
        said += client.receive(Evaluate(0, 9, rows, 3, restore=True))
        assert same(dict(client.model.state_dict()), dict(models[2]))
    assert np.array_equal(said[-1].embeddings, said[2].embeddings)


def test_a_new_run_knows_no_best_evaluation_of_another(tmp_path, caplog):
    rows = np.array([149])
    for best, restore in ((0, False), (1, True)):
        client = client_that_keeps_its_best(tmp_path, resume=False)
        model = moved(client.model)
        client.receive(Evaluate(0, 0, rows, best, restore))
    assert same(dict(client.model.state_dict()), dict(model))
    assert "no model of a best evaluation is stored here" in caplog.text


def test_a_resumed_server_has_the_head_of_the_best_evaluation(tmp_path):
    state, point = (
        ServerState(make_plan(CONFIG), tmp_path, resume=False),
        Evaluation(1.5, 20, 1, 2, None, 0.75),
    )
    head = moved(state.server.head)
    state.outputs["validation"] = outputs = torch.tensor([[0.25], [math.inf]])
    state.best.keep(point)
    moved(state.server.head)
    state.save({})
    resumed = ServerState(make_plan(CONFIG), tmp_path, resume=True)
    assert (resumed.best.evaluation, resumed.best.count) == (point, 1)
    assert not same(dict(resumed.server.head.state_dict()), dict(head))
    resumed.best.restore()
    assert same(dict(resumed.server.head.state_dict()), dict(head))
    assert torch.equal(resumed.outputs["validation"], outputs)


def test_a_server_without_its_table_is_not_resumed(tmp_path):
    """For example, after a run of an old version, which stored the table in other files."""
    ServerState(make_plan(CONFIG), tmp_path, resume=False)
    (tmp_path / "table.records").rename(tmp_path / "cells.f32")
    with pytest.raises(RunFolderError, match="VFL-7036"):
        ServerState(make_plan(CONFIG), tmp_path, resume=True)


def test_a_client_that_averages_resumes_with_its_average_and_with_what_it_trains(tmp_path):
    config = from_document({**DOCUMENT, "optimiser": {"average": True}})
    terms = make_terms(make_plan(config))
    client = make_client(make_plan(config), 0)
    gradients = [np.ones(tuple(own.shape), np.float32) for own in client.descent.parameters]
    for step in range(3):
        client.descent.step(gradients, step)
    ClientState(client, tmp_path, 100, terms, resume=False)
    again = make_client(make_plan(config), 0)
    ClientState(again, tmp_path, 100, terms, resume=True)
    assert same(again.model.state_dict(), client.model.state_dict())
    assert all(map(torch.equal, again.descent.parameters, client.descent.parameters))
    assert not all(map(torch.equal, client.model.parameters(), client.descent.parameters))
