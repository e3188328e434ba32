"""Which rows a client refreshes for the others, and whether the server has them in time."""

from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.federation import Exchange, run_of, vertical_data
from vafl.protocol.messages import Gradient
from vafl.protocol.refresh import Lookahead, NoRefresh, RandomRefresh, RefreshAll
from vafl.protocol.schedule import BatchSchedule


def batches(schedule, first, count):
    return [schedule.batch(activation) for activation in range(first, first + count)]


def test_none_all_and_random():
    assert NoRefresh().rows([1, 2]).tolist() == []
    assert RefreshAll().rows([1, 2]) is None
    policy = RandomRefresh(8, 3, np.random.default_rng(0))
    drawn = [policy.rows([0, 0]).tolist() for _ in range(20)]
    assert all(len(set(rows)) == 3 and max(rows) < 8 for rows in drawn)
    assert len({tuple(sorted(rows)) for rows in drawn}) > 5
    assert sorted(RandomRefresh(4, 99, np.random.default_rng(0)).rows([]).tolist()) == [0, 1, 2, 3]


movements = st.lists(st.lists(st.integers(0, 12), min_size=3, max_size=3), min_size=2, max_size=6)
ROWS = 13


def named(found):
    return set(range(ROWS)) if found is None else set(found.tolist())


def next_rows(schedules, counters, ahead):
    """Return the rows of the next `ahead[j]` batches of each client j except client 0."""
    dealt = [batches(schedules[j], counters[j], ahead[j]) for j in range(1, len(schedules))]
    return {row for client in dealt for batch in client for row in batch.tolist()}


@given(movements, st.sampled_from(["epochs", "iid"]), st.integers(1, ROWS))
def test_lookahead_names_the_next_batches_of_all_others(movements, kind, size):
    """The next L batches of each client: L is the growth of its counter since the last time, plus one."""
    schedules = [BatchSchedule(kind, ROWS, size, 5, stream) for stream in range(3)]
    policy, now = Lookahead(0, schedules), np.array(movements[0])
    assert named(policy.rows(now.tolist())) == next_rows(schedules, now, [1, 1, 1])
    for moved in movements[1:]:
        now = now + moved
        found = policy.rows(now.tolist())
        wanted = next_rows(schedules, now, [count + 1 for count in moved])
        assert named(found) >= wanted
        if kind == "epochs" or found is not None:
            assert named(found) == wanted


def test_a_lone_client_has_nobody_to_look_ahead_for():
    assert Lookahead(0, [BatchSchedule("epochs", 4, 2, 0, 1)]).rows([3]).tolist() == []


@pytest.mark.parametrize("kind", ["epochs", "iid"])
@pytest.mark.parametrize("size", [3, 10, 30])
@pytest.mark.parametrize("pattern", [[0, 1, 2], [0, 1, 1, 1, 1, 2, 1, 1]], ids=["round robin", "one is fast"])
def test_with_lookahead_no_used_cell_is_older_than_its_clients_own_gap(kind, size, pattern):
    """With regular activations, after a warm-up each cell is as fresh as its client's last activation."""
    data = vertical_data(rows=30, clients=3)
    schedule = {"refresh": "lookahead", "kind": kind, "batch_size": size}
    exchange = Exchange(run_of(data, schedule=schedule))
    for client in pattern * 3:
        exchange.turn(client)
    exchange.seen.used.clear()
    for client in pattern * 20:
        exchange.turn(client)
    gaps = [max_gap(pattern, client) for client in range(3)]
    for delays, own in exchange.seen.used:
        assert all((delays[:, client] <= gaps[client]).all() for client in range(3) if client != own)


def max_gap(pattern, client):
    """Return the most steps between two activations of a client in a repeating pattern."""
    places = [i for i, active in enumerate(pattern * 2) if active == client]
    return max(after - before for before, after in pairwise(places))


# --- aiming at the moment when the server stores a refresh ---

LONG = [BatchSchedule("epochs", 1000, 10, 5, stream) for stream in range(2)]


def rows_of(first, end):
    """Return the rows of these batches of client 1."""
    return {row for batch in batches(LONG[1], first, end - first) for row in batch.tolist()}


def acknowledged(policy, rounds, *, gap=3, lead=7):
    """Refresh at every `gap`-th upload of client 1; the server stores each refresh `lead` uploads later.

    Return the count of client 1 at the last refresh.
    """
    made = {}
    for number in range(rounds):
        now = gap * number
        for sequence, at in list(made.items()):
            if at + lead <= now:
                policy.stored(sequence, (0, at + lead))
                del made[sequence]
        policy.rows((number, now))
        policy.sent(number)
        made[number] = now
    return gap * (rounds - 1)


def test_the_first_refresh_begins_with_the_next_batch():
    assert set(Lookahead(0, LONG).rows((0, 20)).tolist()) == rows_of(20, 21)


def test_a_refresh_aims_at_the_batches_that_are_used_after_it_is_stored():
    policy = Lookahead(0, LONG)
    now = acknowledged(policy, 12)
    policy.stored(8, (0, 24 + 7))
    found = set(policy.rows((12, now + 3)).tolist())
    assert found == rows_of(now + 3 + 7, now + 3 + 7 + 3 + 1)


def test_batches_that_a_stored_refresh_had_count_as_covered():
    late = []
    for rounds in (60, 120):
        policy = Lookahead(0, LONG)
        acknowledged(policy, rounds)
        assert policy.uses > 2.5 * rounds
        late.append(policy.uses - policy.covered)
    assert 0 < late[0] == late[1] < 25, "until the lead is known, refreshes come too late; never after that"


def test_what_was_sent_on_an_earlier_connection_is_never_acknowledged():
    policy = Lookahead(0, LONG)
    policy.rows((0, 0))
    policy.sent(1)
    policy.restart()
    policy.stored(1, (0, 50))
    assert set(policy.rows((0, 60)).tolist()) == rows_of(60, 60 + 61)


class Limited:
    """Allows a number of rows."""

    def __init__(self, most):
        self.most = most

    def rows(self):
        return self.most

    def refreshing(self, rows):
        return nullcontext()


@pytest.mark.parametrize(("most", "count"), [(1, 1), (10, 1), (11, 2), (55, 6), (10_000, 21)])
def test_without_time_for_all_rows_the_next_ones_are_refreshed(most, count):
    policy = Lookahead(0, LONG, Limited(most))
    policy.rows((0, 0))
    assert set(policy.rows((1, 20)).tolist()) == rows_of(20, 20 + count)


def test_the_server_says_when_it_has_stored_a_refresh():
    run = run_of(vertical_data(rows=40), schedule={"refresh": "lookahead"})
    server, clients = run.runtime.server, run.runtime.clients
    (upload,) = clients[0].wake()
    (answer,) = server.receive(upload)
    assert (answer.refreshed, answer.stored) == (-1, ()), "there was none yet"
    (refresh,) = clients[0].receive(answer)
    assert server.receive(*clients[1].wake())
    assert server.receive(refresh) == []
    counts = tuple(server.activations)
    (answer,) = server.receive(*clients[0].wake())
    assert isinstance(answer, Gradient)
    assert (answer.refreshed, answer.stored) == (refresh.sequence, counts)
    (answer,) = server.receive(*clients[0].wake())
    assert answer.stored == (), "told once"
