"""A batch over real sockets in one process, with private clients and with a client that never connects."""

import asyncio
import io
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch
from rich.console import Console
from torch import nn

from tests.transport.grpc.parties import complete, configuration
from vafl.config.run_settings import PredictionSettings
from vafl.errors import ConfigError, LedgerError, RemoteFault, Stalled
from vafl.models.probabilities import probabilities
from vafl.observe.scores import ScoreFile
from vafl.privacy.ledger.accounts import KINDS
from vafl.privacy.ledger.ledger import read_ledger
from vafl.protocol.inquiry import ANSWERED
from vafl.protocol.messages import Join, Leave, MaskedRefresh, Offer, Refresh
from vafl.protocol.scoring import Scorer
from vafl.run.assembly import build
from vafl.run.launch import launch
from vafl.run.model_store import open_model, rebuild
from vafl.run.predict import Deployed
from vafl.run.prediction_driver import Batch
from vafl.run.serve import Service
from vafl.transport.grpc.client import FederationClient

PARTIES = ["client-1", "client-2"]


def trained(path, **sections):
    config = configuration(prediction={"chunk": 7}, **sections)
    launch(config, path, Console(file=io.StringIO()))
    return config


def batch_of(config, run, out, present=PARTIES):
    """Run the server and these clients until every record is scored."""
    deployed = Deployed.load(config, "server", run)
    with ScoreFile(out) as file:
        batch = Batch(
            deployed.records.chosen, config.prediction, lambda *chunk: file.append(deployed.table(*chunk))
        )
        server = deployed.serve(deployed.scorer(cached=False), batch)
        complete(_run(config, run, server, present))
    return (pl.read_csv if out.suffix == ".csv" else pl.read_parquet)(out, glob=False)


async def _run(config, run, server, present):
    listening = asyncio.Future()
    serving = asyncio.create_task(server.serve(listening.set_result))
    network = replace(config.network, address=await listening)
    clients = []
    for name in present:
        own = Deployed.load(config, name, run)
        clients.append(FederationClient(own.prediction_client(), name, own.terms(), network, None))
    try:
        await asyncio.gather(*(client.run() for client in clients))
    finally:
        server.finish("the test is over")
        await serving
        for client in clients:
            if budget := client.client._budget:
                budget.ledger.close()  # as if the process ended here


def expected(config, run, parties=PARTIES):
    """Return the outputs of the complete model on the held-out rows, computed in one place."""
    made = build(config)
    models = [rebuild(open_model(run, name)) for name in parties]
    for model, own in zip(made.models, models, strict=True):
        model.load_state_dict(own.state_dict())
    made.head.load_state_dict(rebuild(open_model(run, "server")).state_dict())
    outputs = made.evaluator.outputs([party.features[made.data.test] for party in made.data.parties])
    shares = torch.from_numpy(probabilities(outputs.double().numpy())).float()
    return shares, made.data.record_numbers[made.data.rows :]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_scores_are_those_of_the_whole_model(tmp_path, ending):
    config = trained(
        tmp_path / "run", embedding={"model": "mlp"}, model={"head": "linear", "combine": "concat"}
    )
    scores = batch_of(config, tmp_path / "run", tmp_path / f"scores.{ending}")
    shares, records = expected(config, tmp_path / "run")
    assert scores["id"].cast(pl.Int64).to_list() == records.tolist()
    found = torch.tensor(scores.select("p(0)", "p(1)", "p(2)").to_numpy(), dtype=torch.float32)
    torch.testing.assert_close(found, shares, atol=1e-5, rtol=1e-4)
    assert scores["prediction"].cast(pl.Int64).to_list() == shares.argmax(1).tolist()
    assert scores["missing"].fill_null("").eq("").all()
    assert {path.name for path in tmp_path.iterdir()} == {"run", f"scores.{ending}"}


def test_one_that_never_comes_is_replaced_and_named(tmp_path):
    config = trained(tmp_path / "run", network={"join_timeout": 0.5})
    scores = batch_of(config, tmp_path / "run", tmp_path / "scores.csv", PARTIES[:1])
    assert scores.height == 38
    assert (scores["missing"] == "client-2: absent").all()


def test_one_that_is_here_and_has_yet_to_join_is_waited_for():
    """Its stream is open, so the run starts. Its first message has not reached the worker yet."""
    scorer = Scorer(8, nn.Identity(), torch.zeros(2, 1), summed=True, cached=False)
    scorer.absent, written = {0, 1}, []
    batch = Batch(np.arange(4), PredictionSettings(), lambda *chunk: written.append(chunk))
    scorer.receive(Join(0))
    end = SimpleNamespace(server=scorer, began=0.0, seen={0, 1}, finish=print)
    asked = batch(end)
    asked += scorer.receive(Join(1))[1:]
    for request in asked:
        scorer.receive(Refresh(request.client, 0, request.rows, np.ones((4, 1), np.float32), request.number))
    batch(end)
    assert (written[0][2] == ANSWERED).all()


