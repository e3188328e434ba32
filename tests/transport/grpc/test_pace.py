import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vafl.transport.grpc.pace import AT_ONCE, PER_SECOND, Pace


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def answers(pace, clock, rows, count):
    """Return the total seconds that `count` requests in a row for these rows have to wait."""
    begin = clock.now
    for _ in range(count):
        clock.now += pace.wait(rows)
        pace.count(rows)
    return clock.now - begin


def test_one_record_again_and_again_is_answered_at_the_pace():
    clock = Clock()
    pace, row = Pace(5, clock), np.array([3])
    assert answers(pace, clock, row, AT_ONCE) == 0
    assert pace.wait(row) == pytest.approx(1 / PER_SECOND)
    assert answers(pace, clock, row, 100) == pytest.approx(100 / PER_SECOND)
    assert pace.wait(np.array([2])) == 0
    assert pace.wait(np.array([2, 3])) > 0, "the most-asked record counts"
    clock.now += AT_ONCE / PER_SECOND
    assert answers(pace, clock, row, AT_ONCE) == pytest.approx(0, abs=1e-6)


def test_every_record_once_never_waits():
    clock = Clock()
    pace = Pace(100_000, clock)
    assert sum(answers(pace, clock, np.array([row]), 1) for row in range(0, 100_000, 7)) == 0
    assert answers(pace, clock, np.arange(100_000), AT_ONCE - 1) == 0


@given(st.lists(st.floats(0, 3), max_size=400))
def test_no_time_has_more_answers_than_the_pace(pauses):
    clock, times = Clock(), []
    pace, row = Pace(1, clock), np.array([0])
    for pause in pauses:
        clock.now += pause / PER_SECOND
        clock.now += pace.wait(row)
        pace.count(row)
        times.append(clock.now)
    for first, start in enumerate(times):
        for last in range(first, len(times), 37):
            assert last - first + 1 <= AT_ONCE + (times[last] - start) * PER_SECOND + 1e-6


@pytest.mark.parametrize("rows", [[], [5], [-1], [2**62]])
def test_rows_that_the_client_refuses_do_not_wait(rows):
    pace = Pace(5)
    pace.count(np.array(rows, dtype=np.int64))
    assert pace.wait(np.array(rows, dtype=np.int64)) == 0
