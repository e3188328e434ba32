from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

from tests.federation import Exchange, parameters, run_of, same, vertical_data
from vafl.errors import Diverged, InvalidMessage
from vafl.protocol.client import Client
from vafl.protocol.descent import Descent
from vafl.protocol.messages import Evaluate, Gradient, Query, Refresh, Request, Skipped, Upload, Welcome
from vafl.protocol.prediction_client import embed
from vafl.protocol.refresh import NoRefresh, RefreshAll
from vafl.protocol.schedule import BatchSchedule
from vafl.protocol.settings import OptimiserSettings, RuleSettings

ROWS, HELD_OUT, COLUMNS, WIDTH, ETA = 7, 4, 3, 2, 0.5
EVERYTHING = torch.randn(ROWS + HELD_OUT, COLUMNS, generator=torch.Generator().manual_seed(1))
FEATURES = EVERYTHING[:ROWS]


def client(model=None, refresh=None, l2=0.0, perturb=None, at_evaluation=None, features=FEATURES, **rule):
    torch.manual_seed(0)
    model = nn.Linear(COLUMNS, WIDTH) if model is None else model
    return Client(
        index=1,
        features=features,
        model=model,
        descent=Descent.of(OptimiserSettings(step_size=ETA), model.parameters()),
        schedule=BatchSchedule("epochs", ROWS, 3, 0, 1),
        refresh=refresh or NoRefresh(),
        rule=RuleSettings(**rule),
        l2=l2,
        perturb=perturb,
        at_evaluation=at_evaluation,
    )


def state(of):
    return [p.detach().clone() for p in of.model.parameters()], of.activation, of.waiting, of.owed


def gradient(upload, activations=(4, 4), iteration=8):
    values = np.arange(upload.embeddings.size, dtype=np.float32).reshape(upload.embeddings.shape)
    return Gradient(1, upload.activation, iteration, values, activations)


# --- one activation ---


def test_an_activation_uploads_the_scheduled_batch_and_waits_for_the_answer():
    own = client()
    (upload,) = own.wake()
    assert isinstance(upload, Upload)
    assert (upload.client, upload.activation, upload.answer) == (1, 0, True)
    assert upload.rows.tolist() == BatchSchedule("epochs", ROWS, 3, 0, 1).batch(0).tolist()
    expected = own.model(FEATURES[upload.rows]).detach().numpy()
    np.testing.assert_allclose(upload.embeddings, expected, rtol=1.3e-6, atol=1e-5)
    assert isinstance(upload.embeddings, np.ndarray), "no graph leaves with it"
    assert own.waiting
    assert own.receive(gradient(upload)) == []
    assert not own.waiting
    (second,) = own.wake()
    assert second.activation == 1
    assert second.sequence > upload.sequence


@pytest.mark.parametrize("l2", [0.0, 0.1])
def test_the_answer_is_backpropagated_with_the_regulariser(l2):
    own = client(l2=l2)
    (upload,) = own.wake()
    features, answer = FEATURES[upload.rows], gradient(upload)
    weight, bias = (p.detach().clone() for p in own.model.parameters())
    own.receive(answer)
    slopes = torch.from_numpy(answer.gradients)
    assert torch.allclose(own.model.weight, weight - ETA * (slopes.T @ features + l2 * weight))
    assert torch.allclose(own.model.bias, bias - ETA * (slopes.sum(0) + l2 * bias))


def test_local_steps_apply_the_same_gradient_at_the_moved_point():
    """Q = 2 applies one answer twice. The second step differentiates the updated model."""
    model = nn.Sequential(nn.Linear(COLUMNS, 4), nn.Tanh(), nn.Linear(4, WIDTH))
    own = client(model, l2=0.1, local_steps=2)
    (upload,) = own.wake()
    expected = nn.Sequential(nn.Linear(COLUMNS, 4), nn.Tanh(), nn.Linear(4, WIDTH))
    expected.load_state_dict(model.state_dict())
    answer = gradient(upload)
    own.receive(answer)
    slopes = torch.from_numpy(answer.gradients)
    for _ in range(2):
        out = expected(FEATURES[upload.rows])
        penalty = 0.05 * sum(p.square().sum() for p in expected.parameters())
        gradients = torch.autograd.grad((out * slopes).sum() + penalty, list(expected.parameters()))
        with torch.no_grad():
            for p, g in zip(expected.parameters(), gradients, strict=True):
                p.sub_(g, alpha=ETA)
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)


