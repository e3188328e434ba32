import pytest
import torch
from torch import nn

from vafl.errors import ConfigError
from vafl.models.embeddings import SequenceEncoder, cnn, mlp
from vafl.privacy.mechanism.layers import HiddenNoise, require_separate_records
from vafl.privacy.mechanism.noise import Noise
from vafl.privacy.settings import PrivacySettings


def hidden(model, *layers, **more):
    settings = PrivacySettings(mode="embed_only", noise=1.0, layers=layers, **more)
    return HiddenNoise(model, settings, Noise())


def test_noise_comes_before_the_hidden_activations_only():
    model = mlp((3,), 2, (4, 5))
    own = hidden(model, 0.1, 0.2)
    seen = []
    model[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    features = torch.randn(10_000, 3)
    model(features)
    added = seen[0] - (features @ model[0].weight.t() + model[0].bias)
    assert added.std().item() == pytest.approx(0.1, rel=0.05)
    assert added.abs().max() <= 0.1 * 3**0.5 * 1.001
    assert [drawn.shape for drawn in own.drawn] == [(10_000, 4), (10_000, 5)]


def test_noise_on_outputs_comes_behind_the_activations():
    model = mlp((3,), 2, (4,))
    hidden(model, 0.1, placement="output", layer_noise="gaussian")
    seen = []
    model[2].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(torch.randn(5_000, 3))
    assert (seen[0] < 0).any()  # a ReLU's output would not be


def test_no_noise_while_the_model_is_evaluated():
    model = mlp((3,), 2, (4,)).eval()
    hidden(model, 1.0)
    features = torch.randn(5, 3)
    assert torch.equal(model(features), model(features))


def test_noise_can_be_replayed():
    model = mlp((3,), 2, (4,))
    own = hidden(model, 1.0)
    features = torch.randn(5, 3)
    first = model(features)
    own.replayed = own.drawn
    assert torch.equal(model(features), first)


def test_one_number_is_for_all_layers_and_zero_is_none():
    assert len(hidden(mlp((3,), 2, (4, 5, 6)), 0.1).drawn) == 3
    assert len(hidden(mlp((3,), 2, (4, 5, 6)), 0.1, 0.0, 0.1).drawn) == 2


def test_recurrent_layers_are_noised_at_their_output():
    model = SequenceEncoder(3, 4, 2)
    own = hidden(model, 0.1)
    model(torch.randn(6, 5, 3))
    assert own.drawn[0].shape == (6, 5, 8)


def test_a_wrong_number_of_layers_is_refused():
    with pytest.raises(ConfigError, match=r"VFL-5071.*3.*2"):
        hidden(mlp((3,), 2, (4, 5, 6)), 0.1, 0.2)


class MixesRecords(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, features):
        return self.layer(features - features.mean(0))


@pytest.mark.parametrize("model", [mlp((3,), 2, (4,)), nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))])
def test_models_that_treat_records_one_by_one_pass(model):
    require_separate_records(model, torch.randn(4, 3))


def test_built_in_models_pass():
    require_separate_records(cnn((1, 8, 8), 2, (3, 3)), torch.randn(4, 1, 8, 8))
    require_separate_records(SequenceEncoder(3, 4, 2), torch.randn(4, 5, 3))


def test_dropout_mixes_no_records_and_goes_on_dropping():
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    require_separate_records(model, torch.randn(4, 3))
    assert model[1].training


def test_what_large_weights_round_is_no_mixing():
    """Some sums cancel and one does not. Rounding depends on how many rows are multiplied together."""
    model = nn.Linear(1000, 2, bias=False)
    with torch.no_grad():
        model.weight[:] = torch.tensor([1e4, -1e4]).repeat(500)
    example = torch.randn(4, 500).repeat_interleave(2, dim=1)
    example[0] = torch.randn(1000)
    require_separate_records(model, example)


def test_batch_normalisation_is_refused():
    with pytest.raises(ConfigError, match=r"VFL-5072.*1.*BatchNorm1d"):
        require_separate_records(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.randn(4, 3))


def test_any_other_mixing_of_records_is_found_by_trying():
    with pytest.raises(ConfigError, match="VFL-5073"):
        require_separate_records(MixesRecords(), torch.randn(4, 3))
