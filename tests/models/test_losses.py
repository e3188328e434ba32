import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from vafl.models.losses import FAR, LOSSES, squared_in_unit


def loss_of_each(name, outputs, labels):
    """Return the loss of each row, and the slopes of their sum."""
    outputs, one = np.array(outputs, np.float32), np.ones(1, np.float32)
    rows = [LOSSES[name](outputs[i : i + 1], labels[i : i + 1], one) for i in range(len(labels))]
    return [loss for loss, _ in rows], np.concatenate([slopes for _, slopes in rows])


def test_softmax_is_the_log_loss_of_the_label():
    outputs, labels = [[0.0, math.log(3)], [0.0, 0.0]], np.array([1, 0])
    assert loss_of_each("softmax", outputs, labels)[0] == pytest.approx([math.log(4 / 3), math.log(2)])


def test_binary_is_the_log_loss_of_one_output():
    outputs, labels = [[math.log(3)], [math.log(3)]], np.array([1, 0], np.float32)
    assert loss_of_each("binary", outputs, labels)[0] == pytest.approx([math.log(4 / 3), math.log(4)])


def test_squared_error():
    outputs, labels = [[1.0], [4.0]], np.array([3, 4], np.float32)
    assert loss_of_each("squared", outputs, labels)[0] == [4.0, 0.0]


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_a_weighted_sum_and_the_slopes_are_its_gradient(name, kind):
    random = np.random.default_rng(0)
    outputs = random.standard_normal((7, 4 if name == "softmax" else 1), kind)
    labels = np.array([0, 1, 2, 3, 0, 1, 1]) if name == "softmax" else random.random(7, kind)
    weights, before = random.random(7, kind), outputs.copy()
    given, known = torch.from_numpy(before).clone().requires_grad_(), torch.from_numpy(labels)
    each = {
        "softmax": lambda: F.cross_entropy(given, known, reduction="none"),
        "binary": lambda: F.binary_cross_entropy_with_logits(given[:, 0], known, reduction="none"),
        "squared": lambda: F.mse_loss(given[:, 0], known, reduction="none"),
    }[name]()
    expected = each @ torch.from_numpy(weights)
    loss, slopes = LOSSES[name](outputs, labels, weights)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(slopes, torch.autograd.grad(expected, given)[0].numpy())
    assert np.array_equal(outputs, before)


@pytest.mark.parametrize("labels", [np.array([[1, 0], [2, 0]])[:, 0], np.array([1, 2], np.int32)])
def test_labels_of_a_table_or_of_32_bits_will_do(labels):
    outputs, weights = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(2, np.float32)
    loss, slopes = LOSSES["softmax"](outputs, labels, weights)
    expected, expected_slopes = LOSSES["softmax"](outputs, np.array([1, 2]), weights)
    assert loss == expected
    assert np.array_equal(slopes, expected_slopes)


def test_huge_outputs_keep_a_finite_loss():
    outputs, labels = [[1e30, 0.0], [0.0, 1e30]], np.array([0, 0])
    losses, slopes = loss_of_each("softmax", outputs, labels)
    assert losses == [0.0, pytest.approx(1e30)]
    assert slopes.tolist() == [[0.0, 0.0], [-1.0, 1.0]]


@pytest.mark.parametrize("unit", [0.01, 1.0, 250.0])
def test_the_squared_error_in_a_unit_is_hubers_loss(unit):
    random = np.random.default_rng(0)
    labels = (unit * random.standard_normal(50) * 20).astype(np.float32)
    outputs, weights = np.zeros((50, 1), np.float32), random.random(50, np.float32)
    given = torch.zeros(50, requires_grad=True)
    each = F.huber_loss(given / unit, torch.from_numpy(labels) / unit, reduction="none", delta=FAR)
    expected = 2 * each @ torch.from_numpy(weights)
    loss, slopes = squared_in_unit(unit)(outputs, labels, weights)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(slopes[:, 0], torch.autograd.grad(expected, given)[0].numpy())
    assert np.abs(slopes[:, 0] / weights).max() == pytest.approx(2 * FAR / unit, rel=1e-5)


def test_an_error_that_is_not_finite_stays_so():
    outputs = np.array([[np.nan], [np.inf]], np.float32)
    loss, slopes = squared_in_unit(1.0)(outputs, np.zeros(2, np.float32), np.ones(2, np.float32))
    assert not np.isfinite(loss)
    assert not np.isfinite(slopes[0, 0])
