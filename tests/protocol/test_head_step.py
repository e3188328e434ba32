import numpy as np
import pytest
import torch
from torch import nn

from vafl.models.heads import Bias, make_head
from vafl.models.losses import LOSSES
from vafl.models.settings import ModelSettings
from vafl.protocol.descent import Descent
from vafl.protocol.head_step import HeadStep
from vafl.protocol.rules import Turn
from vafl.protocol.stepsizes import constant
from vafl.protocol.table import EmbeddingTable


def step_with(labels, loss, width, weights=None):
    """Return the gradient of a step on all rows but the first, and the `HeadStep` that computed it."""
    table, rows = EmbeddingTable(len(labels), [width], summed=True), np.arange(1, len(labels))
    table.store(0, rows, np.random.default_rng(0).standard_normal((len(rows), width), np.float32), 0)
    head = Bias(width)
    step = HeadStep(labels, head, LOSSES[loss], Descent(head.parameters(), constant(0.1)), None, weights)
    (gradient,) = step(table, [Turn(0, 0, rows, True, True)], 0, shared=False)
    return gradient, step


@pytest.mark.parametrize(
    ("classes", "kept"), [(2, np.uint8), (256, np.uint8), (257, np.uint16), (65_537, np.uint32)]
)
def test_classes_are_kept_in_the_smallest_type_that_holds_them(classes, kept):
    labels = np.array([0, 1, classes - 1, 1, 0])
    gradient, step = step_with(labels, "softmax", classes)
    assert step._labels.dtype == kept
    assert step._labels.tolist() == labels.tolist()
    at_labels = gradient[np.arange(4), labels[1:]]
    assert (at_labels < 0).all()
    assert (gradient < 0).sum() == 4
    assert np.allclose(gradient.sum(1), 0, atol=1e-5)


@pytest.mark.parametrize("loss", ["binary", "squared"])
def test_measured_labels_stay_as_they_are(loss):
    labels = np.array([0, 1, 0, 1], np.float32)
    gradient, step = step_with(labels, loss, 1)
    assert step._labels.dtype == np.float32
    assert gradient.shape == (3, 1)


@pytest.mark.parametrize(("loss", "width"), [("softmax", 2), ("binary", 1), ("squared", 1)])
def test_the_gradient_of_a_row_grows_with_its_weight(loss, width):
    labels = np.array([0, 1, 0, 1], np.int64 if loss == "softmax" else np.float32)
    weights = np.array([1, 0, 0.5, 2.5], np.float32)
    plain, even = step_with(labels, loss, width)
    weighted, heavy = step_with(labels, loss, width, weights)
    assert np.allclose(weighted, plain * weights[1:, None], rtol=1e-5)
    assert even.losses.take_mean() != heavy.losses.take_mean()


@pytest.mark.parametrize("kind", ["linear", "mlp", "tabular", "gated"])
@pytest.mark.parametrize("shared", [False, True])
def test_each_turn_gets_the_gradient_of_its_own_columns_and_rows(kind, shared):
    """For concatenated embeddings of different widths: one turn, and several turns under t-sync and sync."""
    widths, generator = [2, 5, 1], np.random.default_rng(0)
    table, labels = EmbeddingTable(12, widths, summed=False), np.arange(12) % 3
    for client, width in enumerate(widths):
        table.store(client, np.arange(12), generator.standard_normal((12, width), np.float32), 0)
    torch.manual_seed(0)
    settings = ModelSettings(head=kind, combine="concat", head_hidden=(4,))
    head = make_head(settings, widths, 3).eval()
    chosen = (
        [np.array([0, 4, 7, 9])] * 3 if shared else [np.array([0, 4]), np.array([4, 5, 11]), np.array([2])]
    )
    turns = [Turn(client, 0, rows, False, True) for client, rows in enumerate(chosen)]
    for group in (turns, turns[1:2], turns[:2]):
        step = HeadStep(labels, head, LOSSES["softmax"], Descent(head.parameters(), constant(0.1)), None)
        parts = step(table, group, 0, shared=shared and len(group) > 1)
        for turn, part in zip(group, parts, strict=True):
            inputs = torch.from_numpy(table.read(turn.rows)).requires_grad_()
            loss = nn.functional.cross_entropy(head(inputs), torch.from_numpy(labels[turn.rows]))
            (whole,) = torch.autograd.grad(loss, inputs)
            assert part.flags.c_contiguous
            np.testing.assert_allclose(part, whole[:, table.columns[turn.client]], rtol=1e-4, atol=1e-6)


def test_no_labels_and_whole_numbers_below_zero_are_labels():
    assert HeadStep(np.empty(0, np.int64), *step_parts())._labels.shape == (0,)
    assert HeadStep(np.array([-3, 300]), *step_parts())._labels.tolist() == [-3, 300]


def step_parts():
    head = Bias(1)
    return head, LOSSES["squared"], Descent(head.parameters(), constant(0.1)), None
