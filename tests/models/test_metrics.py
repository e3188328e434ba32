"""Every metric against scikit-learn's, on labels of every kind, and where it is not defined."""

import json
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn import metrics as sk
from sklearn.dummy import DummyClassifier, DummyRegressor

from vafl.errors import ConfigError
from vafl.models.losses import LOSSES, evenly
from vafl.models.metrics import LOWER_IS_BETTER, Metrics, by_class

# Whole numbers make ties between scores likely; beyond 15 the probabilities of scikit-learn lose digits.
scores = st.floats(-15, 15) | st.integers(-3, 3).map(float)


@st.composite
def two_classes(draw):
    rows = draw(st.integers(1, 40))
    return draw(arrays(np.float64, (rows, 1), elements=scores)), draw(
        arrays(np.int64, rows, elements=st.integers(0, 1))
    )


@st.composite
def three_classes(draw):
    rows = draw(st.integers(1, 40))
    return draw(arrays(np.float64, (rows, 3), elements=scores)), draw(
        arrays(np.int64, rows, elements=st.integers(0, 2))
    )


@st.composite
def numbers(draw):
    rows = draw(st.integers(1, 40))
    values = st.floats(-1e3, 1e3, width=32)
    return draw(arrays(np.float64, (rows, 1), elements=values)), draw(
        arrays(np.float64, rows, elements=values)
    )


def agrees(found, expected):
    assert found.keys() == expected.keys()
    json.dumps(found, allow_nan=False)
    for name, value in expected.items():
        wanted = (
            None if value is None or not math.isfinite(value) else pytest.approx(value, rel=1e-6, abs=1e-9)
        )
        assert found[name] == wanted, name


@given(two_classes())
def test_metrics_of_two_classes_are_those_of_scikit_learn(seen):
    outputs, labels = seen
    odds, mixed = outputs[:, 0], len(set(labels)) == 2
    shares = 1 / (1 + np.exp(-odds))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one class only
        expected = {
            "auc": sk.roc_auc_score(labels, odds) if mixed else None,
            "log_loss": sk.log_loss(labels, shares, labels=[0, 1]),
            "accuracy": sk.accuracy_score(labels, odds > 0),
            "average_precision": sk.average_precision_score(labels, odds) if mixed else None,
            "brier": sk.brier_score_loss(labels, shares, labels=[0, 1], pos_label=1),
            "f1": sk.f1_score(labels, odds > 0, zero_division=np.nan),
        }
    agrees(Metrics.of("binary", 1).measure(outputs, labels), expected)
    both = np.hstack([-odds[:, None], np.zeros_like(outputs)])  # a softmax over two outputs
    agrees(Metrics.of("softmax", 2).measure(both, labels), expected)


