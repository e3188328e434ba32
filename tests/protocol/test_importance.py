"""Permuted features: the client decides what is permuted, permutes it, and charges its ledger."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.protocol.test_scoring import DEFAULTS, ROWS, WIDTH, Cap, rows
from vafl.errors import InvalidMessage
from vafl.protocol.importance import ImportanceScorer
from vafl.protocol.inquiry import ANSWERED, AWAITED, DECLINED
from vafl.protocol.messages import EVERYTHING, LONGEST_GROUP, Decline, Join, Leave, Refresh, Request
from vafl.protocol.prediction_client import Permutations, PredictionClient

FEATURES = torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH)
EVERYONE = rows(*range(ROWS))


def permutations(*names):
    return Permutations(np.random.default_rng(3), {name: np.array([m]) for m, name in enumerate(names)})


def prediction_client(index=0, allowed=None, budget=None, features=FEATURES):
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.eye_(model.weight)
    return PredictionClient(index, features, model, permutations=allowed, budget=budget)


def answer_to(client, group, asked=EVERYONE):
    (said,) = client.receive(Request(0, 7, asked, permute=group))
    return said


def test_everything_is_permuted_record_by_record():
    said = answer_to(prediction_client(allowed=permutations()), EVERYTHING)
    assert said.rows.tolist() == EVERYONE.tolist()
    assert sorted(map(tuple, said.embeddings)) == sorted(map(tuple, FEATURES.numpy()))
    assert (said.embeddings != FEATURES.numpy()).any()


def test_a_group_moves_and_all_other_features_stay():
    client = prediction_client(allowed=permutations("age"))
    said = answer_to(client, "age")
    assert sorted(said.embeddings[:, 0]) == FEATURES[:, 0].tolist()
    assert said.embeddings[:, 0].tolist() != FEATURES[:, 0].tolist()
    assert said.embeddings[:, 1].tolist() == FEATURES[:, 1].tolist()
    plain = client.receive(Request(0, 8, EVERYONE))[0]
    assert np.array_equal(plain.embeddings, FEATURES.numpy()), "the client's own features are as they were"


@given(asked=st.lists(st.integers(0, ROWS - 1), min_size=1, unique=True), seed=st.integers(0, 100))
def test_values_come_from_the_rows_asked_for_and_from_no_others(asked, seed):
    """A row whose budget is spent, or that was not asked for, must not reach the server under another row."""
    allowed = Permutations(np.random.default_rng(seed), {"both": np.arange(WIDTH), "one": np.array([1])})
    for group in (EVERYTHING, "both", "one"):
        said = answer_to(prediction_client(allowed=allowed), group, rows(*asked))
        assert said.rows.tolist() == asked
        assert set(said.embeddings.ravel().tolist()) <= set(FEATURES[asked].ravel().tolist())


def test_what_a_client_does_not_offer_is_declined_and_charged_to_nobody():
    budget = Cap(9)
    asked = [
        (prediction_client(budget=budget), EVERYTHING),
        (prediction_client(budget=budget), "age"),
        (prediction_client(allowed=permutations("age"), budget=budget), "income"),
    ]
    for client, group in asked:
        assert isinstance(answer_to(client, group), Decline)
    assert budget.spent.sum() == 0


def test_a_group_costs_two_uploads_and_everything_one():
    """If only some features are permuted, two answers depend on each record."""
    budget = Cap(3)
    client = prediction_client(allowed=permutations("age"), budget=budget)
    answer_to(client, EVERYTHING)
    assert budget.spent.tolist() == [1] * ROWS
    answer_to(client, "age", rows(0, 1))
    assert budget.spent.tolist() == [3, 3, *[1] * (ROWS - 2)]
    said = answer_to(client, EVERYTHING)
    assert said.rows.tolist() == list(range(2, ROWS)), "spent records are left out"
    assert said.embeddings.min() >= FEATURES[2:].min(), "and their values, too"
    for _ in range(2):
        said = answer_to(client, EVERYTHING)
    assert isinstance(said, Decline)


@pytest.mark.parametrize("permute", ["x" * (LONGEST_GROUP + 1), "a\nb", "\x1b[31m", "\ud800\x00"])
def test_a_name_that_cannot_be_shown_is_refused_in_a_request(permute):
    with pytest.raises(InvalidMessage):
        Request(0, 0, EVERYONE, permute=permute)


@pytest.mark.parametrize(
    "groups",
    [
        (b"",),
        (b"*",),
        (b"a", b"a"),
        (b"\xff",),
        (b"a\x1b[2J",),
        (b"x" * (LONGEST_GROUP + 1),),
        tuple(str(number).encode() for number in range(10_001)),
    ],
)
def test_names_that_no_honest_client_offers_are_refused(groups):
    with pytest.raises(InvalidMessage):
        Join(0, groups=groups)


class Parties:
    """A scorer and two clients. The second client allows permuting one column."""

    def __init__(self, *budgets):
        budget = budgets[0] if budgets else None
        self.clients = [
            prediction_client(0, permutations()),
            prediction_client(1, permutations("age"), budget, features=-FEATURES),
        ]
        self.scorer = ImportanceScorer(ROWS, nn.Identity(), DEFAULTS, summed=True)
        for client in self.clients:
            self.scorer.receive(client.join())
        self.base, asked = self.scorer.ask(rows(1, 4, 6), patient=True)
        self.answer(asked)

    def answer(self, requests):
        for request in requests:
            for said in self.clients[request.client].receive(request):
                self.scorer.receive(said)


def test_only_the_client_that_permutes_is_asked_and_the_others_stay():
    parties = Parties()
    assert parties.scorer.groups == {0: (), 1: ("age",)}
    inquiry, asked = parties.scorer.ask_permuted(parties.base, 1, "age")
    assert [(request.client, request.permute) for request in asked] == [(1, "age")]
    before = parties.base.embeddings.copy()
    parties.answer(asked)
    assert not inquiry.is_open
    assert np.array_equal(inquiry.embeddings[:, :WIDTH], before[:, :WIDTH])
    assert np.array_equal(np.sort(inquiry.embeddings[:, WIDTH]), np.sort(before[:, WIDTH]))
    assert np.array_equal(parties.base.embeddings, before), "what was measured first is not written over"


def test_answers_go_to_the_inquiry_they_are_for():
    """Two permutations of the same rows are open at once, and a third one of another client."""
    parties = Parties()
    asked = [parties.scorer.ask_permuted(parties.base, client, EVERYTHING) for client in (1, 1, 0)]
    for inquiry, requests in reversed(asked):
        assert inquiry.is_open
        parties.answer(requests)
        assert not inquiry.is_open
    assert not np.array_equal(asked[0][0].embeddings, asked[1][0].embeddings)


def test_a_client_that_comes_back_is_asked_again_and_a_forgotten_inquiry_is_left_alone():
    parties = Parties()
    inquiry, _ = parties.scorer.ask_permuted(parties.base, 1, "age")
    parties.scorer.receive(Leave(1))
    assert inquiry.is_open
    owed = parties.scorer.receive(parties.clients[1].join())[1:]
    assert [request.permute for request in owed] == ["age"]
    parties.scorer.give_up(inquiry)
    parties.scorer.close(inquiry)
    states = inquiry.states.copy()
    parties.answer(owed)
    assert np.array_equal(inquiry.states, states)


def test_a_decline_says_why():
    parties = Parties()
    inquiry, asked = parties.scorer.ask_permuted(parties.base, 0, "age")
    parties.answer(asked)
    assert (inquiry.states[:, 0] == DECLINED).all()
    assert "prediction.importance" in parties.scorer.reasons[0]


@pytest.mark.parametrize("wrong", ["rows", "width", "number"])
def test_an_answer_to_something_else_is_refused_and_changes_nothing(wrong):
    parties = Parties()
    inquiry, (request,) = parties.scorer.ask_permuted(parties.base, 1, "age")
    answer = Refresh(
        1,
        99,
        rows(1, 4, 7) if wrong == "rows" else request.rows,
        np.zeros((3, 5 if wrong == "width" else WIDTH), np.float32),
        request.number + (wrong == "number"),
    )
    with pytest.raises(InvalidMessage):
        parties.scorer.receive(answer)
    assert (inquiry.states[:, 1] == AWAITED).all()
    parties.answer([request])
    assert (inquiry.states[:, 1] == ANSWERED).all()