def test_a_skipped_upload_moves_nothing_but_the_schedule():
    own = client()
    (upload,) = own.wake()
    before = [p.detach().clone() for p in own.model.parameters()]
    assert own.receive(Skipped(1, 0, 3, (2, 2), "stale")) == []
    assert same(before, [p.detach() for p in own.model.parameters()])
    (following,) = own.wake()
    assert following.activation == upload.activation + 1


def test_the_refresh_comes_after_the_update_with_the_new_model():
    own = client(refresh=RefreshAll())
    (upload,) = own.wake()
    (refresh,) = own.receive(gradient(upload))
    assert isinstance(refresh, Refresh)
    assert refresh.request is None
    assert refresh.rows.tolist() == list(range(ROWS))
    assert np.array_equal(refresh.embeddings, own.model(FEATURES).detach().numpy())


def test_a_request_is_answered_with_exactly_its_rows_even_while_waiting():
    own = client()
    own.wake()
    (answer,) = own.receive(Request(1, 5, np.array([6, 0])))
    assert (answer.request, answer.rows.tolist()) == (5, [6, 0])
    assert np.array_equal(answer.embeddings, own.model(FEATURES[[6, 0]]).detach().numpy())
    assert own.waiting


def test_the_first_act_may_be_a_full_upload():
    own = client(start="upload")
    everything, upload = own.wake()
    assert isinstance(everything, Refresh)
    assert everything.rows.tolist() == list(range(ROWS))
    own.receive(gradient(upload))
    assert [type(message) for message in own.wake()] == [Upload]


def test_query_first_asks_updates_then_uploads_anew():
    own = client(order="query-first", refresh=RefreshAll())
    (first,) = own.wake()
    assert not first.answer
    assert not own.waiting, "the step is the server's business"
    (query,) = own.wake()
    assert isinstance(query, Query)
    assert query.activation == 0
    assert own.waiting
    before = own.model.weight.detach().clone()
    upload, refresh = own.receive(gradient(first))
    assert not torch.equal(own.model.weight, before)
    assert upload.activation == 1
    assert np.array_equal(upload.embeddings, own.model(FEATURES[upload.rows]).detach().numpy())
    assert np.array_equal(refresh.embeddings, own.model(FEATURES).detach().numpy())
    assert not own.waiting


@pytest.mark.parametrize("order", ["upload-first", "query-first"])
def test_a_welcome_puts_the_client_where_the_server_stands(order):
    own = client(order=order)
    own.wake()
    if order == "query-first":
        own.wake()
    assert own.receive(Welcome(1, 40, (9, 6))) == []
    assert not own.waiting
    before = state(own)
    assert own.receive(Gradient(1, 0, 3, np.ones((3, WIDTH), np.float32), (1, 1))) == [], "given up: no fault"
    assert same(before, state(own))
    (upload,) = own.wake()
    assert upload.activation == 6


# --- joining again ---


def test_a_join_says_where_the_client_stands():
    own = client(window=2)
    assert position(own.join()) == (0, 0, -1)
    (first,), (_,) = own.wake(), own.wake()
    assert position(own.join()) == (2, 0, -1)
    own.receive(gradient(first, iteration=8))
    assert position(own.join()) == (2, 1, 8)
    own.receive(Skipped(1, 1, 9, (1, 2), "stale"))
    assert position(own.join()) == (2, 2, 8), "a skipped upload teaches nothing"


def position(join):
    return join.activation, join.applied, join.iteration


