"""A study of importance, with clients in the same process."""

import numpy as np
import pytest
import torch
from torch import nn

from vafl.errors import Stalled
from vafl.models.metrics import Metrics
from vafl.protocol.importance import ImportanceScorer
from vafl.protocol.messages import EVERYTHING, Leave
from vafl.protocol.prediction_client import Permutations, PredictionClient
from vafl.run.permutations import Study

ROWS = 400


class Parties:
    """Two clients. The label depends only on the first column of the first client."""

    def __init__(self, groups=("told", "idle"), offered=(True, True)):
        generator = torch.Generator().manual_seed(0)
        self.features = [torch.randn(ROWS, 2, generator=generator) for _ in range(2)]
        self.labels = (self.features[0][:, 0] > 0).float()
        weights = [torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 0.0]])]
        self.clients = []
        for index, (own, weight) in enumerate(zip(self.features, weights, strict=True)):
            model = nn.Linear(2, 1, bias=False)
            model.weight.data = weight
            named = {name: np.array([m]) for m, name in enumerate(groups)} if index == 0 else {}
            allowed = Permutations(np.random.default_rng(index), named) if offered[index] else None
            self.clients.append(PredictionClient(index, own, model, permutations=allowed))
        self.scorer = ImportanceScorer(ROWS, nn.Identity(), torch.zeros(2, 1), summed=True)
        for client in self.clients:
            self.scorer.receive(client.join())

    def study(self, repeats=3):
        rows = np.arange(100, ROWS)
        metrics = Metrics.of("binary", 1)
        return Study(self.scorer, ["bank", "shop"], rows, self.labels[100:], metrics, repeats)

    def complete(self, study):
        while not study.is_done:
            for request in study.advance():
                for said in self.clients[request.client].receive(request):
                    self.scorer.receive(said)


def test_what_the_label_follows_from_matters_and_all_else_does_not():
    parties = Parties()
    study = parties.study()
    parties.complete(study)
    assert study.rows == 300
    assert study.baseline["auc"] == 1.0
    assert set(study.effects) == {(0, EVERYTHING), (0, "told"), (0, "idle"), (1, EVERYTHING)}
    for place, effect in study.effects.items():
        assert (len(effect.loss), effect.rows) == (3, 300)
        if place in ((0, EVERYTHING), (0, "told")):
            assert min(effect.loss) > 0.5
            assert effect.headline == pytest.approx([0.5] * 3, abs=0.1), "the AUC of a guess"
        else:
            assert max(map(abs, effect.loss)) < 1e-9
    assert (study.measured, study.planned) == (12, 12)


def test_one_that_declines_is_named_with_its_reason_and_the_others_are_measured():
    parties = Parties(offered=(True, False))
    study = parties.study()
    parties.complete(study)
    assert set(study.effects) == {(0, EVERYTHING), (0, "told"), (0, "idle")}
    assert "prediction.importance" in study.refused[1, EVERYTHING]
    assert study.measured == study.planned


def test_without_an_answer_of_every_client_there_is_nothing_to_compare_with():
    parties = Parties()
    parties.scorer.receive(Leave(1))
    parties.scorer.overdue.add(1)
    study = parties.study()
    with pytest.raises(Stalled, match=r"VFL-7141.*shop"):
        parties.complete(study)


def test_one_that_goes_away_in_the_middle_is_given_up_and_the_rest_goes_on():
    parties = Parties()
    study = parties.study()
    study.advance()
    for client in parties.clients:
        for request in parties.scorer._requests.of(client.index):
            for said in client.receive(request):
                parties.scorer.receive(said)
    asked = study.advance()
    parties.scorer.receive(Leave(0))
    for request in (request for request in asked if request.client == 1):
        for said in parties.clients[1].receive(request):
            parties.scorer.receive(said)
    while not study.is_done:
        for inquiry in study.waiting:
            if inquiry.is_open and len(inquiry.awaited(0)):
                parties.scorer.give_up(inquiry)
        for request in study.advance():
            for said in parties.clients[request.client].receive(request):
                parties.scorer.receive(said)
    assert {client for client, _ in study.effects} == {1}
    assert {client for client, _ in study.refused} == {0}
