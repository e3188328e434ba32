"""Masked predictions: a round needs all clients, and a join or leave begins a new epoch."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.protocol.budgets import NoMarks
from vafl.errors import InvalidMessage
from vafl.protocol.inquiry import DECLINED
from vafl.protocol.messages import Decline, Leave, MaskedRefresh, Refresh
from vafl.protocol.prediction_client import PredictionClient
from vafl.protocol.scoring import Scorer
from vafl.protocol.secure_sum.fixed_point import decode
from vafl.protocol.secure_sum.masks import KeyAgreement, NoKeySigner
from vafl.protocol.secure_sum.scoring import ScoringSums
from vafl.protocol.secure_sum.sender import MaskedSender

ROWS, WIDTH, CLIENTS = 8, 2, 3
NAMES = [f"client-{number}" for number in range(CLIENTS)]


class Parties:
    """Deliver messages in both directions until none is left."""

    def __init__(self, budgets=(None,) * CLIENTS):
        generator = torch.Generator().manual_seed(0)
        self.features = [torch.randn(ROWS, WIDTH, generator=generator) for _ in NAMES]
        self.clients = [
            PredictionClient(
                m,
                own,
                nn.Identity(),
                budget=budgets[m],
                sender=MaskedSender(m, KeyAgreement("run", NAMES, m, NoKeySigner())),
            )
            for m, own in enumerate(self.features)
        ]
        self.scorer = Scorer(
            ROWS,
            nn.Identity(),
            torch.zeros(CLIENTS, WIDTH),
            summed=True,
            cached=False,
            sums=ScoringSums(CLIENTS, WIDTH, decode),
        )
        self.scorer.absent = set(range(CLIENTS))
        self.words = []

    def carry(self, messages, deaf=()):
        due = list(messages)
        while due:
            message = due.pop(0)
            if message.client in deaf:
                continue
            for said in self.clients[message.client].receive(message):
                if isinstance(said, MaskedRefresh):
                    self.words.append(said.words)
                due += self.scorer.receive(said)

    def join(self, client, deaf=()):
        self.carry(self.scorer.receive(self.clients[client].join()), deaf)

    def sums(self, rows):
        return torch.stack(self.features).sum(0)[rows]


def rows(*numbers):
    return np.array(numbers, dtype=np.int64)


def test_sums_come_out_for_rounds_asked_before_and_after_all_are_here():
    parties = Parties()
    early, asked = parties.scorer.ask(rows(1, 4))
    assert asked == []
    for client in range(CLIENTS):
        parties.join(client)
    late, asked = parties.scorer.ask(rows(0, 2, 7))
    parties.carry(asked)
    for inquiry in (early, late):
        assert not inquiry.is_open
        torch.testing.assert_close(parties.scorer.score(inquiry), parties.sums(inquiry.rows))
    scores = [set((own * 2**32).round().flatten().tolist()) for own in parties.features]
    said = {word for words in parties.words for word in words.view(np.int64).flatten().tolist()}
    assert all(said.isdisjoint(own) for own in scores), "no score is said as it is"


@pytest.mark.parametrize("gone", [0, 2])
def test_one_that_leaves_in_the_middle_of_a_round_is_waited_for_and_the_round_is_said_again(gone):
    parties = Parties()
    for client in range(CLIENTS):
        parties.join(client)
    inquiry, asked = parties.scorer.ask(rows(3, 5))
    parties.carry(asked, deaf=(gone,))
    before = len(parties.words)
    parties.carry(parties.scorer.receive(Leave(gone)))
    assert inquiry.is_open
    parties.join(gone)
    torch.testing.assert_close(parties.scorer.score(inquiry), parties.sums([3, 5]))
    assert len(parties.words) == before + CLIENTS
    assert len({words.tobytes() for words in parties.words}) == len(parties.words)


def test_a_budget_that_is_spent_leaves_the_whole_round_without_a_score():
    class Spent(NoMarks):
        def spend(self, wanted, kind, *, whole=False):
            assert whole
            return wanted[:0]

    parties = Parties(budgets=(None, Spent(), None))
    for client in range(CLIENTS):
        parties.join(client)
    inquiry, asked = parties.scorer.ask(rows(3, 5))
    parties.carry(asked)  # the third answers a closed request, which is no fault
    assert (inquiry.states == DECLINED).all()


def test_what_is_not_masked_or_not_asked_is_refused():
    parties = Parties()
    with pytest.raises(InvalidMessage, match=r"VFL-4152.*0"):
        parties.scorer.receive(Decline(0, 1, 0, "no"))
    for client in range(CLIENTS):
        parties.join(client)
    with pytest.raises(InvalidMessage, match=r"VFL-4151.*1"):
        parties.scorer.receive(Refresh(1, 9, rows(1), np.ones((1, WIDTH), np.float32), 0))
    parties.scorer.ask(rows(1))
    words = np.ones((1, WIDTH), dtype=np.uint64)
    for number, row, fault in ((5, 1, r"VFL-4155.*5"), (0, 2, r"VFL-4153.*0")):
        with pytest.raises(InvalidMessage, match=fault):
            parties.scorer.receive(MaskedRefresh(1, 9, 0, number, rows(row), words))
    with pytest.raises(InvalidMessage, match=r"VFL-4131.*0.*1"):
        parties.scorer.receive(MaskedRefresh(1, 9, 1, 0, rows(1), words))
