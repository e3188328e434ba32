import pytest
import torch
from torch import nn

from tests.federation import run_of, vertical_data
from tests.models import factories
from vafl.errors import ConfigError
from vafl.models.embeddings import (
    SequenceEncoder,
    WithDefault,
    cnn,
    linear,
    lstm,
    make_embedding,
    mlp,
    named_factory,
    transformer,
)
from vafl.models.settings import EmbeddingSettings


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (linear((6,), 3), (6,)),
        (linear((1, 2, 3), 3), (1, 2, 3)),
        (mlp((6,), 3, [5, 4]), (6,)),
        (mlp((2, 3), 3, [5]), (2, 3)),
        (cnn((1, 7, 5), 3, [2, 3, 4]), (1, 7, 5)),
        (cnn((2, 1, 1), 3, [2, 2, 2, 2]), (2, 1, 1)),
        (lstm((4, 2), 3, [5]), (4, 2)),
        (transformer((4, 2), 3, [8]), (4, 2)),
        (transformer((1, 1), 3, [5]), (1, 1)),
    ],
    ids=[
        *("linear", "linear on images", "mlp", "mlp on sequences", "cnn", "cnn on one pixel", "lstm"),
        *("transformer", "transformer of an odd width"),
    ],
)
def test_features_become_embeddings_of_the_width_row_by_row(module, shape):
    features = torch.randn(4, *shape)
    embeddings = module(features)
    assert embeddings.shape == (4, 3)
    assert torch.allclose(module(features[2:3])[0], embeddings[2], atol=1e-6)


def kinds(module):
    return [type(layer).__name__ for layer in module]


def test_layers_of_an_mlp():
    assert kinds(mlp((6,), 3, [5, 4])) == ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert kinds(mlp((6,), 3, [])) == ["Linear"]


