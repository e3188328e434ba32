import numpy as np
import pytest

from vafl.data.dataset import Dataset, Standard
from vafl.errors import DataError


def dataset(**changes):
    features = np.arange(8, dtype=np.float32).reshape(4, 2)
    given = {
        "name": "toy",
        "features": features,
        "labels": np.array([0, 1, 0, 1]),
        "columns": ("age", "pay"),
        "classes": ("no", "yes"),
    }
    return Dataset(**{**given, **changes})


def spoilt(value, shape=(4, 2)):
    features = np.zeros(shape, dtype=np.float32)
    features.reshape(len(features), -1)[1, -1] = value
    return features


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"features": spoilt(np.nan)},
            r"must be finite numbers. Found NaN or infinity in 1 column\(s\): pay. Fill or drop",
        ),
        ({"features": spoilt(np.inf)}, r"in 1 column\(s\): pay"),
        ({"features": spoilt(np.nan, (4, 1, 2, 3)), "columns": ()}, r"in 1 column\(s\): #5"),
        ({"labels": np.array([0, 1, 0])}, r"4 rows and 3 labels"),
    ],
)
def test_a_data_set_is_checked_when_made(changes, said):
    with pytest.raises(DataError, match=r": toy: .*" + said):
        dataset(**changes)


def test_columns_get_zero_mean_and_unit_deviation_by_the_training_rows_alone():
    train = np.random.default_rng(0).normal(5, 3, (200, 2)).astype(np.float32)
    scale = Standard.fit(train)
    own, test = scale(train), scale(train[:3] + 1)
    assert own.dtype == test.dtype == np.float32
    assert np.allclose(own.mean(0), 0, atol=1e-5)
    assert np.allclose(own.std(0), 1, atol=1e-5)
    assert np.allclose(test, (train[:3] + 1 - train.mean(0)) / train.std(0), atol=1e-5)


@pytest.mark.parametrize("value", [0.1, 1e-3, 123456.7, -3.3])
@pytest.mark.parametrize("count", [3, 997])
def test_a_constant_column_becomes_zero_and_a_test_row_keeps_its_distance(value, count):
    """Rounding errors must not count as a deviation: division by it would make test rows huge."""
    train = np.full((count, 1), value, dtype=np.float32)
    scale = Standard.fit(train)
    assert (scale(train) == 0).all()
    assert scale(train[:1] + np.float32(1)).item() == pytest.approx(1, rel=0.01)


def test_a_large_offset_does_not_swallow_the_deviation():
    train = (1e7 + np.arange(100, dtype=np.float64)[:, None]).astype(np.float32)
    own = Standard.fit(train)(train)
    assert own.std() == pytest.approx(1, abs=1e-5)
    assert own.mean() == pytest.approx(0, abs=1e-5)