@pytest.mark.parametrize("known", [0, 1, 2])
def test_uploads_the_server_never_got_are_said_again_bit_by_bit(known):
    own = client(window=2, perturb=lambda embeddings: embeddings + torch.randn_like(embeddings))
    uploads = [*own.wake(), *own.wake()]
    own.join()
    again = own.receive(Welcome(1, 5, (3, known)))
    assert len(again) == 2 - known
    for first, second in zip(uploads[known:], again, strict=True):
        assert (second.activation, second.in_flight) == (first.activation, first.in_flight)
        assert np.array_equal(second.rows, first.rows)
        assert np.array_equal(second.embeddings, first.embeddings), "not even the noise is drawn anew"
    assert [message.sequence for message in again] == list(range(1, 3 - known)), "counted anew"
    assert own.waiting


def test_a_query_is_asked_again_after_a_welcome():
    own = client(order="query-first")
    (upload,) = own.wake()
    own.wake()
    assert own.waiting
    own.join()
    assert own.receive(Welcome(1, 5, (3, 1))) == []
    assert not own.waiting
    (query,) = own.wake()
    assert isinstance(query, Query)
    assert query.activation == upload.activation


def test_a_repeated_answer_is_ignored():
    own = client(window=2)
    (upload,), _ = own.wake(), own.wake()
    own.receive(gradient(upload))
    before = state(own)
    for message in (gradient(upload), Skipped(1, 0, 3, (2, 2), "the answer to this upload was lost")):
        assert own.receive(message) == []
        assert same(before, state(own))


def test_a_restored_client_goes_on_from_its_checkpoint():
    options = OptimiserSettings(name="Adam", step_size=0.1)
    own, other = client(), client()
    for each in (own, other):
        each.descent = Descent.of(options, each.model.parameters())
    for _ in range(3):
        own.receive(gradient(*own.wake(), iteration=own.activation + 4))
    other.model.load_state_dict(own.model.state_dict())
    other.restore(own.applied, own.iteration, deepcopy(own.descent.state()))
    assert position(other.join()) == position(own.join()) == (3, 3, 7)
    for each in (own, other):
        each.receive(gradient(*each.wake()))
    assert same(state(own)[0], state(other)[0])


# --- more than one upload in flight ---


def test_a_window_lets_so_many_uploads_be_in_flight():
    own = client(window=3)
    uploads = []
    for behind in range(3):
        assert not own.waiting
        uploads += own.wake()
        assert (uploads[-1].activation, uploads[-1].in_flight) == (behind, behind)
    assert own.waiting
    (refresh,) = own.receive(Request(1, 0, np.array([2])))
    assert refresh.in_flight == 3
    own.receive(gradient(uploads[0]))
    assert not own.waiting
    assert own.applied == 1
    (fourth,) = own.wake()
    assert (fourth.activation, fourth.in_flight) == (3, 2)


def test_an_answer_to_an_older_model_is_differentiated_where_the_model_now_is():
    """Upload 1 was embedded before answer 0 changed the model. Its gradient uses the current Jacobian."""
    model = nn.Sequential(nn.Linear(COLUMNS, 4), nn.Tanh(), nn.Linear(4, WIDTH))
    own = client(model, window=2)
    (first,), (second,) = own.wake(), own.wake()
    own.receive(gradient(first))
    answer = gradient(second)
    before = [p.detach().clone() for p in model.parameters()]
    embeddings = model(FEATURES[second.rows])
    expected = torch.autograd.grad(embeddings, list(model.parameters()), torch.from_numpy(answer.gradients))
    own.receive(answer)
    for found, old, wanted in zip(model.parameters(), before, expected, strict=True):
        assert torch.allclose(found, old - ETA * wanted, atol=1e-6)


def test_rows_held_out_are_embedded_as_for_evaluation_and_only_when_asked_for():
    model = nn.Sequential(nn.Linear(COLUMNS, WIDTH), nn.Dropout(0.9))
    own = client(model, refresh=RefreshAll(), features=EVERYTHING, start="upload")
    everything, upload = own.wake()
    (refresh,) = own.receive(gradient(upload))
    assert len(everything.rows) == len(refresh.rows) == ROWS
    (answer,) = own.receive(Evaluate(1, 0, np.array([ROWS, ROWS + 3])))
    assert np.array_equal(answer.embeddings, model[0](EVERYTHING[[ROWS, ROWS + 3]]).detach().numpy())
    assert model.training


