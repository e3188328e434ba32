"""A client whose ledger and head were rolled back: its server remembers a mark that the ledger lacks."""

import shutil

import numpy as np
import pytest
import torch
from torch import nn

from vafl.config import from_document
from vafl.errors import InvalidMessage, LedgerError
from vafl.protocol.marks import Marks
from vafl.protocol.messages import LedgerMark, Welcome
from vafl.protocol.prediction_client import PredictionClient
from vafl.protocol.scoring import Scorer
from vafl.protocol.secure_sum.fixed_point import decode
from vafl.protocol.secure_sum.masks import KeyAgreement, NoKeySigner
from vafl.protocol.secure_sum.scoring import ScoringSums
from vafl.protocol.secure_sum.sender import MaskedSender
from vafl.run.assembly import make_client, make_plan, make_privacy, make_server, make_table

NOISE = {"clip": 1.0, "noise": 9.0, "gradient_clip": 1.0, "gradient_noise": 9.0, "mu_max": "unlimited"}
CLIENTS, WIDTH = 3, 3


@pytest.fixture(params=["training", "prediction"])
def purpose(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["plain", "secure_sum"])
def parties(request, tmp_path, purpose):
    made = Parties(tmp_path / "run", purpose, masked=request.param)
    yield made
    made.stop()


class Parties:
    """A client with a ledger on disk, and a server that starts with it each time and keeps its marks."""

    def __init__(self, run, purpose, *, masked):
        self.run, self.purpose, self.masked, self.marks = run, purpose, masked, Marks()
        self.plan = make_plan(
            from_document(
                {
                    "data": {"name": "iris", "scale": "none"},
                    "rule": {"name": "sync" if masked else "async"},
                    "schedule": {"refresh": "none"},
                    "partition": {"clients": CLIENTS},
                    "privacy": {**NOISE, "secure_sum": masked},
                }
            )
        )
        self.ledger = None

    def start(self, **options):
        """Start new processes and let the client join; return the messages that it sends."""
        self.stop()
        self.privacy = make_privacy(self.plan, 0, self.run, **options)
        self.ledger = self.privacy.budget.ledger
        make = self._training if self.purpose == "training" else self._prediction
        self.client, self.server = make()
        return self.join()

    def join(self):
        said, due = [], self.server.receive(self.client.join())
        self.welcome = due[0]
        assert isinstance(self.welcome, Welcome)
        while due:
            message = due.pop(0)
            answers = self.client.receive(message) if message.client == 0 else []
            for answer in answers:
                said.append(answer)
                due += self.server.receive(answer)
        return said

    def spend(self, uploads):
        """Charge this many uploads; return the marks that are sent."""
        for _ in range(uploads):
            self.privacy.budget.spend(np.array([0]), "request")
        said = self.client._with_mark([])
        for message in said:
            self.server.receive(message)
        return said

    def stop(self):
        if self.ledger is not None:
            self.ledger.close()

    def _training(self):
        table = make_table(self.plan, self.plan.data.rows)
        return make_client(self.plan, 0, privacy=self.privacy), make_server(self.plan, table, self.marks)

    def _prediction(self):
        names = [party.name for party in self.plan.data.parties]
        head, rows = nn.Identity(), len(self.privacy.features)
        keys = KeyAgreement("run", names, 0, NoKeySigner())
        client = PredictionClient(
            0,
            self.privacy.features,
            self.privacy.model,
            perturb=self.privacy.release,
            budget=self.privacy.budget,
            sender=MaskedSender(0, keys) if self.masked else None,
        )
        server = Scorer(
            rows,
            head,
            torch.zeros(CLIENTS, WIDTH),
            summed=True,
            cached=False,
            marks=self.marks,
            sums=ScoringSums(CLIENTS, WIDTH, decode) if self.masked else None,
        )
        return client, server


def marks_in(said):
    return [message.mark for message in said if isinstance(message, LedgerMark)]


def test_each_welcome_is_answered_with_a_mark_that_the_next_one_shows(parties):
    [first] = marks_in(parties.start())
    assert parties.welcome.mark == b""
    assert parties.ledger.knows(first)
    [second] = marks_in(parties.start())
    assert parties.welcome.mark == first
    assert parties.ledger.knows(second)
    assert parties.marks.recall(0) == second != first
    assert parties.marks.recall(1) == b""


def test_a_client_that_only_lost_its_connection_sends_no_new_mark(parties):
    [first] = marks_in(parties.start())
    assert marks_in(parties.join()) == []
    assert parties.welcome.mark == first
    parties.spend(1)
    [second] = marks_in(parties.join())
    assert second != first


def test_marks_follow_as_uploads_are_charged(parties):
    [first] = marks_in(parties.start())
    assert parties.spend(31) == []
    [second] = marks_in(parties.spend(1))
    assert parties.marks.recall(0) == second != first
    assert parties.spend(31) == []


def test_a_client_whose_ledger_and_head_were_rolled_back_stops_before_it_sends(parties, tmp_path):
    parties.start()
    parties.stop()
    older = tmp_path / "older"
    shutil.copytree(parties.run / "privacy", older)
    [newer] = marks_in(parties.start())
    parties.spend(20)
    parties.stop()
    shutil.rmtree(parties.run / "privacy")
    shutil.copytree(older, parties.run / "privacy")
    for _ in range(2):
        with pytest.raises(LedgerError, match="VFL-5053"):
            parties.start()
        assert parties.marks.recall(0) == newer, "the server keeps the mark that proves it"


def test_another_ledger_is_noticed_and_can_be_accepted_once(parties):
    [newer] = marks_in(parties.start())
    parties.stop()
    shutil.rmtree(parties.run / "privacy")
    with pytest.raises(LedgerError):
        parties.start()
    [accepted] = marks_in(parties.start(accept_ledger=True))
    assert len(parties.ledger.accepted) == 1
    assert parties.ledger.knows(newer)
    assert parties.marks.recall(0) == accepted
    with pytest.raises(LedgerError):
        parties.client.receive(Welcome(0, 0, (0,) * CLIENTS, mark=bytes(16)))
    parties.start()
    assert len(parties.ledger.accepted) == 1


def test_a_mark_that_comes_out_of_turn_is_refused_and_not_remembered(parties):
    [mark] = marks_in(parties.start())
    with pytest.raises(InvalidMessage):
        parties.server.receive(LedgerMark(0, 0, bytes(16)))
    with pytest.raises(InvalidMessage):
        parties.server.receive(LedgerMark(7, 99, bytes(16)))
    parties.server.absent = {0}
    with pytest.raises(InvalidMessage):
        parties.server.receive(LedgerMark(0, 99, bytes(16)))
    assert parties.marks.recall(0) == mark


@pytest.mark.parametrize("purpose", ["training"], indirect=True)
def test_a_simulation_makes_no_marks(parties):
    own = make_privacy(parties.plan, 0)
    own.budget.recognise(bytes(16))
    assert own.budget.due_mark() == b""
