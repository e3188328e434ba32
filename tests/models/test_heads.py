import torch
from torch import nn

from vafl.models.heads import Bias, deep, linear


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
