"""Closed forms against torch's graph."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from vafl.models.gated import GatedHead
from vafl.models.heads import Bias
from vafl.models.tabular import TabularHead
from vafl.protocol.gradients import AffineFirst, ages, head_with_way_back, model_with_way_back

ROWS = np.arange(5)
BLOCKS = [
    (slice(None), slice(None)),
    (slice(1, 4), slice(None)),
    (slice(None), slice(1, 3)),
    (slice(2, 5), slice(0, 1)),
]


def randn(*shape):
    return torch.randn(shape).numpy()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_head_with_a_closed_form_gives_what_a_graph_gives(frozen):
    head = Bias(3).requires_grad_(not frozen)
    inputs, slopes = randn(5, 3), randn(5, 3)
    parameters = [] if frozen else [head.bias]
    outputs, pull = head_with_way_back(head, parameters)(inputs.copy())
    as_module = nn.Sequential(head)  # the same function without a closed form
    expected, pull_graph = head_with_way_back(as_module, parameters)(inputs.copy())
    assert np.array_equal(outputs, expected)
    (own, others), (graph_own, graph_others) = pull(slopes, BLOCKS), pull_graph(slopes, BLOCKS)
    torch.testing.assert_close(own, graph_own)
    torch.testing.assert_close(others, graph_others)


class Opaque(nn.Module):
    """The same function in a module that is not recognised as a chain of layers."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, inputs):
        return self.inner(inputs)


relu = nn.ReLU()
NETWORKS = [
    nn.Linear(4, 3),
    nn.Sequential(nn.Linear(4, 3), nn.ReLU()),
    nn.Sequential(nn.ReLU(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)),
    nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(4, 6), relu, nn.Linear(6, 5), relu, nn.Linear(5, 3))),
]


@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_affine_layers_and_relus_need_no_graph(network):
    inputs, slopes, parameters, kept = randn(5, 4), randn(5, 3), list(network.parameters()), []
    with saved_tensors_hooks(kept.append, lambda packed: packed):  # collects the tensors that a graph saves
        embeddings, pull_model = model_with_way_back(network, parameters)(inputs, ROWS)
        outputs, pull = head_with_way_back(network, parameters)(inputs.copy())
        gradients, (own, others) = pull_model(slopes), pull(slopes, BLOCKS)
    assert not kept
    expected, pull_graph = model_with_way_back(Opaque(network), parameters)(inputs, ROWS)
    torch.testing.assert_close(embeddings, expected)
    torch.testing.assert_close(gradients, pull_graph(slopes))
    expected, pull_graph = head_with_way_back(Opaque(network), parameters)(inputs.copy())
    torch.testing.assert_close(outputs, expected)
    graph_own, graph_others = pull_graph(slopes, BLOCKS)
    torch.testing.assert_close(own, graph_own)
    torch.testing.assert_close(others, graph_others)
    assert all(part.flags.c_contiguous for part in [*own, *graph_own]), "messages need contiguous arrays"


@pytest.mark.parametrize("hidden", [(), (6,), (6, 5)])
@pytest.mark.parametrize("trains", [False, True])
def test_a_head_whose_first_layers_are_affine_gives_what_a_graph_gives(hidden, trains):
    torch.manual_seed(0)
    head = TabularHead(4, 3, hidden).train(trains)
    head.measure(torch.randn(20) * 5 + 7)
    check_head(head, copy.deepcopy(head))


@pytest.mark.parametrize("widths", [[4], [2, 2], [1, 2, 1]])
@pytest.mark.parametrize("trains", [False, True])
def test_a_gated_head_gives_what_a_graph_gives(widths, trains):
    torch.manual_seed(0)
    head = GatedHead(widths, 3, (6,)).train(trains)
    for party in head.parties:
        nn.init.normal_(party.weight, std=0.1)
    check_head(head, copy.deepcopy(head))


def check_head(head, twin):
    """Compare the outputs and gradients of a head with those of autograd through its twin."""
    inputs, slopes, parameters = randn(5, 4), randn(5, 3), list(head.parameters())
    passed = head_with_way_back(head, parameters)
    assert isinstance(passed, AffineFirst)
    by_graph = head_with_way_back(Opaque(twin), list(twin.parameters()))
    for _ in range(2):
        (outputs, pull), (expected, pull_graph) = passed(inputs.copy()), by_graph(inputs.copy())
        torch.testing.assert_close(outputs, expected)
        (own, others), (graph_own, graph_others) = pull(slopes, BLOCKS), pull_graph(slopes, BLOCKS)
        torch.testing.assert_close(own, graph_own)
        torch.testing.assert_close(list(others), list(graph_others))
        assert all(part.flags.c_contiguous for part in [*own, *others])
        with torch.no_grad():  # the arrays follow the parameters
            torch._foreach_add_([*parameters, *twin.parameters()], 1.0)


def test_only_the_way_back_through_one_affine_map_never_ages():
    inputs, slopes = randn(5, 4), randn(5, 3)
    for network in NETWORKS:
        _, pull = model_with_way_back(network, list(network.parameters()))(inputs, ROWS)
        assert ages(pull) == (type(network) is not nn.Linear)
    model = nn.Linear(4, 3)
    _, before = model_with_way_back(model, list(model.parameters()))(inputs, ROWS)
    with torch.no_grad():
        model.weight.add_(1.0)
    _, after = model_with_way_back(model, list(model.parameters()))(inputs, ROWS)
    torch.testing.assert_close(before(slopes), after(slopes))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda network: network[0].requires_grad_(False),
        lambda network: network[0].register_forward_hook(lambda module, given, gave: 2 * gave),
        lambda network: network.register_forward_pre_hook(lambda module, given: (2 * given[0],)),
        lambda network: network.append(nn.Tanh()),
        lambda network: network.append(nn.Linear(3, 3, bias=False)),
    ],
    ids=["frozen", "hook", "hook of the whole", "another layer", "no bias"],
)
def test_what_is_anything_else_goes_through_torchs_engine(spoil):
    network = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    spoil(network)
    inputs, slopes = randn(5, 4), randn(5, 3)
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    embeddings, pull = model_with_way_back(network, parameters)(inputs, ROWS)
    expected, pull_graph = model_with_way_back(Opaque(network), parameters)(inputs, ROWS)
    assert np.array_equal(embeddings, expected)
    if parameters:
        torch.testing.assert_close(pull(slopes), pull_graph(slopes))
