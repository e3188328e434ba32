"""Whole private clients: what they send, what it costs, and what they do when the budget is spent."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.federation import run_of, vertical_data
from vafl.config import from_document
from vafl.errors import ConfigError
from vafl.models.embeddings import mlp
from vafl.privacy.ledger.accounts import KINDS
from vafl.privacy.ledger.ledger import Ledger
from vafl.privacy.mechanism.client_privacy import protect
from vafl.privacy.settings import PrivacySettings
from vafl.protocol.messages import Decline, Evaluate, Finished, Gradient, Request, Upload
from vafl.run.assembly import build

ZEROED = {"neighbours": "zero_out", "mu_max": "unlimited"}
TRAINED = {
    "clip": 1.0,
    "noise": 2.0,
    "gradient_clip": 1.0,
    "gradient_noise": 2.0,
    **ZEROED,
}  # mu^2: 1/4 + 1/4
FROZEN = {"mode": "frozen", "clip": 1.0, "noise": 2.0, **ZEROED}
ONCE = {"mode": "release_once", "clip": 1.0, "noise": 2.0, **ZEROED}


def private_run(privacy, rows=20, **sections):
    return run_of(vertical_data(rows), privacy=privacy, model={"head": "linear", "width": 3}, **sections)


def counts(ledger, kind):
    return ledger.counts[KINDS.index(kind)]


def test_every_use_of_a_record_is_charged():
    run = private_run(TRAINED, schedule={"refresh": "lookahead"}, stop={"updates": 30})
    points = run.train()
    for ledger, client in zip(run.ledgers, run.runtime.clients, strict=True):
        batches, refreshes = counts(ledger, "batch"), counts(ledger, "refresh")
        evaluations = counts(ledger, "evaluation")
        assert evaluations.tolist() == [0] * 20 + [len(points)] * 10  # held out: as in a federation
        assert batches.sum() == 4 * client.activation
        assert refreshes.sum() > 0
        assert np.allclose(ledger.spent, batches * 0.5 + (refreshes + evaluations) * 0.25)


def test_of_a_client_that_may_not_answer_an_evaluation_the_last_answer_counts():
    run = private_run({**FROZEN, "mu_max": 0.5})
    first, seen = run.evaluator(), [run.evaluator() for _ in range(5)]
    assert seen == [first] * 5, "no new noise"
    assert [counts(ledger, "evaluation").sum() for ledger in run.ledgers] == [10, 10]
    run = private_run({**FROZEN, "mu_max": 0.5})
    run.ledgers[0].accounts.spent[25] = 0.25
    run.evaluator()
    assert [counts(ledger, "evaluation").sum() for ledger in run.ledgers] == [0, 10], "all rows or none"


def test_what_the_papers_noise_lets_through_is_charged_to_all_who_were_trained_on():
    """mu^2 is 1/4 for an upload, and 1 for every later vector of a model that was trained on the record."""
    run = private_run({"mode": "embed_only", "clip": 1.0, "noise": 2.0, "neighbours": "zero_out"})
    client, ledger = run.runtime.clients[0], run.ledgers[0]
    for activation in range(2):
        (upload,) = client.wake()
        client.receive(Gradient(0, activation, activation, np.ones_like(upload.embeddings), (1, 0)))
    client.receive(Evaluate(0, 0, np.array([20, 21])))
    total, first, second = ledger.accounts.total, client._schedule.batch(0), client._schedule.batch(1)
    assert total[first].tolist() == [0.25 + 4 + 2] * 4
    assert total[second].tolist() == [0.25 + 2] * 4
    assert total[20] == 0.25
    assert total.sum() == 4 * 6.25 + 4 * 2.25 + 2 * 0.25


def test_local_steps_cost_each_time():
    run = private_run(TRAINED, rule={"local_steps": 3}, stop={"updates": 5})
    run.train()
    ledger = run.ledgers[0]
    uploads, evaluations = counts(ledger, "batch"), counts(ledger, "evaluation")
    assert np.allclose(ledger.spent, uploads * (0.25 + 3 * 0.25) + evaluations * 0.25)


def test_a_frozen_client_pays_for_uploads_only_and_learns_nothing():
    run = private_run(FROZEN)
    before = [parameter.clone() for parameter in run.models[0].parameters()]
    run.train()
    assert all(torch.equal(a, b) for a, b in zip(before, run.models[0].parameters(), strict=True))
    assert np.allclose(run.ledgers[0].spent, run.ledgers[0].counts.sum(0) * 0.25)


def test_released_once_is_paid_once():
    run = private_run(ONCE, stop={"updates": 50})
    run.train()
    assert np.allclose(run.ledgers[0].spent, 0.25)


def test_of_a_model_that_begins_with_frozen_layers_their_output_is_released_and_the_rest_is_trained():
    model = {"head": "linear", "width": 3}
    embedding = {"model": "tests.models.factories:on_frozen"}
    run = run_of(vertical_data(20), privacy=ONCE, model=model, embedding=embedding, stop={"updates": 50})
    before = [parameter.clone() for parameter in run.models[0].parameters()]
    run.train()
    same = [torch.equal(a, b) for a, b in zip(before, run.models[0].parameters(), strict=True)]
    assert same == [True, True, False, False]
    assert run.runtime.clients[0]._features.shape[1:] == (2,)
    assert np.allclose(run.ledgers[0].spent, 0.25)


def test_the_run_ends_when_the_budgets_are_spent():
    run = private_run({**TRAINED, "mu_max": 1.5}, stop={"updates": 1000})  # 2.25 / 0.5: four batches a record
    end = run.train()[-1]
    assert end.updates == 2 * 5 * 4
    assert all(float(ledger.spent.max()) <= 2.25 for ledger in run.ledgers)
    assert run.runtime.server.finished == {0, 1}


def test_rows_without_budget_are_left_out_of_a_batch():
    run = private_run({**TRAINED, "mu_max": 1.5})
    client, ledger = run.runtime.clients[0], run.ledgers[0]
    batch = client._schedule.batch(0)
    ledger.accounts.spent[batch[:3]] = 2.0
    (upload,) = client.wake()
    assert isinstance(upload, Upload)
    assert upload.rows.tolist() == batch[3:].tolist()


def test_under_sync_a_batch_is_uploaded_whole_or_not_at_all():
    run = private_run({**TRAINED, "mu_max": 1.5}, rule={"name": "sync"})
    client, ledger = run.runtime.clients[0], run.ledgers[0]
    ledger.accounts.spent[client._schedule.batch(0)[:1]] = 2.0
    (said,) = client.wake()
    assert isinstance(said, Finished)
    assert client.waiting


def test_the_cap_wins_over_the_delay_bound_and_the_client_says_so():
    run = private_run({**TRAINED, "mu_max": 1.5})
    client, ledger = run.runtime.clients[0], run.ledgers[0]
    ledger.accounts.spent[3] = 2.2
    (said,) = client.receive(Request(0, 7, np.array([2, 3])))
    assert isinstance(said, Decline)
    assert "privacy budget" in said.reason
    assert ledger.spent[2] == 0  # all or nothing


def test_evaluations_and_requests_are_charged():
    run = private_run(TRAINED)
    client, ledger = run.runtime.clients[0], run.ledgers[0]
    client.receive(Request(0, 0, np.array([2, 3])))
    client.receive(Evaluate(0, 1, np.array([20, 21])))  # held out
    assert counts(ledger, "request").nonzero()[0].tolist() == [2, 3]
    assert counts(ledger, "evaluation").nonzero()[0].tolist() == [20, 21]


def test_a_retry_is_byte_identical_and_free():
    run = private_run(TRAINED)
    client, ledger = run.runtime.clients[0], run.ledgers[0]
    (first,) = client.wake()
    spent = ledger.spent.copy()
    server = run.runtime.server
    (welcome,) = server.receive(client.join())[:1]
    (again,) = client.receive(welcome)
    assert np.array_equal(again.embeddings, first.embeddings)
    assert np.array_equal(ledger.spent, spent)


def test_two_runs_of_one_seed_upload_different_noise():
    uploads = [private_run(TRAINED).runtime.clients[0].wake()[0].embeddings for _ in range(2)]
    assert not np.array_equal(*uploads)


def test_released_gradients_leave_other_records_embeddings_within_the_declared_noise():
    """In dp_train, one record's features move the model by at most G, under noise of deviation s."""
    shift = []
    for value in (0.0, 1e6):
        features = torch.zeros(8, 3)
        features[0] = value
        settings = PrivacySettings(**{**TRAINED, "gradient_noise": 1e-9, "noise": 1e-9})
        torch.manual_seed(0)
        own = protect(settings, nn.Linear(3, 2, bias=False), features, Ledger.in_memory(8), np.arange(8))
        _, pull_back = own.updates(features)
        shift.append(pull_back(torch.full((8, 2), 1e3))[0] * 8)
    assert (shift[1] - shift[0]).norm() <= 1.0 + 1e-3


