import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_sample_weight

from vafl.errors import ConfigError, DataError
from vafl.models.weights import check_class_weight, row_weights

CLASSES = ("no", "perhaps", "yes")
labels_of_three = st.lists(st.integers(0, 2), min_size=1, max_size=200).map(np.array)


@given(labels_of_three)
def test_balanced_weights_are_those_of_scikit_learn(labels):
    found = row_weights("balanced", labels, CLASSES)
    expected = compute_sample_weight("balanced", labels)
    assert np.allclose(found, expected / expected.mean(), rtol=1e-6)
    totals = [found[labels == label].sum() for label in np.unique(labels)]
    assert totals == pytest.approx([totals[0]] * len(totals), rel=1e-5)


@given(labels_of_three, st.integers(0, 2**32))
def test_weights_of_classes_and_rows_multiply_and_have_mean_1(labels, seed):
    own = np.random.default_rng(seed).uniform(0.1, 10, len(labels))
    found = row_weights({"yes": 5.0, "no": 0.5}, labels, CLASSES, own)
    expected = np.array([0.5, 1, 5])[labels] * own
    assert np.allclose(found, expected / expected.mean(), rtol=1e-6)
    assert found.mean() == pytest.approx(1, rel=1e-5)


def test_without_weights_nothing_is_weighted():
    assert row_weights("none", np.zeros(5), None) is None


def test_rows_of_a_regression_may_have_weights():
    assert row_weights("none", np.zeros(4), None, [1, 0, 2, 1]).tolist() == [1, 0, 2, 1]


def test_weights_that_are_all_zero_are_refused():
    with pytest.raises(DataError, match=r"VFL-3053.*3"):
        row_weights("none", np.zeros(3), None, [0, 0, 0])


def test_weights_of_unknown_classes_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"VFL-3052.*no, perhaps, yes.*'Yes'"):
        check_class_weight({"Yes": 2.0}, CLASSES)
    with pytest.raises(ConfigError, match="VFL-3051"):
        check_class_weight("balanced", None)
    check_class_weight("none", None)
    check_class_weight({"yes": 2.0}, CLASSES)
