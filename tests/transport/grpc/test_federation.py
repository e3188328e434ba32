"""Complete runs over real sockets in one process."""

import asyncio
import logging

import pytest
import torch

from tests.transport.grpc.parties import Federation, complete, configuration, run_all, until
from vafl.errors import RemoteFault
from vafl.run.agreement import make_terms
from vafl.run.assembly import build
from vafl.run.plan import make_plan
from vafl.transport.grpc.terms import RunTerms


@pytest.mark.parametrize("rule", ["async", "t-sync", "sync"])
def test_a_run_ends_by_itself_and_learns(rule):
    federation = Federation(configuration(rule={"name": rule}))
    _, reasons = complete(run_all(federation))
    assert reasons == ["60 updates were made"] * 2
    assert federation.server.iteration == 60
    assert federation.points[-1].updates == 60
    assert federation.points[-1].metric > 0.7
    assert federation.points[-1].bytes_up > 0


@pytest.mark.parametrize("combine", ["sum", "concat"])
def test_sync_ends_in_the_simulators_parameters(combine):
    model, embedding = {"head": "linear", "combine": combine}, {"model": "mlp"}
    config = configuration(
        rule={"name": "sync"}, model=model, embedding=embedding, optimiser={"name": "Adam", "step_size": 0.01}
    )
    simulated = build(config)
    points = simulated.train()
    federation = Federation(config)
    complete(run_all(federation))
    for mine, theirs in zip(simulated.models, federation.plan.models, strict=True):
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other)
    torch.testing.assert_close(simulated.head.state_dict(), federation.plan.head.state_dict())
    assert federation.points[-1].metric == pytest.approx(points[-1].metric)


def test_clients_are_told_what_is_durable():
    federation = Federation(configuration())
    clients, _ = complete(run_all(federation))
    assert sum(client.durable for client in clients) >= 50


@pytest.mark.parametrize("encoding", ["float16", "bfloat16", "int8"])
def test_short_encodings_train_too(encoding):
    full = Federation(configuration())
    complete(run_all(full))
    short = Federation(configuration(network={"encoding": encoding}))
    short.overrides = {"encoding": encoding}
    complete(run_all(short))
    assert short.points[-1].metric > 0.7
    assert short.points[-1].bytes_down < 0.8 * full.points[-1].bytes_down


def test_a_window_lets_more_than_one_upload_fly():
    federation = Federation(configuration(rule={"name": "async", "window": 3}, stop={"updates": 200}))
    complete(run_all(federation))
    assert federation.server.iteration == 200
    assert federation.points[-1].metric > 0.7


def test_other_terms_are_refused_with_the_difference(caplog):
    async def story():
        federation = Federation(configuration())
        serving = asyncio.create_task(federation.serve())
        await federation.listening.wait()
        wrong = RunTerms(**{**federation.terms.__dict__, "run_id": "another", "records": 7})
        with pytest.raises(RemoteFault, match="VFL-6111"):
            await federation.client(0, wrong).run()
        federation.end.finish("enough")
        await serving
        return federation

    with caplog.at_level(logging.WARNING, "vafl.server"):
        federation = complete(story())
    assert "refused from client-1" in caplog.text
    assert federation.server.activations == [0, 0]


