"""The tabular embedding: how codes become inputs, and that it trains."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vafl.models import tabular
from vafl.models.tabular import CategoryInput, Expansion, NumberInput, Tabular, TabularHead, network

NUMBER = NumberInput((-2.0, 0.0, 1.0), 0.5, flags_missing=True)


def test_a_number_becomes_a_thermometer_its_value_and_a_flag():
    expanded = Expansion([NUMBER])(torch.tensor([[0.0], [0.5], [1.25], [2.0], [-1.0]]))
    thermometer, value, flag = expanded[:, :2], expanded[:, 2], expanded[:, 3]
    assert thermometer.tolist() == [[0, 0], [0.5, 0], [1, 0.25], [1, 1], [0, 0]]
    assert value.tolist() == [-2, -1, 0.25, 1, 0.5]
    assert flag.tolist() == [0, 0, 0, 0, 1]


def test_few_levels_have_a_column_each_and_many_a_learned_vector():
    few = Expansion([CategoryInput(3)])(torch.tensor([[2.0], [0.0]]))
    assert few.tolist() == [[0, 0, 1], [1, 0, 0]]
    many = Expansion([CategoryInput(1000), CategoryInput(50)])
    codes = torch.tensor([[999.0, 49.0], [999.0, 0.0]])
    assert many(codes).shape == (2, 16)
    assert torch.equal(many(codes)[0, :8], many(codes)[1, :8])
    assert not torch.equal(many(codes)[0, 8:], many(codes)[1, 8:])


@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=20, unique=True), st.data())
def test_the_value_is_interpolated_between_the_edges(edges, data):
    values = tuple(sorted(edges))
    place = data.draw(st.floats(0, len(values) - 1, width=32))
    shown = Expansion([NumberInput(values, 0.0, flags_missing=False)])(torch.tensor([[place]]))
    expected = np.interp(place, np.arange(len(values)), values)
    assert shown[0, -1].item() == pytest.approx(expected, abs=1e-5)


def test_columns_keep_their_places_whatever_their_kinds():
    inputs = [CategoryInput(2), NUMBER, CategoryInput(40), NumberInput((0.0,), 0.0, flags_missing=False)]
    module = Expansion(inputs)
    row = torch.tensor([[1.0, 1.5, 39.0, 0.0]])
    assert module(row).shape == (1, module.width)
    assert module(row)[0, 0:2].tolist() == [1, 0.5]  # the thermometer of the second column


def test_the_masks_of_dropout_follow_from_the_seed_and_spare_the_global_generator():
    def trained(seed):
        torch.manual_seed(seed)
        module = network([4, 64], 2).train()
        torch.manual_seed(0)
        found = [module(torch.ones(3, 4)) for _ in range(2)]
        return found, torch.rand(1)

    (first, second), after = trained(1)
    (again, _), after_too = trained(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(1))
    assert torch.equal(after, after_too)


def test_a_head_gives_numbers_in_the_unit_of_the_labels():
    torch.manual_seed(0)
    head = TabularHead(4, 1, [8]).eval()
    head.measure(torch.tensor([1e6, 3e6]))
    outputs = head(torch.randn(1000, 4))
    assert 1e6 < outputs.mean().item() < 3e6
    head.measure(torch.tensor([5.0, 5.0]))
    assert torch.isfinite(head(torch.randn(10, 4))).all()


def test_it_learns_an_interaction_of_a_number_and_a_category():
    torch.manual_seed(0)
    codes = torch.stack([torch.rand(2000) * 10, torch.randint(0, 3, (2000,)).float()], 1)
    target = torch.where(codes[:, 1] == 1, torch.sin(codes[:, 0]), -torch.sin(codes[:, 0]))
    edges = tuple(np.linspace(-1, 1, 11).tolist())
    model = Tabular([NumberInput(edges, 0.0, flags_missing=False), CategoryInput(3)], 1, [64])
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(400):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(codes)[:, 0], target).backward()
        optimiser.step()
    error = nn.functional.mse_loss(model.eval()(codes)[:, 0], target).item()
    assert error < 0.05 * target.var().item()


def head_of(labels):
    head = TabularHead(4, 1, [8])
    head.measure(torch.tensor(labels))
    return head


@pytest.mark.parametrize("rows", [3, 20, 1000])
def test_one_extreme_label_does_not_set_the_unit_of_all_others(rows):
    """With mean and deviation, the unit would be 10^7 or more, and all other labels would look equal."""
    labels = torch.linspace(1, 2, rows).tolist()
    head = head_of([*labels, 1e9])
    assert 0.05 < float(head.unit) < 0.5
    assert 1 < float(head.centre) < 2


@pytest.mark.parametrize(
    ("labels", "unit"),
    [([5.0] * 10, 1.0), ([3.0], 1.0), ([0.0, 8.0], 4.0), ([0.0] * 999 + [10.0], 10 * math.sqrt(0.000999))],
)
def test_labels_that_hardly_differ_have_a_unit_too(labels, unit):
    assert float(head_of(labels).unit) == pytest.approx(unit, rel=1e-3)


def test_ordinary_labels_have_their_own_mean_and_deviation():
    labels = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 30 + 100
    head = head_of(labels.tolist())
    assert float(head.unit) == pytest.approx(float(labels.std()), rel=0.02)
    assert float(head.centre) == pytest.approx(float(labels.mean()), abs=0.2)


@pytest.mark.parametrize(
    "inputs",
    [
        [CategoryInput(2), NUMBER, CategoryInput(40), NumberInput((0.0,), 0.5, flags_missing=False), NUMBER],
        [NumberInput((1.0,), 0.5, flags_missing=True)],
        [CategoryInput(3), CategoryInput(2)],
        [CategoryInput(99)],
    ],
    ids=["mixed", "one edge", "few levels", "many levels"],
)
def test_large_batches_give_what_small_ones_do_and_so_do_their_gradients(inputs, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(tabular, "_INPUTS_PER_LINE", 0)
    module = Tabular(inputs, 4, [8, 8]).eval()
    for parameter in module.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    sizes = [own.levels if isinstance(own, CategoryInput) else len(own.values) for own in inputs]
    codes = torch.rand(300, len(inputs), generator=generator) * (torch.tensor(sizes) - 1)
    is_category = torch.tensor([isinstance(own, CategoryInput) for own in inputs])
    may_lack = torch.tensor([getattr(own, "flags_missing", False) for own in inputs])
    codes = torch.where(is_category, codes.round(), codes)
    codes = torch.where(may_lack & (torch.rand(codes.shape, generator=generator) < 0.3), -1, codes)
    slopes = torch.randn(300, 4, generator=generator)

    def found(small_batch):
        monkeypatch.setattr(tabular, "_SMALL_BATCH", small_batch)
        outputs = module(codes)
        return outputs, torch.autograd.grad((outputs * slopes).sum(), list(module.parameters()))

    torch.testing.assert_close(found(1), found(1000), rtol=1e-4, atol=1e-4)


def test_everything_that_a_large_batch_needs_is_saved_with_the_model(monkeypatch):
    monkeypatch.setattr(tabular, "_INPUTS_PER_LINE", 0)
    inputs = [CategoryInput(2), NUMBER, CategoryInput(40)]
    module = Tabular(inputs, 4, [8]).eval()
    with torch.device("meta"):
        again = Tabular(inputs, 4, [8])
    again = again.to_empty(device="cpu").eval()
    again.load_state_dict(module.state_dict())
    codes = torch.tensor([[1.0, 1.5, 39.0]]).repeat(200, 1)
    assert torch.equal(again(codes), module(codes))