def test_a_request_is_for_training_rows_and_an_evaluation_for_held_out_rows():
    kept = []
    own = client(at_evaluation=lambda _, best, *, restore: kept.append((best, restore)), features=EVERYTHING)
    mixed = np.array([ROWS - 1, ROWS])
    with pytest.raises(InvalidMessage, match=rf"VFL-4003.*{ROWS}"):
        own.receive(Request(1, 0, mixed))
    with pytest.raises(InvalidMessage, match=rf"VFL-4004.*{ROWS}.*{ROWS - 1}"):
        own.receive(Evaluate(1, 0, mixed, best=0))
    assert kept == []
    own.receive(Evaluate(1, 0, mixed[1:], best=2, restore=True))
    own.receive(Evaluate(1, 1, mixed[1:]))
    assert kept == [(2, True)]


# --- what a client refuses ---


def zeros(*shape):
    return np.zeros(shape, np.float32)


REFUSED = {
    "for another client": (
        Gradient(0, 0, 1, zeros(3, WIDTH), (1, 1)),
        r"VFL-4061.*1.*0",
    ),
    "another activation": (Gradient(1, 4, 1, zeros(3, WIDTH), (1, 1)), r"VFL-4001.*4"),
    "another width": (
        Gradient(1, 0, 1, zeros(3, 5), (1, 1)),
        r"VFL-4002.*0.*\[3, 2\].*\[3, 5\]",
    ),
    "too few rows": (Gradient(1, 0, 1, zeros(2, WIDTH), (1, 1)), r"VFL-4002.*\[3, 2\].*\[2, 2\]"),
    "rows it does not have": (
        Request(1, 0, np.array([2, ROWS])),
        r"VFL-4082.*6.*2.*7",
    ),
    "negative rows": (Request(1, 0, np.array([-1])), r"VFL-4082.*\-1"),
    "a row twice": (Request(1, 0, np.array([3, 2, 3])), "VFL-4081"),
    "skipped another activation": (Skipped(1, 3, 1, (1, 1), "stale"), r"VFL-4001.*3"),
}


