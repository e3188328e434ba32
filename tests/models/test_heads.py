from itertools import accumulate

import pytest
import torch
from torch import nn

from vafl.models.heads import Bias, deep, input_layers, linear, make_head
from vafl.models.settings import ModelSettings


def test_a_bias_starts_at_nothing_and_is_added():
    head, sums = Bias(3), torch.randn(2, 3)
    assert torch.equal(head(sums), sums)
    with torch.no_grad():
        head.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(head(sums), sums + torch.tensor([1.0, 2.0, 3.0]))


def test_a_linear_head_is_one_layer():
    assert linear(4, 2)(torch.zeros(5, 4)).shape == (5, 2)


def test_a_deep_head_begins_with_the_embeddings_non_linearity():
    head = deep(4, 2, [3])
    assert isinstance(head[0], nn.ReLU)
    assert torch.equal(head(torch.full((1, 4), -1.0)), head(torch.zeros(1, 4)))
    assert [tuple(p.shape) for p in head.parameters()] == [(3, 4), (3,), (2, 3), (2,)]


WIDTHS = {"bank": 2, "shop": 3, "clinic": 1}
INPUT_LAYERS = {
    "linear": [("", "")],
    "mlp": [("", "1.0")],
    "tabular": [("", "network.0"), ("", "linear")],
    "gated": [("bank", "parties.0"), ("shop", "parties.1"), ("clinic", "parties.2")],
}


def columns_of(widths):
    ends = list(accumulate(widths.values()))
    return {name: slice(end - width, end) for (name, width), end in zip(widths.items(), ends, strict=True)}


@pytest.mark.parametrize("hidden", [(4,), (), (4, 3)])
@pytest.mark.parametrize("kind", INPUT_LAYERS)
def test_the_layers_that_take_the_embeddings(kind, hidden):
    head = make_head(ModelSettings(head=kind, combine="concat", head_hidden=hidden), list(WIDTHS.values()), 2)
    layers = input_layers(head, columns_of(WIDTHS))
    assert [(party, layer) for party, layer in layers] == [
        (party, head.get_submodule(name)) for party, name in INPUT_LAYERS[kind]
    ]
