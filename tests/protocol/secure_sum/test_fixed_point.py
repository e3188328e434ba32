import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vafl.errors import Diverged
from vafl.protocol.secure_sum.fixed_point import FRACTION_BITS, decode, encode, largest_score


@given(st.lists(st.floats(-1e5, 1e5, width=32), min_size=1, max_size=20))
def test_what_is_encoded_is_decoded_to_the_last_digit_that_is_kept(values):
    scores = np.array(values, np.float32)[:, None]
    assert (np.abs(decode(encode(scores, 3)) - scores) <= 2.0 ** -(FRACTION_BITS + 1)).all()


@given(st.floats(2.0**-9, 1e5, width=32), st.sampled_from([-1, 1]))
def test_a_float32_of_ordinary_size_is_encoded_exactly(magnitude, sign):
    score = np.array([[sign * magnitude]], np.float32)
    assert np.array_equal(decode(encode(score, 6)), score)


@pytest.mark.parametrize("clients", [3, 4, 6])
def test_the_sum_of_the_largest_scores_does_not_wrap_around(clients):
    largest = np.nextafter(np.float32(largest_score(clients)), np.float32(0))
    for sign in (1, -1):
        words = [encode(np.array([[sign * largest]], np.float32), clients) for _ in range(clients)]
        total = decode(np.add.reduce(words))
        assert total.item() == pytest.approx(sign * clients * float(largest))


@pytest.mark.parametrize("value", [1e9, -1e9, float("inf"), float("nan")])
def test_a_score_too_large_is_named(value):
    scores = np.array([[1.0, value], [0.0, 2.0]], np.float32)
    with pytest.raises(Diverged, match=r"VFL-4121.*715,827,883.*3"):
        encode(scores, 3)


def test_no_rows_are_no_words():
    assert encode(np.empty((0, 2), np.float32), 3).shape == (0, 2)
