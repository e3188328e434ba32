"""Thresholds, compared with all possible ones and with scikit-learn."""

import numpy as np
import pytest
import sklearn.metrics as sk
from hypothesis import given
from hypothesis import strategies as st

from vafl.errors import ConfigError
from vafl.models.decisions import (
    Decision,
    DecisionSettings,
    choose_threshold,
    decision_figures,
)
from vafl.models.probabilities import Calibration


@st.composite
def scored(draw):
    """Draw probabilities, some of them equal or adjacent, and labels of both classes."""
    rows = draw(st.integers(2, 40))
    chances = st.one_of(
        st.floats(0, 1), st.sampled_from([0.0, 0.5, np.nextafter(0.5, 1), np.nextafter(0.5, 0), 1.0])
    )
    shares = draw(st.lists(chances, min_size=rows, max_size=rows))
    labels = [0, 1, *draw(st.lists(st.integers(0, 1), min_size=rows - 2, max_size=rows - 2))]
    return np.array(shares), np.array(labels)


def every(settings, shares, labels):
    """Return the figures of every threshold that gives different decisions."""
    thresholds = [*np.unique(shares), 2.0]
    return [decision_figures(settings, threshold, shares, labels) for threshold in thresholds]


def chosen(settings, shares, labels):
    threshold = choose_threshold(settings, settings.goal, shares, labels)
    return decision_figures(settings, threshold.value, shares, labels), threshold


@given(scored())
def test_no_threshold_has_a_higher_f1(rows):
    settings = DecisionSettings(goal="f1")
    found, threshold = chosen(settings, *rows)
    assert found["f1"] == max(each["f1"] for each in every(settings, *rows))
    assert threshold.reached
    assert 0 <= threshold.value <= 1


@given(scored(), st.floats(0.1, 10), st.floats(0.1, 10))
def test_no_threshold_costs_less(rows, positive, negative):
    settings = DecisionSettings(goal="cost", cost_false_positive=positive, cost_false_negative=negative)
    found, _ = chosen(settings, *rows)
    assert found["cost"] == pytest.approx(min(each["cost"] for each in every(settings, *rows)))


@given(scored(), st.floats(0.01, 1))
def test_recall_is_reached_with_the_highest_precision(rows, at_least):
    settings = DecisionSettings(goal="recall", at_least=at_least)
    found, threshold = chosen(settings, *rows)
    reaching = [each["precision"] for each in every(settings, *rows) if each["recall"] >= at_least]
    assert threshold.reached
    assert found["recall"] >= at_least
    assert found["precision"] == max(reaching)


@given(scored(), st.floats(0.01, 1))
def test_precision_is_reached_with_the_highest_recall_or_as_nearly_as_possible(rows, at_least):
    settings = DecisionSettings(goal="precision", at_least=at_least)
    found, threshold = chosen(settings, *rows)
    figures = [each for each in every(settings, *rows) if each["precision"] is not None]
    reaching = [each["recall"] for each in figures if each["precision"] >= at_least]
    assert threshold.reached == bool(reaching)
    if reaching:
        assert found["precision"] >= at_least
        assert found["recall"] == max(reaching)
    else:
        assert found["precision"] == max(each["precision"] for each in figures)


def test_a_precision_out_of_reach_is_reported_with_the_best_there_is():
    shares, labels = np.array([0.9, 0.8, 0.7, 0.6]), np.array([0, 1, 1, 0])
    found, threshold = chosen(DecisionSettings(goal="precision", at_least=0.9), shares, labels)
    assert (threshold.reached, threshold.value) == (False, pytest.approx(0.65))
    assert (found["precision"], found["recall"]) == (pytest.approx(2 / 3), 1)


def test_accuracy_is_the_likelier_class():
    shares, labels = np.array([0.1, 0.2]), np.array([1, 1])
    assert choose_threshold(DecisionSettings(), "accuracy", shares, labels).value == 0.5


def test_where_every_flag_costs_too_much_no_row_is_flagged():
    settings = DecisionSettings(goal="cost", cost_false_positive=100.0)
    for highest in (0.9, 1.0):
        found, _ = chosen(settings, np.array([highest, 0.5]), np.array([0, 1]))
        assert found["confusion"] == [[1, 0], [1, 0]]
        assert found["precision"] is None
        assert found["cost"] == 1


@given(scored(), st.floats(0, 1))
def test_figures_are_those_of_scikit_learn(rows, threshold):
    shares, labels = rows
    found, predicted = decision_figures(DecisionSettings(), threshold, shares, labels), shares >= threshold
    assert found["rows"] == len(labels)
    assert found["confusion"] == sk.confusion_matrix(labels, predicted).tolist()
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(labels, predicted))
    assert found["recall"] == pytest.approx(sk.recall_score(labels, predicted))
    assert found["f1"] == pytest.approx(sk.f1_score(labels, predicted))
    if predicted.any():
        assert found["precision"] == pytest.approx(sk.precision_score(labels, predicted))
    assert "cost" not in found


@pytest.mark.parametrize(
    "settings",
    [
        {"goal": "precision"},
        {"goal": "recall", "at_least": 0.0},
        {"goal": "recall", "at_least": 1.5},
        {"goal": "f1", "at_least": 0.9},
        {"at_least": 0.9},
        {"goal": "cost", "cost_false_positive": 0.0},
        {"goal": "cost", "cost_false_negative": float("inf")},
        {"cost_false_negative": 5.0},
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings):
    with pytest.raises(ConfigError, match="decision"):
        DecisionSettings(**settings)


def test_a_decision_is_made_by_the_calibrated_probability():
    rule = Decision(Calibration("platt", 2.0, (-1.0,)), threshold=0.3)
    shares = rule.probabilities([[0.0], [0.1]])
    assert shares[:, 1] == pytest.approx([1 / (1 + np.e), 1 / (1 + np.exp(0.8))])
    assert rule.choose(shares).tolist() == [0, 1]
    assert Decision().choose([[0.2, 0.5, 0.3], [0.6, 0.4, 0.0]]).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("rule", "outputs", "classes"),
    [
        (Decision(Calibration("platt", 1.0, (0.0,))), 2, 2),
        (Decision(Calibration("platt", 1.0, (0.0,))), 1, 0),
        (Decision(Calibration("isotonic", scores=(0.0,), shares=(0.5,))), 3, 3),
    ],
)
def test_a_decision_fits_its_head(rule, outputs, classes):
    with pytest.raises(ValueError, match="calibration"):
        rule.check_outputs(outputs, classes)
    with pytest.raises(ValueError, match="threshold"):
        Decision(threshold=-0.1)
    Decision().check_outputs(outputs, classes)
