"""Every client has its own embedding width, from training to prediction."""

import numpy as np
import pytest
import torch

from tests.federation import parameters, run_of, vertical_data
from vafl.errors import ConfigError
from vafl.models.decisions import Decision
from vafl.protocol.importance import ImportanceScorer
from vafl.protocol.prediction_client import Permutations, PredictionClient
from vafl.protocol.scoring import ANSWERED, Scorer
from vafl.run.model_store import keep_all, open_model, rebuild

WIDTHS = [1, 5, 3]


BY_PARTY = {f"client-{number}": width for number, width in enumerate(WIDTHS, 1)}


def trained(head="linear", rule="async", **sections):
    model = {"head": head, "combine": "concat", "head_hidden": [4], "width": BY_PARTY}
    run = run_of(vertical_data(clients=3), model=model, rule={"name": rule}, **sections)
    run.train()
    return run


@pytest.mark.parametrize("head", ["linear", "mlp", "tabular", "gated"])
@pytest.mark.parametrize("rule", ["async", "t-sync", "sync", "centralised"])
def test_a_run_trains(head, rule):
    run = trained(head, rule)
    assert np.isfinite(run.measure().metric)
    if rule != "centralised":
        assert run.runtime.server.table.widths == tuple(WIDTHS)
    assert [part.shape[1] for part in run.evaluator.embeddings()] == WIDTHS


def test_sync_steps_as_one_place_does():
    one_place, sync = (trained("mlp", rule, schedule={"batch_size": 20}) for rule in ("centralised", "sync"))
    pairs = zip(parameters(one_place), parameters(sync), strict=True)
    assert all(torch.allclose(first, second, atol=1e-5) for first, second in pairs)


def test_a_sum_of_different_widths_is_refused():
    with pytest.raises(ConfigError, match=r"VFL-3019.*\[1, 5, 3\]"):
        run_of(vertical_data(clients=3), model={"head": "linear", "width": BY_PARTY})


@pytest.fixture(params=["mlp", "gated"])
def stored(tmp_path, request):
    run = trained(request.param)
    keep_all(run, Decision(), tmp_path)
    return run, open_model(tmp_path, "server")


def test_a_stored_head_scores_as_the_trained_one(stored):
    run, model = stored
    assert model.manifest.widths == WIDTHS
    defaults = [model.defaults[party] for party in model.manifest.parties]
    assert [len(default) for default in defaults] == WIDTHS
    features = [party.features[run.data.test] for party in run.data.parties]
    rows = np.arange(len(features[0]))
    scorer = Scorer(len(rows), rebuild(model), defaults, summed=False, cached=False)
    clients = [PredictionClient(m, own, run.models[m]) for m, own in enumerate(features)]
    for client in clients:
        scorer.receive(client.join())
    inquiry, requests = scorer.ask(rows)
    for request in requests[:2]:
        for message in clients[request.client].receive(request):
            scorer.receive(message)
    scorer.give_up(inquiry)
    embeddings = run.evaluator.embeddings()
    embeddings[2] = defaults[2].expand_as(embeddings[2])
    with torch.no_grad():
        expected = run.head.eval()(torch.cat(embeddings, 1))
    assert torch.allclose(scorer.score(inquiry), expected, atol=1e-6)


def test_one_client_permutes_its_own_columns(stored):
    run, model = stored
    features = [party.features[run.data.test] for party in run.data.parties]
    rows = np.arange(len(features[0]))
    scorer = ImportanceScorer(
        len(rows), rebuild(model), [torch.zeros(width) for width in WIDTHS], summed=False
    )
    clients = [
        PredictionClient(m, own, run.models[m], permutations=Permutations(np.random.default_rng(m), {}))
        for m, own in enumerate(features)
    ]

    def deliver(messages):
        for message in messages:
            for reply in clients[message.client].receive(message):
                scorer.receive(reply)

    for client in clients:
        scorer.receive(client.join())
    base, requests = scorer.ask(rows, patient=True)
    deliver(requests)
    inquiry, requests = scorer.ask_permuted(base, 1, "*")
    deliver(requests)
    assert (inquiry.states == ANSWERED).all()
    changed = (inquiry.embeddings != base.embeddings).any(0)
    assert changed.tolist() == [False] + [True] * 5 + [False] * 3