@given(three_classes())
def test_metrics_of_classes_are_those_of_scikit_learn(seen):
    outputs, labels = seen
    shares = np.exp(outputs - outputs.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    predicted = outputs.argmax(1)
    loss = float(np.mean(-np.log(shares[np.arange(len(labels)), labels])))
    expected = {
        "accuracy": sk.accuracy_score(labels, predicted),
        "log_loss": loss,
        "macro_f1": sk.f1_score(labels, predicted, average="macro"),
    }
    agrees(Metrics.of("softmax", 3).measure(outputs, labels), expected)
    precision, recall, f1, rows = sk.precision_recall_fscore_support(
        labels, predicted, labels=[0, 1, 2], zero_division=np.nan
    )
    for place, own in enumerate(by_class(outputs, labels, ("a", "b", "c")).values()):
        wanted = {"precision": precision, "recall": recall, "f1": f1, "rows": rows}
        agrees(own, {name: float(values[place]) for name, values in wanted.items()})


@given(numbers())
def test_metrics_of_numbers_are_those_of_scikit_learn(seen):
    outputs, labels = seen
    varied = len(set(labels.tolist())) > 1
    found = Metrics.of("squared", 1).measure(outputs, labels)
    if found["r2"] is not None and abs(found["r2"]) > 1e6:
        return  # labels that differ by rounding only
    expected = {
        "r2": sk.r2_score(labels, outputs[:, 0]) if varied else None,
        "rmse": sk.root_mean_squared_error(labels, outputs[:, 0]),
        "mae": sk.mean_absolute_error(labels, outputs[:, 0]),
    }
    agrees(found, expected)


@pytest.mark.parametrize(("loss", "outputs"), [("binary", 1), ("softmax", 2), ("softmax", 4)])
def test_the_log_loss_is_the_loss_that_is_trained_by(loss, outputs):
    random = np.random.default_rng(0)
    seen = random.standard_normal((50, outputs), np.float32)
    labels = random.integers(0, max(outputs, 2), 50)
    known = labels.astype(np.float32) if loss == "binary" else labels
    trained_by, _ = LOSSES[loss](seen, known, evenly(50))
    found = Metrics.of(loss, outputs).measure(torch.from_numpy(seen), torch.from_numpy(known))
    assert found["log_loss"] == pytest.approx(trained_by, rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_outputs_that_are_no_numbers_have_no_metrics(value):
    for loss, outputs in (("binary", 1), ("softmax", 3), ("squared", 1)):
        seen, labels = np.zeros((4, outputs)), np.array([0, 1, 0, 1])
        seen[0] = value
        assert set(Metrics.of(loss, outputs).measure(seen, labels).values()) == {None}


def test_huge_outputs_keep_finite_losses():
    assert Metrics.of("binary", 1).measure([[1e30], [-1e30]], [1, 1])["log_loss"] == pytest.approx(5e29)
    assert Metrics.of("softmax", 3).measure([[1e30, 0, 0]], [1])["log_loss"] == pytest.approx(1e30)


@pytest.mark.parametrize(
    ("loss", "outputs", "headline", "select"),
    [
        ("binary", 1, "auc", "log_loss"),
        ("softmax", 2, "auc", "log_loss"),
        ("softmax", 3, "accuracy", "log_loss"),
        ("squared", 1, "r2", "rmse"),
    ],
)
def test_headline_and_selection_follow_from_the_task(loss, outputs, headline, select):
    found = Metrics.of(loss, outputs)
    assert (found.headline.name, found.select.name) == (headline, select)
    assert Metrics.of(loss, outputs, headline="loss").headline.name == select
    assert Metrics.of(loss, outputs, select=headline).select.name == headline


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"headline": "auc"}, r"VFL-3021.*model\.metric.*accuracy, log_loss, macro_f1.*auc"),
        ({"select": "r2"}, r"VFL-3021.*stop\.select.*accuracy, log_loss, macro_f1.*r2"),
    ],
)
def test_a_metric_that_does_not_fit_the_labels_is_refused(chosen, said):
    with pytest.raises(ConfigError, match=said):
        Metrics.of("softmax", 3, **chosen)


def test_a_metric_knows_which_way_is_better():
    auc, loss, *_ = Metrics.of("binary", 1).each
    assert [auc.reaches(value, 0.9) for value in (0.9, 0.95, 0.89)] == [True, True, False]
    assert [loss.reaches(value, 0.1) for value in (0.1, 0.05, 0.2)] == [True, True, False]
    assert not auc.is_better(0.9, 0.9)
    assert {"log_loss", "brier", "rmse", "mae"} == LOWER_IS_BETTER


# --- the trivial baseline ---


@pytest.mark.parametrize(("loss", "outputs"), [("binary", 1), ("softmax", 2), ("softmax", 3)])
def test_the_trivial_baseline_of_classes_is_the_shares_of_the_training_labels(loss, outputs):
    random = np.random.default_rng(1)
    classes = max(outputs, 2)
    train, test = (
        random.choice(classes, 100, p=np.arange(1, classes + 1) / sum(range(1, classes + 1))) for _ in "ab"
    )
    found = Metrics.of(loss, outputs).trivial(train, test)
    dummy = DummyClassifier(strategy="prior").fit(np.zeros((100, 1)), train)
    shares = dummy.predict_proba(np.zeros((100, 1)))
    assert found["accuracy"] == np.mean(test == np.bincount(train).argmax())
    assert found["log_loss"] == pytest.approx(sk.log_loss(test, shares))
    if classes == 2:
        assert found["auc"] == 0.5
        assert found["brier"] == pytest.approx(sk.brier_score_loss(test, shares[:, 1]))
        assert found["average_precision"] == pytest.approx(test.mean())


def test_the_trivial_baseline_of_numbers_is_their_mean():
    train, test = np.array([1.0, 2.0, 6.0]), np.array([2.0, 5.0])
    found = Metrics.of("squared", 1).trivial(train, test)
    predicted = DummyRegressor().fit(np.zeros((3, 1)), train).predict(np.zeros((2, 1)))
    assert found == {
        "r2": pytest.approx(sk.r2_score(test, predicted)),
        "rmse": pytest.approx(2.5**0.5),
        "mae": 1.5,
    }


def test_a_class_without_training_rows_leaves_the_baseline_finite():
    found = Metrics.of("softmax", 3).trivial([0, 0, 1], [2])
    assert 30 < found["log_loss"] < 40
