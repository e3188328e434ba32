import numpy as np
import pytest

from vafl.data.alignment.matching import common, match, number, shuffled
from vafl.errors import InvalidMessage


def tags(*numbers):
    return b"".join(value.to_bytes(16, "big") for value in numbers)


def test_tags_that_agree_in_one_half_only_are_others():
    own, theirs = match(tags(1, 2, 1 << 64), tags((1 << 64) + 1, 1 << 64, 2))
    assert sorted(zip(own.tolist(), theirs.tolist(), strict=True)) == [(1, 2), (2, 1)]


@pytest.mark.parametrize("pair", [(tags(1, 1), tags(2)), (tags(2), tags(1, 1))])
def test_a_tag_that_is_there_twice_is_refused(pair):
    with pytest.raises(InvalidMessage, match="VFL-2041"):
        match(*pair)


def test_an_order_is_a_permutation_and_another_one_each_time():
    one, other = shuffled(1000), shuffled(1000)
    assert sorted(one.tolist()) == list(range(1000))
    assert one.tolist() != other.tolist()


def test_rows_are_what_every_match_has_numbered_in_random_order():
    chosen = common(5, [np.array([4, 0, 2]), np.array([2, 4]), np.array([1, 2, 3, 4])])
    assert chosen.tolist() == [2, 4]
    assert common(3, []).tolist() == [0, 1, 2]
    numbers = number(5, chosen)
    assert numbers[[0, 1, 3]].tolist() == [-1] * 3
    assert sorted(numbers[chosen].tolist()) == [0, 1]
