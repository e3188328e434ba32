import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vafl.data.dataset import Dataset, encode_labels, split_rows, standardised, with_validation
from vafl.errors import DataError


def dataset(**changes):
    features = np.arange(8, dtype=np.float32).reshape(4, 2)
    labels = np.array([0, 1, 0, 1])
    given = {
        "name": "toy",
        "train": features,
        "test": features[:2],
        "train_labels": labels,
        "test_labels": labels[:2],
        "columns": ("age", "pay"),
        "classes": ("no", "yes"),
    }
    return Dataset(**{**given, **changes})


def test_validation_rows_are_taken_from_the_training_rows():
    features = np.arange(40, dtype=np.float32).reshape(20, 2)
    whole = dataset(train=features, train_labels=np.arange(20) % 2, record_digest="x")
    assert with_validation(whole, 0.0, 1) is whole
    found = with_validation(whole, 0.2, 1)
    assert (len(found.train), found.validation, len(found.test)) == (16, 4, 6)
    assert sorted([*found.train[:, 0], *found.test[:4, 0]]) == features[:, 0].tolist()
    assert np.array_equal(found.test[4:], whole.test)
    assert [features[row, 0] for row in found.records[:20]] == [*found.train[:, 0], *found.test[:4, 0]]
    assert np.array_equal(found.train_labels, found.records[:16] % 2)
    assert found.record_digest not in ("x", with_validation(whole, 0.2, 2).record_digest)
    with pytest.raises(DataError, match="must be one row or more"):
        with_validation(whole, 0.95, 1)


def spoilt(value, shape=(4, 2)):
    features = np.zeros(shape, dtype=np.float32)
    features.reshape(len(features), -1)[1, -1] = value
    return features


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"train": np.zeros((0, 2)), "train_labels": np.zeros(0)},
            r"rows are both needed. Found 0 and 2.*data.test_fraction",
        ),
        ({"test": np.zeros((0, 2)), "test_labels": np.zeros(0)}, r"Found 4 and 0"),
        (
            {"train": spoilt(np.nan)},
            r"must be finite numbers. Found NaN or infinity in 1 column\(s\): pay. Fill or drop",
        ),
        ({"test": spoilt(np.inf), "test_labels": np.zeros(4)}, r"in 1 column\(s\): pay"),
        ({"train": spoilt(np.nan, (4, 1, 2, 3)), "columns": ()}, r"in 1 column\(s\): #5"),
        (
            {"train_labels": np.ones(4, dtype=int)},
            r'at least two classes. Found only "yes". Is data.label the right',
        ),
        ({"train_labels": np.array([0, 1, 0])}, r"one label a row is needed. Found 4 rows and 3 labels"),
        ({"test_labels": np.array([0, 1, 0])}, r"one label a row is needed. Found 2 rows and 3 labels"),
    ],
)
def test_a_data_set_is_checked_when_made(changes, said):
    with pytest.raises(DataError, match=r"^toy: .*" + said):
        dataset(**changes)


def test_a_regression_may_have_one_label_only():
    assert dataset(classes=None, train_labels=np.ones(4)).classes is None


@pytest.mark.parametrize(
    ("values", "numbers", "names"),
    [
        (np.array(["b", "a", "b"], dtype=object), [1, 0, 1], ("a", "b")),
        (np.array([7, 3, 7]), [1, 0, 1], ("3", "7")),
        (np.array([True, False, True]), [1, 0, 1], ("False", "True")),
        (np.array([0.5, 1.5, 0.5]), [0, 1, 0], ("0.5", "1.5")),
    ],
)
def test_classes_are_numbered_in_order_of_their_names(values, numbers, names):
    indices, classes = encode_labels(values, regression=False, name="toy")
    assert (indices.tolist(), classes, indices.dtype) == (numbers, names, np.int64)


def test_labels_of_a_regression_are_numbers():
    numbers, classes = encode_labels(np.array([1, 2]), regression=True, name="toy")
    assert (numbers.dtype, numbers.tolist(), classes) == (np.float32, [1.0, 2.0], None)
    with pytest.raises(DataError, match=r"label of a regression must be a number.*'low'"):
        encode_labels(np.array(["low"], dtype=object), regression=True, name="toy")
    with pytest.raises(DataError, match=r"labels must be finite numbers. Found NaN or infinity"):
        encode_labels(np.array([1.0, np.inf]), regression=True, name="toy")


def test_missing_classes_are_refused():
    with pytest.raises(DataError, match=r"labels must not be missing. Found NaN: drop those rows"):
        encode_labels(np.array([1.0, np.nan]), regression=False, name="toy")


@given(st.integers(0, 60), st.floats(0.01, 0.99), st.integers(0, 2**32))
def test_rows_are_split_without_loss_by_the_seed_alone(count, fraction, seed):
    train, test = split_rows(count, fraction, seed)
    assert sorted([*train, *test]) == list(range(count))
    assert len(test) == round(count * fraction)
    assert split_rows(count, fraction, seed) == (train, test)


def test_another_seed_splits_otherwise():
    assert split_rows(50, 0.5, 0) != split_rows(50, 0.5, 1)


def test_columns_get_zero_mean_and_unit_deviation_by_the_training_rows_alone():
    train = np.random.default_rng(0).normal(5, 3, (200, 2)).astype(np.float32)
    own, test = standardised(train, train[:3] + 1)
    assert own.dtype == test.dtype == np.float32
    assert np.allclose(own.mean(0), 0, atol=1e-5)
    assert np.allclose(own.std(0), 1, atol=1e-5)
    assert np.allclose(test, (train[:3] + 1 - train.mean(0)) / train.std(0), atol=1e-5)


@pytest.mark.parametrize("value", [0.1, 1e-3, 123456.7, -3.3])
@pytest.mark.parametrize("count", [3, 997])
def test_a_constant_column_becomes_zero_and_a_test_row_keeps_its_distance(value, count):
    """Rounding must not pass for a deviation: dividing by it would blow a test row up."""
    train = np.full((count, 1), value, dtype=np.float32)
    own, test = standardised(train, train[:1] + np.float32(1))
    assert (own == 0).all()
    assert test.item() == pytest.approx(1, rel=0.01)


def test_a_large_offset_does_not_swallow_the_deviation():
    train = (1e7 + np.arange(100, dtype=np.float64)[:, None]).astype(np.float32)
    own, _ = standardised(train, train)
    assert own.std() == pytest.approx(1, abs=1e-5)
    assert own.mean() == pytest.approx(0, abs=1e-5)
