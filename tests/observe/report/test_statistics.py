"""The statistics of the report, against scikit-learn, scipy and published values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from vafl.models.metrics import Metrics
from vafl.observe.report import statistics


def two_classes(rows=500, seed=0, decimals=2):
    """Scores with ties, and labels that follow them."""
    generator = np.random.default_rng(seed)
    scores = np.round(generator.beta(2, 3, rows), decimals)
    return scores, generator.random(rows) < scores


def test_curves_are_those_of_scikit_learn():
    scores, positive = two_classes()
    false, true, _ = metrics.roc_curve(positive, scores, drop_intermediate=False)
    curve = statistics.roc(scores, positive)
    np.testing.assert_allclose(curve.x, false)
    np.testing.assert_allclose(curve.y, true)
    precision, recall, _ = metrics.precision_recall_curve(positive, scores)
    curve = statistics.precision_recall(scores, positive)
    np.testing.assert_allclose(curve.x, recall[-2::-1])
    np.testing.assert_allclose(curve.y, precision[-2::-1])
    expected = metrics.average_precision_score(positive, scores)
    assert statistics.average_precision(scores, positive) == pytest.approx(expected)


def test_thinned_curves_keep_their_ends_and_their_area():
    scores, positive = two_classes(20_000, decimals=9)
    curve = statistics.roc(scores, positive)
    thin = statistics.thinned(curve, 200)
    assert len(thin.x) <= 200
    assert (thin.x[0], thin.y[0], thin.x[-1], thin.y[-1]) == (0, 0, 1, 1)
    assert np.trapezoid(thin.y, thin.x) == pytest.approx(np.trapezoid(curve.y, curve.x), abs=1e-4)


def brute_force_delong(scores, positive):
    """DeLong's variance by its definition, comparing every pair."""
    above, below = scores[positive][:, None], scores[~positive][None, :]
    kernel = (above > below) + 0.5 * (above == below)
    won, lost = kernel.mean(axis=1), kernel.mean(axis=0)
    return kernel.mean(), won.var(ddof=1) / len(won) + lost.var(ddof=1) / len(lost)


@pytest.mark.parametrize("seed", range(3))
def test_auc_and_its_interval_are_delongs(seed):
    scores, positive = two_classes(200, seed)
    area, variance = brute_force_delong(scores, positive)
    reach = 1.959963984540054 * np.sqrt(variance)
    found, interval = statistics.auc(scores, positive)
    assert found == pytest.approx(area)
    assert found == pytest.approx(metrics.roc_auc_score(positive, scores))
    assert (interval.low, interval.high) == pytest.approx((area - reach, area + reach))


def test_delongs_interval_covers_the_true_auc_19_times_of_20():
    """Two normal distributions one deviation apart have AUC Phi(1 / sqrt(2)) = 0.7602."""
    generator, covered = np.random.default_rng(1), 0
    positive = np.arange(300) < 100
    for _ in range(400):
        scores = generator.normal(size=300) + positive
        interval = statistics.auc(scores, positive)[1]
        covered += interval.low <= 0.76025 <= interval.high
    assert 0.92 <= covered / 400 <= 0.98


def test_a_perfect_ranking_has_no_interval_rather_than_one_of_no_width():
    positive = np.array([False, False, True, True])
    assert statistics.auc(np.array([0.1, 0.2, 0.8, 0.9]), positive) == (1.0, None)
    assert statistics.auc(np.array([0.9, 0.1, 0.2]), np.array([False, False, True])) == (0.5, None)


def two_models(rows=400, seed=0):
    """Scores of two models with ties that make similar mistakes, and labels."""
    generator = np.random.default_rng(seed)
    positive = generator.random(rows) < 0.3
    common = generator.normal(size=rows) + positive
    good = np.round(common + 0.4 * generator.normal(size=rows) + 0.5 * positive, 1)
    return good, np.round(common + 0.4 * generator.normal(size=rows), 1), positive


def slow_paired_bootstrap(measure, rows, replicates=2000):
    """The differences of `measure` between two models on resampled rows."""
    generator = np.random.default_rng(8)
    draws = (generator.integers(0, rows, rows) for _ in range(replicates))
    return np.quantile([measure(draw) for draw in draws], (0.025, 0.975))


