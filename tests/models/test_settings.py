import pytest
import torch
from torch import nn

from vafl.errors import ConfigError
from vafl.models.embeddings import make_embedding
from vafl.models.heads import Bias, make_head
from vafl.models.settings import ModelSettings


@pytest.mark.parametrize(
    ("embedding", "shape", "parameters"),
    [
        ("linear", (6,), [(16, 6), (16,)]),
        ("mlp", (6,), [(64, 6), (64,), (16, 64), (16,)]),
        ("tests.models.factories:scaled", (6,), [(16, 6), (16,)]),
    ],
)
def test_embeddings_by_name(embedding, shape, parameters):
    module = make_embedding(ModelSettings(embedding=embedding, head="linear"), shape, 10)
    assert [tuple(p.shape) for p in module.parameters()] == parameters


def test_hidden_sizes_of_every_kind():
    settings = {"head": "linear", "width": 3, "hidden": (7,)}
    assert make_embedding(ModelSettings("mlp", **settings), (6,), 2)[0].out_features == 7
    assert make_embedding(ModelSettings("cnn", **settings), (1, 4, 4), 2)[0].out_channels == 7
    assert make_embedding(ModelSettings("lstm", **settings), (4, 4), 2).first.hidden_size == 7
    assert make_embedding(ModelSettings("lstm"), (4, 4), 2).first.hidden_size == 16
    deepest = [
        layer for layer in make_embedding(ModelSettings("cnn"), (1, 4, 4), 2) if isinstance(layer, nn.Conv2d)
    ]
    assert [layer.out_channels for layer in deepest] == [16, 16, 32, 32, 64, 64, 2]


@pytest.mark.parametrize(
    ("settings", "inputs"),
    [
        ({"head": "linear", "combine": "sum"}, 16),
        ({"head": "linear", "combine": "concat"}, 48),
        ({"head": "mlp", "combine": "concat", "width": 4}, 12),
    ],
)
def test_heads_see_the_sum_or_the_concatenation(settings, inputs):
    head = make_head(ModelSettings(**settings), clients=3, outputs=5)
    assert head(torch.zeros(2, inputs)).shape == (2, 5)


def test_a_bias_head_is_as_wide_as_the_outputs():
    assert ModelSettings().embedding_width(10) == 10
    assert ModelSettings(width=10).embedding_width(10) == 10
    assert isinstance(make_head(ModelSettings(), 3, 10), Bias)
    with pytest.raises(ConfigError, match=r"VFL-3039.*10.*4"):
        make_embedding(ModelSettings(width=4), (6,), 10)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"embedding": "transformer"},
            r"VFL-3031.*tabular, linear, mlp, cnn, lstm.*transformer",
        ),
        (
            {"head": "bias", "combine": "concat"},
            "VFL-3032",
        ),
        ({"width": -1}, r"VFL-3034.*\-1"),
        ({"hidden": (8, 0)}, r"VFL-3034.*0.*\[8, 0\]"),
        ({"head_hidden": (-2,)}, r"VFL-3034.*\[\-2\]"),
        ({"width": 2**20 + 1, "head": "linear"}, r"VFL-3035.*1,048,576.*1,048,577.*1"),
        ({"hidden": (4,) * 100}, r"VFL-3035.*100.*101"),
        *[
            ({"embedding": name}, "VFL-3031")
            for name in ("os:", ":call", "..os:system", "os:path.join", "os:a b", "os :x", "a:b:c", "class:x")
        ],
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        ModelSettings(**settings)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("too_wide", r"VFL-3016.*6.*16.*\[2,.*17\] float32"),
        ("double", r"VFL-3016.*6.*16.*\[2,.*16\] float64"),
        ("no_module", r"VFL-3015.*int"),
        ("NOT_CALLABLE", r"VFL-3014.*str"),
    ],
)
def test_a_module_of_the_users_own_is_tried_before_it_is_used(name, found):
    settings = ModelSettings(embedding=f"tests.models.factories:{name}", head="linear")
    with pytest.raises(ConfigError, match=found):
        make_embedding(settings, (6,), 10)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_weights_of_classes_are_positive(weight):
    with pytest.raises(ConfigError, match=r"VFL-3033.*yes"):
        ModelSettings(class_weight={"yes": weight})
