import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vafl.data.settings import DataSettings
from vafl.data.split import Parts, Split
from vafl.errors import DataError


def settings(test=0.25, validation=0.0):
    return DataSettings(test_fraction=test, validation_fraction=validation)


@given(
    st.integers(20, 90), st.floats(0.1, 0.5), st.floats(0.1, 0.4), st.integers(0, 2**32), st.integers(1, 4)
)
def test_every_record_is_in_one_part_by_the_seed_alone(units, test, validation, seed, together):
    split = Split.of(units * together, settings(test, validation), seed, together=together)
    assert sorted(split.order.tolist()) == list(range(units * together))
    expected = [round(units * share) * together for share in (validation, test)]
    assert [split.parts.validation, split.parts.test] == expected
    people = [set(split.order[part] // together) for part in split.parts.slices.values()]
    assert sum(map(len, people)) == len(set.union(*people)) == units
    again = Split.of(units * together, settings(test, validation), seed, together=together)
    assert np.array_equal(again.order, split.order)
    assert again.digest() == split.digest()


def test_another_seed_or_other_parts_are_another_split():
    splits = [Split.of(50, settings(), 0), Split.of(50, settings(), 1), Split.of(50, settings(0.3), 0)]
    assert len({split.digest() for split in splits}) == 3
    assert Split(splits[0].order, Parts(50)).digest() != splits[0].digest()


def test_a_sources_own_test_rows_stay_and_validation_rows_come_from_the_others():
    split = Split.of(26, settings(validation=0.2), 1, tests=6)
    assert split.parts == Parts(15, 5, 6)
    assert split.order[20:].tolist() == list(range(20, 26))
    assert sorted(split.order[:20].tolist()) == list(range(20))
    plain = Split.of(26, settings(), 1, tests=6)
    assert plain.order.tolist() == list(range(26))


@pytest.mark.parametrize(
    ("rows", "tests", "test", "validation"),
    [(1, 0, 0.25, 0.0), (2, 0, 0.1, 0.25), (4, 0, 0.25, 0.1), (10, 6, 0.25, 0.45)],
)
def test_too_few_rows_are_refused(rows, tests, test, validation):
    with pytest.raises(DataError, match=rf"Found {rows} rows, too few for data.test_fraction = {test}"):
        Split.of(rows, settings(test, validation), 0, tests=tests)
