import pytest
import torch
from torch import nn

from tests.models import factories
from vafl.errors import ConfigError
from vafl.models.embeddings import SequenceEncoder, cnn, linear, lstm, mlp, named_factory


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
    ],
    ids=["linear", "linear on images", "mlp", "mlp on sequences", "cnn", "cnn on one pixel", "lstm"],
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
