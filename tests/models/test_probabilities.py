"""Calibration, against scikit-learn and scipy."""

import numpy as np
import pytest
import sklearn.metrics as sk
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from sklearn.calibration import _sigmoid_calibration
from sklearn.isotonic import IsotonicRegression

from vafl.models.probabilities import Calibration, probabilities

EVEN = (1.0, 1.0)


@st.composite
def two_classes(draw):
    """Draw log-odds of any size, with ties, and labels of both classes."""
    rows = draw(st.integers(2, 60))
    numbers = st.one_of(st.floats(-40, 40), st.sampled_from([-1.0, 0.0, 1.0]))
    scores = np.array(draw(st.lists(numbers, min_size=rows, max_size=rows)))
    labels = np.array([0, 1, *draw(st.lists(st.integers(0, 1), min_size=rows - 2, max_size=rows - 2))])
    return scores * draw(st.sampled_from([1e-3, 1.0, 1e3])), labels


def made_up(rows=3000, seed=0, sharpness=2.5, shift=3.0):
    """Return scores that are too extreme and too high, as with balanced weights, and labels."""
    generator = np.random.default_rng(seed)
    true = generator.normal(-2, 1.5, rows)
    labels = (generator.random(rows) < 1 / (1 + np.exp(-true))).astype(int)
    return sharpness * true + shift, labels


def test_platt_is_that_of_scikit_learn():
    scores, labels = made_up()
    found = Calibration.fit("platt", scores[:, None], labels, EVEN)
    a, b = _sigmoid_calibration(scores, labels)
    assert (found.scale, *found.shifts) == pytest.approx((-a, -b), rel=1e-3)
    assert found.scale == pytest.approx(1 / 2.5, rel=0.1)
    assert found.shifts[0] == pytest.approx(-3 / 2.5, rel=0.15)


