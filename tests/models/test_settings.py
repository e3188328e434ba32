import pytest
import torch
from torch import nn

from vafl.errors import ConfigError
from vafl.models.embeddings import make_embedding
from vafl.models.heads import Bias, make_head
from vafl.models.settings import EmbeddingSettings, ModelSettings


@pytest.mark.parametrize(
    ("embedding", "shape", "parameters"),
    [
        ("linear", (6,), [(16, 6), (16,)]),
        ("mlp", (6,), [(64, 6), (64,), (16, 64), (16,)]),
        ("tests.models.factories:scaled", (6,), [(16, 6), (16,)]),
    ],
)
def test_embeddings_by_name(embedding, shape, parameters):
    module = make_embedding(EmbeddingSettings(embedding), shape, 16)
    assert [tuple(p.shape) for p in module.parameters()] == parameters


def test_hidden_sizes_of_every_kind():
    settings = {"hidden": (7,)}
    assert make_embedding(EmbeddingSettings("mlp", **settings), (6,), 2)[0].out_features == 7
    assert make_embedding(EmbeddingSettings("cnn", **settings), (1, 4, 4), 2)[0].out_channels == 7
    assert make_embedding(EmbeddingSettings("lstm", **settings), (4, 4), 2).first.hidden_size == 7
    assert make_embedding(EmbeddingSettings("transformer", **settings), (4, 4), 2).first.out_features == 7
    assert make_embedding(EmbeddingSettings("lstm"), (4, 4), 2).first.hidden_size == 16
    cnn = make_embedding(EmbeddingSettings("cnn"), (1, 4, 4), 2)
    deepest = [layer for layer in cnn if isinstance(layer, nn.Conv2d)]
    assert [layer.out_channels for layer in deepest] == [16, 16, 32, 32, 64, 64, 2]


@pytest.mark.parametrize(
    ("settings", "widths", "inputs"),
    [
        ({"head": "linear", "combine": "sum"}, [16, 16, 16], 16),
        ({"head": "linear", "combine": "concat"}, [16, 16, 16], 48),
        ({"head": "mlp", "combine": "concat"}, [4, 1, 7], 12),
        ({"head": "tabular", "combine": "concat"}, [4, 1, 7], 12),
        ({"head": "gated", "combine": "concat"}, [4, 1, 7], 12),
    ],
)
def test_heads_see_the_sum_or_the_concatenation(settings, widths, inputs):
    settings = ModelSettings(**settings)
    assert settings.head_inputs(widths) == inputs
    assert make_head(settings, widths, 5)(torch.zeros(2, inputs)).shape == (2, 5)


@pytest.mark.parametrize(
    ("head", "widths", "said"),
    [("linear", [3, 4], r"VFL-3019.*\[3, 4\]"), ("bias", [4, 4], r"VFL-3039.*5.*4")],
)
def test_a_sum_needs_embeddings_that_can_be_added(head, widths, said):
    by_party = dict(zip(["bank", "shop"], widths, strict=True))
    with pytest.raises(ConfigError, match=said):
        ModelSettings(head=head, width=by_party).widths(["bank", "shop"], 5)


def test_a_bias_head_is_as_wide_as_the_outputs():
    assert ModelSettings().widths(["bank"], 10) == [10]
    assert ModelSettings(width=10).widths(["bank"], 10) == [10]
    assert isinstance(make_head(ModelSettings(), [10] * 3, 10), Bias)
    with pytest.raises(ConfigError, match=r"VFL-3039.*10.*4"):
        ModelSettings(width=4).widths(["bank"], 10)


def test_a_party_without_a_width_gets_the_default_of_the_head():
    settings = {"width": {"bank": 8}, "combine": "concat"}
    assert ModelSettings(head="tabular", **settings).widths(["bank", "shop"], 2) == [8, 32]
    assert ModelSettings(head="linear", **settings).widths(["bank", "shop"], 2) == [8, 16]
    with pytest.raises(ConfigError, match=r"VFL-3018.*shop.*bank"):
        ModelSettings(head="linear", **settings).widths(["shop"], 2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"head": "bias", "combine": "concat"},
            "VFL-3032",
        ),
        ({"head": "gated"}, r"VFL-3030.*sum.*concat"),
        ({"width": -1}, r"VFL-3034.*\-1"),
        ({"head_hidden": (-2,)}, r"VFL-3034.*\[\-2\]"),
        ({"width": 2**20 + 1, "head": "linear"}, r"VFL-3035.*1,048,576.*1,048,577.*1"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        ModelSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": "resnet"}, r"VFL-3031.*tabular, linear, mlp, cnn, lstm.*resnet"),
        ({"hidden": (8, 0)}, r"VFL-3034.*\[8, 0\]"),
        ({"hidden": (4,) * 100}, r"VFL-3035.*100"),
        ({"device": "tpu"}, r"VFL-3017.*tpu"),
        *[
            ({"model": name}, "VFL-3031")
            for name in ("os:", ":call", "..os:system", "os:path.join", "os:a b", "os :x", "a:b:c", "class:x")
        ],
    ],
)
def test_embeddings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        EmbeddingSettings(**settings)


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
    settings = EmbeddingSettings(f"tests.models.factories:{name}")
    with pytest.raises(ConfigError, match=found):
        make_embedding(settings, (6,), 16)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_weights_of_classes_are_positive(weight):
    with pytest.raises(ConfigError, match=r"VFL-3033.*yes"):
        ModelSettings(class_weight={"yes": weight})
