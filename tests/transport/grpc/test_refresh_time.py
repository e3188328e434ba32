"""The share of a client's time that refreshes may take."""

import pytest

from vafl.transport.grpc.refresh_time import MeasuredTime


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def measured(pause, per_row, rounds=60, rows=100):
    """Return the limit after refreshes of `rows` rows, with pauses between them."""
    clock = Clock()
    time = MeasuredTime(8, clock)
    assert time.rows() == 8, "nothing is known yet"
    for _ in range(rounds):
        clock.now += pause
        with time.refreshing(rows):
            clock.now += per_row * rows
    return time.rows()


@pytest.mark.parametrize(
    ("pause", "per_row", "most"), [(1.0, 0.01, 100), (0.5, 0.001, 500), (10.0, 0.01, 1000)]
)
def test_refreshes_take_as_long_as_the_pauses_between_them(pause, per_row, most):
    assert measured(pause, per_row) == pytest.approx(most, rel=0.01)


def test_a_few_rows_are_always_refreshed():
    assert measured(1e-6, 1.0) == 8