@pytest.mark.parametrize("method", ["platt", "isotonic"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_calibrated_probabilities_are_better_ones(method, outputs):
    scores, labels = made_up()
    seen = scores[:, None] if outputs == 1 else np.stack([-scores / 4, 3 * scores / 4], 1)
    fitted = Calibration.fit(method, seen[:1000], labels[:1000], EVEN)
    rest, after = seen[1000:], fitted(seen[1000:])
    assert after.shape == rest.shape
    before, better = probabilities(rest), probabilities(after)
    assert sk.log_loss(labels[1000:], better) < 0.8 * sk.log_loss(labels[1000:], before)
    assert sk.brier_score_loss(labels[1000:], better[:, 1]) < sk.brier_score_loss(labels[1000:], before[:, 1])
    assert better[:, 1].mean() == pytest.approx(labels.mean(), abs=0.03)
    assert better.sum(1) == pytest.approx(np.ones(2000))


@given(two_classes(), st.floats(-100, 100))
def test_isotonic_probabilities_are_those_of_scikit_learn(rows, asked):
    scores, labels = rows
    found = Calibration.fit("isotonic", scores[:, None], labels, EVEN)
    bound = 1 / (len(labels) + 2)
    expected = IsotonicRegression(y_min=bound, y_max=1 - bound, out_of_bounds="clip").fit(scores, labels)
    asked = np.append(scores, asked)
    assert probabilities(found(asked[:, None]))[:, 1] == pytest.approx(expected.predict(asked), abs=1e-9)


@given(two_classes(), st.sampled_from(["platt", "isotonic"]), st.sampled_from([1, 2]))
def test_a_calibration_never_reverses_the_ranking(rows, method, outputs):
    scores, labels = rows
    seen = scores[:, None] if outputs == 1 else np.stack([0 * scores, scores], 1)
    found = Calibration.fit(method, seen, labels, EVEN)
    order = np.argsort(scores)
    shares = found(seen[order]) @ ([1] if outputs == 1 else [-1, 1])
    assert np.isfinite(shares).all()
    assert (np.diff(shares) >= -1e-9 * np.abs(shares).max()).all()


@given(two_classes())
def test_platt_fits_at_least_as_well_as_a_constant(rows):
    scores, labels = rows
    count = labels.sum()
    targets = np.where(labels == 1, (count + 1) / (count + 2), 1 / (len(labels) - count + 2))

    def loss(log_odds):
        return np.mean(np.logaddexp(0, log_odds) - targets * log_odds)

    mean = targets.mean()
    found = Calibration.fit("platt", scores[:, None], labels, EVEN)(scores[:, None])[:, 0]
    assert loss(found) <= loss(np.full(len(labels), np.log(mean / (1 - mean)))) + 1e-9


def several(rows=2000, seed=0, weights=(1.0, 1.0, 1.0), temperature=3.0):
    """Return outputs that are too extreme, and favour the classes by their weights."""
    generator = np.random.default_rng(seed)
    true = generator.normal(size=(rows, 3)) * 1.5 + [1.0, 0, -1.0]
    shares = probabilities(true)
    labels = (generator.random(rows)[:, None] > shares.cumsum(1)).sum(1)
    return temperature * true + np.log(weights), labels


def test_several_classes_have_one_temperature():
    outputs, labels = several()
    found = Calibration.fit("platt", outputs, labels, (1.0, 1.0, 1.0))
    smoothed = np.full((len(labels), 3), 2 / len(labels) / 3)
    smoothed[np.arange(len(labels)), labels] += 1 - 2 / len(labels)

    def loss(scale):
        return -np.mean((smoothed * np.log(probabilities(scale * outputs))).sum(1))

    assert found.scale == pytest.approx(minimize_scalar(loss, bounds=(0, 2), method="bounded").x, rel=1e-3)
    assert found.scale == pytest.approx(1 / 3, rel=0.1)
    assert found.shifts == (0.0, 0.0, 0.0)


def test_the_weights_of_several_classes_are_undone():
    weights = (1.0, 5.0, 30.0)
    outputs, labels = several(weights=weights, temperature=1.0)
    found = Calibration.fit("platt", outputs, labels, weights)
    assert found.scale == pytest.approx(1, rel=0.1)
    assert probabilities(found(outputs)).mean(0) == pytest.approx(np.bincount(labels) / len(labels), abs=0.02)
    even = Calibration.fit("platt", outputs, labels, (1.0, 1.0, 1.0))
    losses = [sk.log_loss(labels, probabilities(each(outputs))) for each in (found, even)]
    assert losses[0] < 0.8 * losses[1]


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_class_weights_are_undone_by_their_known_effect(outputs):
    """The minimum of the weighted log loss has odds that are too high by the ratio of the weights."""
    weights = np.array([1.0, 5.0, 30.0][: max(2, outputs)])
    shares = np.random.default_rng(0).dirichlet(np.ones(len(weights)), 20)
    favoured = np.log(shares * weights)
    seen = favoured[:, 1:] - favoured[:, :1] if outputs == 1 else favoured
    found = Calibration.undoing(weights.tolist(), outputs)
    assert found.method == "shift"
    assert probabilities(found(seen)) == pytest.approx(shares)
    assert Calibration.undoing([2.0, 2.0], 1) == Calibration.undoing([], 1) == Calibration()


@pytest.mark.parametrize("classes", [2, 3])
def test_rows_that_are_all_correct_have_a_finite_fit(classes):
    labels = np.arange(30) % classes
    outputs = np.eye(classes)[labels] * 4 if classes > 2 else 8.0 * labels[:, None] - 4
    found = Calibration.fit("platt", outputs, labels, np.ones(classes))
    assert 0 < found.scale < 10
    assert (probabilities(found(outputs)).argmax(1) == labels).all()


def test_outputs_that_rank_the_wrong_way_say_nothing():
    scores, labels = made_up()
    found = Calibration.fit("platt", -scores[:, None], labels, EVEN)
    assert found.scale == 0
    assert probabilities(found(scores[:, None]))[:, 1] == pytest.approx(labels.mean(), abs=1e-3)


def test_without_a_method_outputs_stay_as_they_are():
    outputs = np.array([[1.5], [-2.0]])
    assert Calibration.fit("none", outputs, [0, 1], EVEN) == Calibration()
    assert (Calibration()(outputs) == outputs).all()


@pytest.mark.parametrize(
    "numbers",
    [
        {"method": "platt"},
        {"method": "shift"},
        {"method": "platt", "scale": -1.0, "shifts": (0.0,)},
        {"method": "platt", "scale": float("nan"), "shifts": (0.0,)},
        {"method": "platt", "shifts": (float("inf"),)},
        {"shifts": (0.0,)},
        {"method": "isotonic"},
        {"method": "isotonic", "scores": (0.0, 1.0), "shares": (0.5,)},
        {"method": "isotonic", "scores": (1.0, 0.0), "shares": (0.5, 0.6)},
        {"method": "isotonic", "scores": (0.0, 1.0), "shares": (0.6, 0.5)},
        {"method": "isotonic", "scores": (0.0, 1.0), "shares": (0.0, 0.5)},
        {"method": "isotonic", "scores": (0.0, 1.0), "shares": (0.5, 1.0)},
    ],
)
def test_numbers_that_are_no_calibration_are_refused(numbers):
    with pytest.raises(ValueError, match="calibration"):
        Calibration(**numbers)
