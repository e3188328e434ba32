"""Scaling by the training rows."""

import numpy as np

from vafl.data.dataset import standardised


def test_a_constant_column_is_centred_and_not_blown_up_by_rounding():
    train, test = np.full((997, 1), 0.1, np.float32), np.array([[0.2]], np.float32)
    scaled, held_out = standardised(train, test)
    np.testing.assert_allclose(scaled, 0, atol=1e-6)
    np.testing.assert_allclose(held_out, 0.1, rtol=1e-4)


def test_other_columns_get_zero_mean_and_unit_deviation():
    train = np.array([[1.0], [3.0]], np.float32)
    scaled, held_out = standardised(train, np.array([[5.0]], np.float32))
    np.testing.assert_allclose(scaled, [[-1], [1]])
    np.testing.assert_allclose(held_out, [[3]])
