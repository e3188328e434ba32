"""Closed forms against torch's graph."""

import pytest
import torch
from torch import nn

from vafl.models.heads import Bias
from vafl.protocol.gradients import apply_head, embed_batch


@pytest.mark.parametrize("frozen", [False, True])
def test_a_head_with_a_closed_form_gives_what_a_graph_gives(frozen):
    head = Bias(3).requires_grad_(not frozen)
    inputs, slopes = torch.randn(5, 3), torch.randn(5, 3)
    parameters = [] if frozen else [head.bias]
    outputs, pull = apply_head(head, inputs.clone(), parameters)
    as_module = nn.Sequential(head)  # the same function, without its own pull_back
    expected, pull_graph = apply_head(as_module, inputs.clone(), parameters)
    assert torch.equal(outputs, expected)
    (own, others), (graph_own, graph_others) = pull(slopes), pull_graph(slopes)
    torch.testing.assert_close(own, graph_own)
    torch.testing.assert_close(others, graph_others)


def test_a_linear_embedding_needs_no_graph():
    model = nn.Linear(4, 3)
    inputs, slopes, parameters = torch.randn(5, 4), torch.randn(5, 3), list(model.parameters())
    embeddings, pull = embed_batch(model, inputs, parameters)
    expected, pull_graph = embed_batch(nn.Sequential(model), inputs, parameters)
    assert torch.equal(embeddings, expected)
    torch.testing.assert_close(pull(slopes), pull_graph(slopes))
