"""Prediction: every row gets a score, with the state of each client's answer."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.protocol.budgets import NoMarks
from vafl.errors import InvalidMessage
from vafl.protocol.inquiry import ABSENT, ANSWERED, DECLINED, LATE
from vafl.protocol.messages import Decline, Join, Leave, Query, Refresh, Upload
from vafl.protocol.prediction_client import PredictionClient
from vafl.protocol.scoring import Scorer

ROWS, WIDTH = 8, 2
DEFAULTS = torch.tensor([[100.0, 200.0], [300.0, 400.0]])


def rows(*numbers):
    return np.array(numbers, dtype=np.int64)


class Parties:
    """A scorer and two prediction clients whose models double their features."""

    def __init__(self, *, cached=False, summed=True, budgets=(None, None)):
        self.features = [torch.arange(16.0).view(ROWS, WIDTH), -torch.arange(16.0).view(ROWS, WIDTH)]
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.eye_(model.weight).data.mul_(2)
        self.clients = [
            PredictionClient(m, own, model, budget=budgets[m]) for m, own in enumerate(self.features)
        ]
        self.scorer = Scorer(ROWS, nn.Identity(), DEFAULTS, summed=summed, cached=cached)
        self.asked = []
        for client in self.clients:
            self.scorer.receive(client.join())

    def ask(self, *numbers, patient=False):
        inquiry, requests = self.scorer.ask(rows(*numbers), patient=patient)
        self.asked += requests
        return inquiry

    def answer(self, *clients):
        """Let these clients answer all their requests."""
        due = [request for request in self.asked if request.client in clients]
        self.asked = [request for request in self.asked if request.client not in clients]
        for request in due:
            for said in self.clients[request.client].receive(request):
                self.scorer.receive(said)

    def embedding(self, client, number):
        return 2 * self.features[client][number]


def test_embeddings_of_all_clients_make_the_score():
    for summed in (True, False):
        parties = Parties(summed=summed)
        inquiry = parties.ask(1, 4, 7)
        assert inquiry.is_open
        parties.answer(0, 1)
        assert not inquiry.is_open
        assert (inquiry.states == ANSWERED).all()
        scores = parties.scorer.score(inquiry)
        for line, number in enumerate((1, 4, 7)):
            both = [parties.embedding(m, number) for m in (0, 1)]
            assert torch.equal(scores[line], sum(both) if summed else torch.cat(both))


def test_a_client_that_is_gone_is_replaced_by_its_default_and_said_to_be():
    parties = Parties()
    inquiry = parties.ask(2)
    parties.answer(0)
    parties.scorer.receive(Leave(1))
    assert not inquiry.is_open
    assert inquiry.states.tolist() == [[ANSWERED, ABSENT]]
    assert torch.equal(parties.scorer.score(inquiry)[0], parties.embedding(0, 2) + DEFAULTS[1])
    later = parties.ask(3)
    assert [request.client for request in parties.asked if 3 in request.rows] == [0]
    assert later.states[0, 1] == ABSENT


@pytest.mark.parametrize("cached", [False, True])
def test_clients_have_embeddings_of_different_widths(cached):
    scorer = Scorer(ROWS, nn.Identity(), [torch.tensor([7.0]), torch.ones(3)], summed=False, cached=cached)
    assert scorer.widths == (1, 3)
    for client in (0, 1):
        scorer.receive(Join(client))
    inquiry, requests = scorer.ask(rows(2, 5))
    narrow, wide = np.array([[1], [2]], np.float32), np.array([[3, 4, 5], [6, 7, 8]], np.float32)
    with pytest.raises(InvalidMessage, match=r"VFL-4104.*1.*3.*1"):
        scorer.receive(Refresh(1, 0, rows(2, 5), narrow, requests[1].number))
    scorer.receive(Refresh(1, 0, rows(2, 5), wide, requests[1].number))
    scorer.receive(Refresh(0, 0, rows(5), narrow[:1], requests[0].number))
    assert scorer.score(inquiry).tolist() == [[7, 3, 4, 5], [1, 6, 7, 8]]
    again, _ = scorer.ask(rows(5))
    assert again.is_open is not cached


def test_a_slow_client_costs_one_wait_and_is_asked_again_once_it_speaks():
    parties = Parties(cached=True)
    inquiry = parties.ask(2)
    parties.answer(0)
    parties.scorer.give_up(inquiry)
    assert inquiry.states.tolist() == [[ANSWERED, LATE]]
    parties.scorer.score(inquiry)
    while_slow = parties.ask(3)
    assert while_slow.states[0, 1] == LATE
    parties.answer(1)  # too late for row 2, but kept
    assert parties.ask(2).states.tolist() == [[ANSWERED, ANSWERED]]
    parties.ask(5)
    assert {request.client for request in parties.asked if 5 in request.rows} == {0, 1}


def test_a_patient_inquiry_waits_for_a_client_to_come_back():
    parties = Parties()
    inquiry = parties.ask(0, 6, patient=True)
    parties.answer(0)
    parties.scorer.receive(Leave(1))
    assert inquiry.is_open
    parties.asked = []
    _, *owed = parties.scorer.receive(parties.clients[1].join())
    assert [request.rows.tolist() for request in owed] == [[0, 6]]
    parties.asked += owed
    parties.answer(1)
    assert (inquiry.states == ANSWERED).all()


def test_what_is_under_way_is_not_asked_twice_and_what_is_kept_not_again():
    parties = Parties(cached=True)
    first, second = parties.ask(1, 2), parties.ask(2, 3)
    assert [request.rows.tolist() for request in parties.asked] == [[1, 2], [1, 2], [3], [3]]
    parties.answer(0, 1)
    assert not first.is_open
    assert not second.is_open
    third = parties.ask(1, 2, 3)
    assert not parties.asked
    assert torch.equal(parties.scorer.score(third)[0], parties.embedding(0, 1) + parties.embedding(1, 1))


class Cap(NoMarks):
    """Allows a fixed number of uploads of each row."""

    def __init__(self, most):
        self.most, self.spent = most, np.zeros(ROWS, dtype=int)

    def spend(self, wanted, kind, *, whole=False):
        assert kind == "prediction"
        allowed = wanted[self.spent[wanted] < self.most]
        self.spent[allowed] += 1
        return allowed


def test_rows_whose_budget_is_spent_are_left_out_one_by_one():
    parties = Parties(budgets=(Cap(1), None))
    parties.ask(1)
    parties.answer(0, 1)
    inquiry = parties.ask(0, 1)
    parties.answer(0, 1)
    assert inquiry.states.tolist() == [[ANSWERED, ANSWERED], [DECLINED, ANSWERED]]
    alone = parties.ask(1)
    parties.answer(0, 1)
    assert alone.states.tolist() == [[DECLINED, ANSWERED]]


def test_bad_messages_change_nothing():
    parties = Parties()
    inquiry = parties.ask(1, 2)
    number = next(request.number for request in parties.asked if request.client == 0)
    two, wide = np.zeros((2, WIDTH), np.float32), np.zeros((2, WIDTH + 1), np.float32)
    bad = [
        (Refresh(0, 1, rows(1, 3), two, number), "VFL-4103"),
        (Refresh(0, 1, rows(1, 1), two, number), "VFL-4103"),
        (Refresh(0, 1, rows(1, 2), wide, number), r"VFL-4104.*2"),
        (Refresh(1, 1, rows(1, 2), two, number), "VFL-4071"),
        (Refresh(0, 1, rows(1, 2), two), "VFL-4071"),
        (Decline(0, 1, 99, ""), "VFL-4071"),
        (Upload(0, 1, 0, rows(1), two[:1]), "VFL-4102"),
        (Query(0, 1, 0), "VFL-4102"),
        (Join(2), r"VFL-4101.*1"),
    ]
    for message, reason in bad:
        with pytest.raises(InvalidMessage, match=reason):
            parties.scorer.receive(message)
    assert inquiry.is_open
    parties.answer(0, 1)
    assert (inquiry.states == ANSWERED).all()
    parties.scorer.receive(Leave(0))
    with pytest.raises(InvalidMessage, match="VFL-4102"):
        parties.scorer.receive(Decline(0, 9, number, ""))


KINDS = st.sampled_from(["ask", "wait", "answer", "leave", "join", "late"])
MOVES = st.lists(st.tuples(KINDS, st.integers(0, 1)), max_size=25)


@given(moves=MOVES, cached=st.booleans(), data=st.data())
def test_whatever_happens_answers_are_right_and_the_rest_is_marked(moves, cached, data):
    parties, inquiries = Parties(cached=cached), []
    for move, client in moves:
        if move in ("ask", "wait"):
            chosen = data.draw(st.sets(st.integers(0, ROWS - 1), min_size=1))
            inquiries.append(parties.ask(*sorted(chosen), patient=move == "wait"))
        elif move == "answer":
            parties.answer(client)
        elif move == "late" and inquiries:
            parties.scorer.give_up(inquiries[-1])
        elif move == "leave":
            parties.asked = [request for request in parties.asked if request.client != client]
            parties.scorer.receive(Leave(client))
        elif move == "join" and client in parties.scorer.absent:
            parties.asked += parties.scorer.receive(parties.clients[client].join())[1:]
    for inquiry in inquiries:
        parties.scorer.give_up(inquiry)
        assert not inquiry.is_open
        scores = parties.scorer.score(inquiry)
        for line, number in enumerate(inquiry.rows):
            parts = [
                parties.embedding(m, number) if inquiry.states[line, m] == ANSWERED else DEFAULTS[m]
                for m in (0, 1)
            ]
            assert torch.equal(scores[line], sum(parts))
    assert not parties.scorer.inquiries