def test_the_paper_s_cnn_has_seven_convolutions_and_halves_after_every_second():
    module = cnn((1, 28, 28), 64, [16, 16, 32, 32, 64, 64])
    assert kinds(module).count("Conv2d") == 7
    assert kinds(module).count("MaxPool2d") == 3
    convolutions = [layer for layer in module if isinstance(layer, nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [16, 16, 32, 32, 64, 64, 64]


def test_the_sequence_encoder_ends_in_the_last_state_of_the_second_lstm():
    encoder, sequences = SequenceEncoder(2, 4, 3), torch.randn(5, 6, 2)
    states, _ = encoder.first(sequences)
    assert states.shape == (5, 6, 8)
    outputs, _ = encoder.second(states)
    assert torch.allclose(encoder(sequences), outputs[:, -1])


def test_images_and_sequences_are_asked_for():
    with pytest.raises(ConfigError, match=r"VFL-3011.*\[5\]"):
        cnn((5,), 3, [2])
    with pytest.raises(ConfigError, match=r"VFL-3012.*\[1, 2, 3\]"):
        lstm((1, 2, 3), 3, [2])


def test_a_factory_of_the_users_own():
    assert named_factory("tests.models.factories:scaled") is factories.scaled


@pytest.mark.parametrize(
    "name",
    ["no_such_package:Factory", "tests.models.factories:missing"],
)
def test_a_factory_that_cannot_be_imported(name):
    with pytest.raises(ConfigError, match=rf'VFL-3013.*"{name}".*PYTHONPATH'):
        named_factory(name)


def test_a_transformer_sees_the_order_of_the_steps():
    torch.manual_seed(0)
    module, series = transformer((6, 2), 3, [8]), torch.randn(5, 6, 2)
    assert not torch.allclose(module(series.flip(1)), module(series), atol=1e-3)
    with torch.no_grad():
        module.places.zero_()
    assert torch.allclose(module(series.flip(1)), module(series), atol=1e-5)


def test_a_transformer_is_the_same_in_training_and_evaluation():
    """Without gradients and in evaluation, torch uses another implementation of the layers."""
    module, series = transformer((6, 2), 3, [8]), torch.randn(5, 6, 2)
    trained = module.train()(series)
    with torch.no_grad():
        assert torch.allclose(module.eval()(series), trained, atol=1e-5)


@pytest.mark.parametrize(("hidden", "heads"), [(8, 4), (6, 2), (5, 1)])
def test_a_transformer_has_as_many_heads_as_divide_its_width(hidden, heads):
    assert [layer.self_attn.num_heads for layer in transformer((6, 2), 3, [hidden]).layers] == [heads] * 2


@pytest.mark.parametrize("shape", [(513, 2), (5,), (1, 4, 4)])
def test_a_transformer_takes_short_series_only(shape):
    with pytest.raises(ConfigError, match="VFL-3022"):
        transformer(shape, 3, [8])


def series_run(**sections):
    """Return a run on series whose label depends on the order of two steps only."""
    data = vertical_data(rows=60, clients=1, shape=(4, 1), classes=2)
    series = data.parties[0].features
    data.labels[:] = (series[:, 0, 0] > series[:, 3, 0]).long()
    return run_of(
        data,
        embedding={"model": "transformer", "hidden": [8]},
        optimiser={"name": "Adam", "step_size": 0.01},
        schedule={"batch_size": 20},
        **sections,
    )


def test_a_transformer_learns_which_step_was_first():
    run = series_run(stop={"updates": 150}, evaluation={"every": 150})
    assert run.train()[-1].metrics["accuracy"] > 0.9


def test_a_transformer_is_trained_with_noise():
    """Its attention is differentiated per record; tests turn torch's warning about that into an error."""
    noise = {"clip": 1.0, "noise": 0.01, "gradient_clip": 1.0, "gradient_noise": 0.01}
    run = series_run(stop={"updates": 3}, privacy={"mode": "dp_train", "mu_max": "unlimited", **noise})
    before = [value.detach().clone() for value in run.models[0].parameters()]
    run.train()
    pairs = zip(before, run.models[0].parameters(), strict=True)
    assert not any(torch.equal(earlier, now) for earlier, now in pairs)


NETWORKS = {
    "linear": (5,),
    "mlp": (5,),
    "cnn": (1, 4, 4),
    "lstm": (4, 2),
    "transformer": (4, 2),
    "tests.models.factories:scaled": (2, 3),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_absent_records_get_one_learnt_embedding_and_teach_the_network_nothing(name):
    shape, settings = NETWORKS[name], EmbeddingSettings(model=name)
    size = int(torch.Size(shape).numel())
    model = make_embedding(settings, (size + 1,), 3, record_shape=shape)
    assert isinstance(model, WithDefault)
    records, absent = torch.randn(6, *shape), torch.tensor([0.0, 1, 0, 0, 1, 0])[:, None]
    features = torch.cat([records.flatten(1) * (1 - absent), absent], 1)
    with torch.no_grad():
        model.default.copy_(torch.tensor([1.0, 2.0, 3.0]))
    embeddings, present = model(features), absent[:, 0] == 0
    assert torch.equal(embeddings[~present], model.default.expand(2, 3))
    assert torch.allclose(embeddings[present], model.inner(records[present]), atol=1e-6)
    slopes = torch.randn(6, 3)
    parameters = list(model.inner.parameters())
    default, *found = torch.autograd.grad((embeddings * slopes).sum(), [model.default, *parameters])
    assert torch.allclose(default, slopes[~present].sum(0))
    alone = (model.inner(records[present]) * slopes[present]).sum()
    expected = torch.autograd.grad(alone, parameters)
    assert all(torch.allclose(one, two, atol=1e-5) for one, two in zip(found, expected, strict=True))


def test_records_of_the_shape_of_their_features_need_no_default():
    settings = EmbeddingSettings(model="mlp")
    assert not isinstance(make_embedding(settings, (5,), 3, record_shape=(5,)), WithDefault)
    assert not isinstance(make_embedding(settings, (5,), 3), WithDefault)