@pytest.mark.parametrize(
    "own", [{"embedding": {"model": "mlp"}}, {"optimiser": {"name": "Adam", "step_size": 50.0}}], ids=str
)
def test_a_party_chooses_its_network_and_its_optimiser_alone(own):
    server, client = (make_terms(make_plan(configuration(**sections))) for sections in ({}, own))
    assert not server.difference(client)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"optimiser": {"schedule": "cosine"}}, 'optimiser.schedule "constant" at the server, "cosine" at '),
        ({"model": {"head": "linear"}}, 'model.head "bias" at the server, "linear" at the client.'),
        (
            {"schedule": {"refresh": "none"}},
            'schedule.refresh "lookahead" at the server, "none" at the client.',
        ),
        ({"schedule": {"batch_size": 7}}, "schedule.batch_size 16 at the server, 7 at the client."),
        ({"rule": {"order": "query-first"}}, 'rule.order "upload-first" at the server, "query-first" at '),
        ({"rule": {"name": "sync"}}, 'rule.name "async" at the server, "sync" at the client'),
        ({"seed": 5}, "seed 0 at the server, 5 at the client."),
        (
            {"privacy": {"mode": "embed_only"}},
            'privacy.mode "none" at the server, "embed_only" at the client.',
        ),
        (
            {"data": {"validation_fraction": 0.2}, "stop": {"patience": 3}},
            "stop.patience 0 at the server, 3 at the client.",
        ),
    ],
)
def test_a_client_that_is_configured_otherwise_is_told_what_to_change(other, said):
    def terms(**changes):
        return make_terms(make_plan(configuration(**changes)))

    found = RunTerms.from_bytes(terms().to_bytes()).difference(terms(**other)) + "."
    assert said in found
    assert "digest" not in found


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (
            {"stop": {"updates": 0}},
            {"stop": {"updates": 0}, "schedule": {"epochs": 7.0, "batch_size": 16}},
            "schedule.epochs 40.0 at the server, 7.0 at the client",
        ),
        (
            {"stop": {"updates": 0}},
            {"stop": {"updates": 0}, "schedule": {"batch_size": 7}},
            "schedule.batch_size 16 at the server, 7 at the client",
        ),
        (
            {"stop": {"updates": 0}},
            {"stop": {"updates": 9}},
            "stop.updates 0 at the server, 9 at the client",
        ),
        ({"stop": {"updates": 8}}, {"stop": {"updates": 9}}, "stop.updates 8 at the server, 9 at the client"),
        ({"stop": {"updates": 8}}, {"stop": {"updates": 8}}, ""),
    ],
)
def test_planned_updates_that_differ_are_told_by_the_settings_that_decide_them(ours, theirs, said):
    """A cosine schedule ends at the last planned update. No user wrote that number."""

    def terms(changes):
        return make_terms(make_plan(configuration(optimiser={"schedule": "cosine"}, **changes)))

    assert terms(ours).difference(terms(theirs)) == said


def test_what_is_a_partys_own_affair_may_differ():
    own = {
        "threads": 2,
        "model": {"metric": "loss"},
        "privacy": {"ledger": "elsewhere", "delta": 1e-6},
        "labels": {"gradient_clip": 1.0},
        "network": {"patience": 9.0, "heartbeat": 2.0, "checkpoint_every": 3},
        "stop": {"updates": 9},
        "evaluation": {"every": 7},
    }
    terms = make_terms(make_plan(configuration()))
    assert terms.difference(make_terms(make_plan(configuration(**own)))) == ""


def test_a_stranger_is_refused():
    async def story():
        federation = Federation(configuration())
        serving = asyncio.create_task(federation.serve())
        await federation.listening.wait()
        stranger = federation.client(0)
        stranger.party = "mallory"
        with pytest.raises(RemoteFault, match="VFL-6111"):
            await stranger.run()
        federation.end.finish("enough")
        await serving

    complete(story())


def test_a_turn_of_the_worker_whose_messages_another_took_does_nothing():
    """A message that arrives while the worker empties the inbox schedules a turn that finds it handled."""

    async def story():
        federation = Federation(configuration())
        serving = asyncio.create_task(federation.serve())
        await federation.listening.wait()
        federation.end._worker.do(federation.end._handler.handle)
        await federation.end._worker.settle()
        federation.end.finish("enough")
        await serving

    complete(story())


def test_a_client_cut_off_comes_back_and_the_run_goes_on():
    async def story():
        federation = Federation(configuration(stop={"updates": 1_000_000}))
        serving = asyncio.create_task(federation.serve())
        await federation.listening.wait()
        clients = [federation.client(index) for index in range(2)]
        running = [asyncio.create_task(client.run()) for client in clients]
        for _ in range(3):
            before = federation.server.activations[0]
            await until(lambda before=before: federation.server.activations[0] >= before + 10)
            dropped = federation.end.connections[0]
            dropped.end()  # the server drops the stream
            await until(lambda dropped=dropped: federation.end.connections.get(0, dropped) is not dropped)
        await until(lambda: federation.points and federation.points[-1].metric > 0.7)
        federation.end.finish("enough")
        await asyncio.gather(*running)
        await serving
        return federation, clients

    federation, clients = complete(story())
    assert clients[0].reconnects == 3
    assert federation.end.violations == {}
    # Uploads of its window may still be under way as the run ends.
    assert 0 <= clients[0].client.activation - federation.server.activations[0] <= 2