def test_the_paired_interval_of_two_aucs_is_that_of_a_bootstrap_and_narrower_than_unpaired():
    good, poor, positive = two_models()
    interval = statistics.auc_difference(good, poor, positive)
    expected = slow_paired_bootstrap(
        lambda draw: (
            statistics.auc(good[draw], positive[draw])[0] - statistics.auc(poor[draw], positive[draw])[0]
        ),
        len(positive),
    )
    assert (interval.low, interval.high) == pytest.approx(expected, abs=0.005)
    middle = metrics.roc_auc_score(positive, good) - metrics.roc_auc_score(positive, poor)
    assert (interval.low + interval.high) / 2 == pytest.approx(middle)
    single = [statistics.auc(scores, positive)[1] for scores in (good, poor)]
    unpaired = np.hypot(*(own.high - own.low for own in single))
    assert interval.high - interval.low < 0.8 * unpaired


def test_delongs_paired_interval_covers_no_difference_19_times_of_20():
    generator, covered = np.random.default_rng(9), 0
    positive = np.arange(300) < 100
    for _ in range(400):
        common = generator.normal(size=300) + positive
        one, other = (common + 0.5 * generator.normal(size=300) for _ in range(2))
        interval = statistics.auc_difference(one, other, positive)
        covered += interval.low <= 0 <= interval.high
    assert 0.92 <= covered / 400 <= 0.98


def test_equal_models_have_no_interval_of_their_difference():
    scores, positive = two_classes(100)
    for metric in ("auc", "log_loss", "accuracy"):
        assert statistics.difference_interval(metric, scores, scores, positive.astype(float)) is None


@pytest.mark.parametrize(
    ("metric", "measure"),
    [
        ("log_loss", lambda labels, scores: metrics.log_loss(labels, scores, labels=[0, 1])),
        ("accuracy", lambda labels, scores: metrics.accuracy_score(labels, scores > 0.5)),
        ("rmse", metrics.root_mean_squared_error),
        ("r2", metrics.r2_score),
    ],
)
def test_paired_intervals_of_other_metrics_are_those_of_a_bootstrap(metric, measure):
    good, poor, positive = two_models(300, seed=3)
    one, other = 1 / (1 + np.exp(1.5 - good)), 1 / (1 + np.exp(1.5 - poor))
    labels = positive.astype(float)
    interval = statistics.difference_interval(metric, one, other, labels)
    low, high = slow_paired_bootstrap(
        lambda draw: measure(labels[draw], one[draw]) - measure(labels[draw], other[draw]), 300, 1000
    )
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=0.15 * (high - low))


def test_several_classes_have_paired_intervals_too():
    generator = np.random.default_rng(11)
    labels = generator.integers(0, 4, 500)
    good, poor = (generator.normal(size=(500, 4)) + gap * np.eye(4)[labels] for gap in (2.0, 0.5))
    for metric in ("accuracy", "macro_f1"):
        interval = statistics.difference_interval(metric, good, poor, labels.astype(float))
        assert 0.1 < interval.low < interval.high < 0.7


def test_the_bootstrap_of_a_mean_is_as_wide_as_its_standard_error_says():
    for rows in (1500, 40_000):  # below and above the number of rows at which rows are grouped
        values = np.random.default_rng(2).exponential(size=rows)
        interval = statistics.interval_of("mae", values, np.zeros(rows))
        expected = 2 * statistics.Z95 * values.std() / np.sqrt(rows)
        assert interval.high - interval.low == pytest.approx(expected, rel=0.1)
        assert interval.low < values.mean() < interval.high


def test_an_interval_is_the_same_whenever_it_is_computed():
    scores, positive = two_classes(5000)
    for metric in ("auc", "accuracy", "log_loss", "brier", "f1"):
        one, other = (statistics.interval_of(metric, scores, positive.astype(float)) for _ in range(2))
        assert one == other