def test_nobody_at_all_is_an_error_and_leaves_no_file(tmp_path):
    config = trained(tmp_path / "run", network={"join_timeout": 0.5})
    deployed = Deployed.load(config, "server", tmp_path / "run")
    server = deployed.serve(
        deployed.scorer(cached=False), Batch(deployed.records.chosen, config.prediction, print)
    )
    with pytest.raises(Stalled, match="VFL-7171"), ScoreFile(tmp_path / "scores.csv"):
        complete(server.serve())
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_predictions_of_private_clients_are_charged_and_end_at_the_cap(tmp_path):
    """Frozen clients, mu^2 = 1/4 an upload, mu_max^2 = 1/2: two predictions of each record.

    A ledger of which an older copy was restored allows no more.
    """
    privacy = {"mode": "frozen", "clip": 1.0, "noise": 4.0, "mu_max": 0.5**0.5}
    config = trained(
        tmp_path / "run",
        privacy=privacy,
        data={"name": "iris", "scale": "none"},
        model={"head": "linear", "width": 3},
    )
    for time in (1, 2, 3):
        path = tmp_path / "scores.csv"
        if time < 3:
            assert batch_of(config, tmp_path / "run", path)["missing"].fill_null("").eq("").all()
            shutil.copytree(tmp_path / "run" / "privacy", tmp_path / f"copy-{time}")
            continue
        with pytest.raises(Stalled, match="VFL-7171"):
            batch_of(config, tmp_path / "run", path)
    ledger = read_ledger(tmp_path / "run" / "privacy" / "client-1.ledger")
    assert ledger.counts[KINDS.index("prediction")].sum() == 2 * 38
    assert ledger.spent.max() == pytest.approx(0.5)
    shutil.rmtree(tmp_path / "run" / "privacy")
    shutil.copytree(tmp_path / "copy-1", tmp_path / "run" / "privacy")
    with pytest.raises(LedgerError, match="VFL-5053"):
        batch_of(config, tmp_path / "run", path)
    ledger = read_ledger(tmp_path / "run" / "privacy" / "client-1.ledger")
    assert ledger.counts[KINDS.index("prediction")].sum() == 38


def test_of_a_secure_sum_the_server_gets_masked_words_only_and_scores_their_sum(tmp_path, monkeypatch):
    config = trained(
        tmp_path / "run",
        partition={"clients": 3},
        rule={"name": "sync"},
        schedule={"batch_size": 16, "refresh": "none"},
        privacy={"secure_sum": True},
    )
    received, receive = set(), Scorer.receive

    def remember(scorer, message):
        received.add(type(message))
        return receive(scorer, message)

    monkeypatch.setattr(Scorer, "receive", remember)
    scores = batch_of(config, tmp_path / "run", tmp_path / "scores.csv", [*PARTIES, "client-3"])
    shares, records = expected(config, tmp_path / "run", [*PARTIES, "client-3"])
    assert scores["id"].cast(pl.Int64).to_list() == records.tolist()
    found = torch.tensor(scores.select("p(0)", "p(1)", "p(2)").to_numpy(), dtype=torch.float32)
    torch.testing.assert_close(found, shares, atol=1e-5, rtol=1e-4)
    assert received - {Leave} == {Join, Offer, MaskedRefresh}


def live_config(path, largest_request):
    """15 rows fit into a message."""
    prediction = {"largest_request": largest_request, "deadline": 20.0}
    config = configuration(prediction=prediction, network={"largest_message": 300})
    launch(config, path, Console(file=io.StringIO()))
    return config


def test_questions_that_come_together_are_asked_together_as_far_as_answers_fit_into_messages(tmp_path):
    config = live_config(tmp_path, 10)
    service = Service(Deployed.load(config, "server", tmp_path))

    async def ask(server):
        while server.began is None or server.server.absent:
            await asyncio.sleep(0.01)
        ids = list(service._rows)[:30]
        answers = await asyncio.gather(*(service.predict(ids[at : at + 10]) for at in (0, 10, 20)))
        server.finish("the test is over")
        return answers

    async def story():
        asking = asyncio.create_task(ask(service._federation))
        await _run(config, tmp_path, service._federation, PARTIES)
        return await asking

    assert all(answer["complete"] for answer in complete(story()))


def test_a_request_that_no_client_could_answer_in_one_message_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"VFL-7202.*15.*16"):
        Service(Deployed.load(live_config(tmp_path, 16), "server", tmp_path))


def test_models_of_another_run_are_refused(tmp_path):
    config = trained(tmp_path / "run")
    assert Deployed.load(configuration(seed=5), "client-1", tmp_path / "run").config.seed == 0
    trained(tmp_path / "other", stop={"updates": 30})
    mixed = Deployed.load(config, "client-1", tmp_path / "other")
    server = Deployed.load(config, "server", tmp_path / "run")
    end = server.serve(server.scorer(cached=False), Batch(server.records.chosen, config.prediction, print))

    async def join():
        listening = asyncio.Future()
        serving = asyncio.create_task(end.serve(listening.set_result))
        network = configuration(network={"address": await listening}).network
        client = FederationClient(mixed.prediction_client(), "client-1", mixed.terms(), network, None)
        try:
            await client.run()
        finally:
            end.finish("the test is over")
            await serving

    with pytest.raises(RemoteFault, match="VFL-6111"):
        complete(join())


def test_a_second_process_of_a_party_is_told_of_options_that_its_command_has(tmp_path):
    """`vafl serve` and `vafl predict` have --replace, and no --resume."""
    config = trained(tmp_path / "run")
    server, own = (Deployed.load(config, party, tmp_path / "run") for party in ("server", "client-1"))
    end = server.serve(server.scorer(cached=False), Batch(server.records.chosen, config.prediction, print))

    async def join_twice():
        listening = asyncio.Future()
        serving = asyncio.create_task(end.serve(listening.set_result))
        network = configuration(network={"address": await listening}).network

        def client(**options):
            return FederationClient(
                own.prediction_client(), "client-1", own.terms(), network, None, **options
            ).run()

        first = asyncio.create_task(client())
        while not end.connections:
            await asyncio.sleep(0.01)
        with pytest.raises(RemoteFault) as refused:
            await client()
        newer = asyncio.create_task(client(takes_over=True))
        with pytest.raises(RemoteFault) as replaced:
            await first
        end.finish("the test is over")
        await newer
        await serving
        return str(refused.value), str(replaced.value)

    refused, replaced = complete(join_twice())
    assert "--replace" in refused
    assert "--resume" not in refused + replaced