def test_hidden_noise_and_placement_reach_the_model():
    settings = PrivacySettings(mode="embed_only", noise=0.5, layers=(0.3,), placement="output")
    own = protect(settings, mlp((3,), 2, (4,)), torch.randn(6, 3), Ledger.in_memory(6), np.arange(6))
    features = torch.randn(5, 3)
    assert not torch.equal(own.model(features), own.model(features))


def test_a_private_client_with_batch_normalisation_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(ConfigError, match=r"VFL-5072.*1.*BatchNorm1d"):
        protect(PrivacySettings(**TRAINED), model, torch.randn(6, 3), Ledger.in_memory(6), np.arange(6))


def test_scaling_by_all_records_is_refused_for_a_guarantee():
    document = {"data": {"name": "wine"}, "privacy": TRAINED}
    with pytest.raises(ConfigError, match="VFL-7155"):
        build(from_document(document))
    document["data"]["scale"] = "none"
    build(from_document(document))


def test_a_frozen_run_needs_a_head_that_learns():
    with pytest.raises(ConfigError, match="VFL-7151"):
        build(from_document({"privacy": FROZEN}))


def test_a_private_client_still_learns():
    document = {
        "privacy": {**TRAINED, "clip": 2.0, "noise": 0.05, "gradient_clip": 2.0, "gradient_noise": 0.1},
        "schedule": {"batch_size": 64, "refresh": "none"},
        "optimiser": {"step_size": 0.5},
        "stop": {"updates": 400},
        "evaluation": {"every": 400},
    }
    assert build(from_document(document)).train()[-1].metric > 0.8


def test_gradients_reach_the_model_through_clip_and_noise():
    run = private_run({**TRAINED, "noise": 1e-6, "gradient_noise": 1e-9, "clip": 1e6, "gradient_clip": 1e6})
    plain = private_run({})
    for own in (run, plain):
        client = own.runtime.clients[0]
        (upload,) = client.wake()
        client.receive(Gradient(0, 0, 0, np.ones_like(upload.embeddings), (1, 0)))
    for one, other in zip(run.models[0].parameters(), plain.models[0].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