def test_intervals_hold_the_figure_that_runs_record():
    generator = np.random.default_rng(4)
    scores, positive = two_classes(3000, decimals=6)
    scores = scores.clip(0.01, 0.99)
    log_odds = np.log(scores / (1 - scores))[:, None]
    recorded = Metrics.of("binary", 1).measure(log_odds, positive)
    for metric in ("auc", "log_loss", "accuracy", "brier", "f1"):
        interval = statistics.interval_of(metric, scores, positive.astype(float))
        assert interval.low < recorded[metric] < interval.high
    assert statistics.interval_of("average_precision", scores, positive.astype(float)) is None

    outputs, labels = generator.normal(size=(2000, 4)), generator.integers(0, 4, 2000)
    outputs[np.arange(2000), labels] += 1
    shares = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    recorded = Metrics.of("softmax", 4).measure(outputs, labels)
    for metric in ("accuracy", "log_loss", "macro_f1"):
        interval = statistics.interval_of(metric, shares, labels.astype(float))
        assert interval.low < recorded[metric] < interval.high

    values = 1e6 + generator.normal(size=2000)
    predictions = values + 0.5 * generator.normal(size=2000)
    recorded = Metrics.of("squared", 1).measure(predictions[:, None], values)
    for metric in ("r2", "rmse", "mae"):
        interval = statistics.interval_of(metric, predictions, values)
        assert interval.low < recorded[metric] < interval.high


def test_reliability_bins_have_equal_rows_and_keep_equal_scores_together():
    scores, positive = two_classes(1000, decimals=9)
    bins = statistics.reliability(scores, positive)
    assert [own.rows for own in bins] == [100] * 10
    assert sum(own.rows * own.share for own in bins) == pytest.approx(positive.sum())
    assert [own.score for own in bins] == sorted(own.score for own in bins)
    constant = statistics.reliability(np.full(50, 0.25), np.arange(50) < 10)
    assert [(own.rows, own.score, own.share) for own in constant] == [(50, 0.25, 0.2)]


def test_wilsons_interval_is_the_published_one():
    """Newcombe (1998), table I: 81 of 263, and 0 of 20."""
    interval = statistics.wilson(81 / 263, 263)
    assert (round(interval.low, 4), round(interval.high, 4)) == (0.2553, 0.3662)
    interval = statistics.wilson(0.0, 20)
    assert (interval.low, round(interval.high, 4)) == (0.0, 0.1611)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=10, max_size=60).filter(
        lambda rows: any(positive for _, positive in rows)
    )
)
def test_gains_find_all_positives_and_ties_count_in_proportion(rows):
    scores = np.array([score for score, _ in rows], dtype=float)
    positive = np.array([positive for _, positive in rows])
    tenths = statistics.gains(scores, positive)
    assert sum(own.rows for own in tenths) == len(rows)
    assert sum(own.positives for own in tenths) == pytest.approx(positive.sum())
    assert tenths[-1].found == pytest.approx(1)
    turned = statistics.gains(scores[::-1], positive[::-1])
    assert [own.positives for own in turned] == pytest.approx([own.positives for own in tenths])


def test_a_constant_score_has_lift_1_everywhere():
    tenths = statistics.gains(np.zeros(100), np.arange(100) < 30)
    assert [own.lift for own in tenths] == pytest.approx([1.0] * 10)


def test_confusion_is_that_of_scikit_learn():
    generator = np.random.default_rng(5)
    predicted, actual = generator.integers(0, 4, 300), generator.integers(0, 3, 300)
    expected = metrics.confusion_matrix(actual, predicted, labels=range(4))
    np.testing.assert_array_equal(statistics.confusion(predicted, actual, 4), expected)


def test_errors_by_tenth_add_up():
    generator = np.random.default_rng(6)
    predictions = generator.normal(size=205)
    labels = predictions + generator.normal(size=205)
    tenths = statistics.errors_by_tenth(predictions, labels)
    assert {own.rows for own in tenths} == {20, 21}
    total = sum(own.rows * own.error for own in tenths)
    assert total / 205 == pytest.approx(metrics.mean_absolute_error(labels, predictions))
    assert [own.predicted for own in tenths] == sorted(own.predicted for own in tenths)


def test_the_usual_range_leaves_out_extremes_and_is_never_empty():
    values = np.append(np.linspace(0, 1, 1000), 1e9)
    low, high = statistics.usual_range(values)
    assert 0 <= low < 0.01
    assert 0.99 < high < 1.01
    assert statistics.usual_range(np.zeros(5)) == (-0.5, 0.5)