@pytest.mark.parametrize(("message", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_a_message_that_does_not_fit_is_refused_and_changes_nothing(message, said):
    own = client()
    (upload,) = own.wake()
    before = state(own)
    with pytest.raises(InvalidMessage, match=said):
        own.receive(message)
    assert same(before, state(own))
    own.receive(gradient(upload))


def test_embeddings_that_are_not_finite_are_divergence():
    own = client(start="upload")
    with torch.no_grad():
        own.model.bias.fill_(float("inf"))
    with pytest.raises(Diverged, match="VFL-4035"):
        own.wake()
    own = client()
    with torch.no_grad():
        own.model.bias.fill_(float("nan"))
    with pytest.raises(Diverged, match="VFL-4035"):
        own.wake()


# --- any torch module ---


class SharedGradient(nn.Module):
    """Autograd returns the same gradient tensor for both biases."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.full((WIDTH,), 5.0))

    def forward(self, features):
        return features[:, :WIDTH] + (self.one + self.two)


def test_the_regulariser_of_one_parameter_does_not_reach_another():
    own = client(SharedGradient(), l2=0.1)
    (upload,) = own.wake()
    answer = gradient(upload)
    own.receive(answer)
    summed = torch.from_numpy(answer.gradients).sum(0)
    assert torch.allclose(own.model.one, 1 - ETA * (summed + 0.1 * 1))
    assert torch.allclose(own.model.two, 5 - ETA * (summed + 0.1 * 5))


def test_frozen_parameters_stay_and_the_others_move():
    model = nn.Sequential(nn.Linear(COLUMNS, 4), nn.Linear(4, WIDTH))
    model[0].requires_grad_(False)
    own = client(model)
    before = [p.detach().clone() for p in model.parameters()]
    (upload,) = own.wake()
    own.receive(gradient(upload))
    unmoved = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert unmoved == [True, True, False, False]


@pytest.mark.parametrize("model", [nn.Identity(), nn.Linear(COLUMNS, COLUMNS).requires_grad_(False)])
def test_an_embedding_without_anything_to_train_is_fine(model):
    own = client(model)
    (upload,) = own.wake()
    assert own.receive(gradient(upload)) == []
    assert not own.waiting


def test_embedding_in_parts_gives_the_same(monkeypatch):
    model, features = nn.Linear(COLUMNS, WIDTH), torch.randn(ROWS, COLUMNS)
    monkeypatch.setattr("vafl.protocol.prediction_client._EMBED_ROWS", 2)
    assert torch.allclose(embed(model, features), model(features))
    rows = np.array([6, 1, 3])
    assert torch.allclose(embed(model, features, rows), model(features[rows]))
    assert not embed(model, features).requires_grad


def test_what_leaves_is_perturbed():
    own = client(perturb=lambda embeddings: embeddings * 0 + 7, start="upload")
    everything, upload = own.wake()
    (answer,) = own.receive(Request(1, 0, np.array([2])))
    for message in (everything, upload, answer):
        assert (message.embeddings == 7).all()


# --- server and clients together are autograd on the joint model ---

SHAPES = {"linear": (4,), "mlp": (4,), "cnn": (1, 4, 5), "lstm": (3, 4)}
HEADS = [
    {"head": "bias"},
    {"head": "linear", "combine": "sum", "width": 5},
    {"head": "linear", "combine": "concat", "width": 5},
    {"head": "mlp", "combine": "sum", "width": 5, "head_hidden": [6]},
    {"head": "mlp", "combine": "concat", "width": 5, "head_hidden": [6]},
]
HIDDEN = {"linear": [], "mlp": [6], "cnn": [3, 4], "lstm": [3]}


@pytest.mark.parametrize("embedding", SHAPES)
@pytest.mark.parametrize("head", HEADS, ids=lambda head: "-".join(map(str, head.values())))
def test_one_round_moves_every_parameter_along_the_joint_gradient(embedding, head):
    data = vertical_data(rows=6, clients=3, shape=SHAPES[embedding], classes=3)
    run = run_of(
        data,
        embedding={"model": embedding, "hidden": HIDDEN[embedding]},
        model={**head},
        rule={"name": "sync"},
        schedule={"batch_size": 5},
        optimiser={"step_size": ETA, "l2": 0.1},
    )
    exchange = Exchange(run)
    before, rows = parameters(run), run.runtime.clients[0]._schedule.batch(0)
    parts = [model(party.features[rows]) for model, party in zip(run.models, data.parties, strict=True)]
    inputs = sum(parts) if head.get("combine", "sum") == "sum" else torch.cat(parts, 1)
    loss = nn.functional.cross_entropy(run.head(inputs), data.labels[rows])
    penalty = 0.05 * sum(p.square().sum() for model in run.models for p in model.parameters())
    every = [p for module in (*run.models, run.head) for p in module.parameters()]
    gradients = torch.autograd.grad(loss + penalty, every)
    for index in range(3):
        exchange.turn(index)
    assert exchange.server.iteration == 1
    for found, old, wanted in zip(parameters(run), before, gradients, strict=True):
        assert torch.allclose(found, old - ETA * wanted, atol=1e-6)


class Scaled(nn.Module):
    """Its parameter is a single number."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, features):
        return features[:, :2] * self.scale


class Rounded(nn.Module):
    """Its parameters and outputs have a type that numpy does not support."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2).bfloat16()

    def forward(self, features):
        return self.layer(features.bfloat16())


def strided():
    layer = nn.Linear(3, 2)
    layer.bias = nn.Parameter(torch.arange(4.0)[::2])
    return layer


@pytest.mark.parametrize("optimiser", ["sgd", "Adam", "RMSprop"])
@pytest.mark.parametrize("model", [Scaled, Rounded, strided])
def test_parameters_of_any_kind_are_trained(model, optimiser):
    own = model()
    subject = client(own, l2=0.1)
    subject.descent = Descent.of(OptimiserSettings(name=optimiser, step_size=0.5), own.parameters())
    before = [parameter.detach().clone() for parameter in own.parameters()]
    (upload,) = subject.wake()
    subject.receive(gradient(upload))
    assert all(not torch.equal(was, now) for was, now in zip(before, own.parameters(), strict=True))
