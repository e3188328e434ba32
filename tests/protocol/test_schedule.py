from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.federation import Exchange, run_of, vertical_data
from vafl.errors import ConfigError
from vafl.protocol.schedule import (
    BatchSchedule,
    Lookahead,
    NoRefresh,
    RandomRefresh,
    RefreshAll,
    ScheduleSettings,
    parse_refresh,
)

seeds = st.integers(0, 2**32)


def batches(schedule, first, count):
    return [schedule.batch(activation) for activation in range(first, first + count)]


@given(st.integers(1, 40), st.data(), seeds, st.integers(0, 5))
def test_every_row_comes_exactly_once_an_epoch(rows, data, seed, epoch):
    size = data.draw(st.integers(1, rows))
    schedule = BatchSchedule("epochs", rows, size, seed, 1)
    per_epoch = schedule.batches_per_epoch
    dealt = batches(schedule, epoch * per_epoch, per_epoch)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(rows))
    assert [len(batch) for batch in dealt[:-1]] == [size] * (per_epoch - 1)
    assert len(dealt[-1]) == rows - size * (per_epoch - 1)
    assert dealt[-1].dtype == np.int64


@given(st.sampled_from(["epochs", "iid"]), seeds, st.lists(st.integers(0, 60), max_size=20))
def test_a_batch_depends_on_seed_stream_and_activation_only(kind, seed, visited):
    """A batch does not depend on which batches were requested before, or in which order."""
    used = BatchSchedule(kind, 11, 3, seed, 2)
    for activation in visited:
        assert np.array_equal(used.batch(activation), BatchSchedule(kind, 11, 3, seed, 2).batch(activation))


@pytest.mark.parametrize("kind", ["epochs", "iid"])
def test_seeds_streams_and_epochs_differ(kind):
    one = BatchSchedule(kind, 100, 50, 3, 1)
    assert one.batch(0).tolist() != one.batch(2).tolist()
    assert one.batch(0).tolist() != BatchSchedule(kind, 100, 50, 3, 2).batch(0).tolist()
    assert one.batch(0).tolist() != BatchSchedule(kind, 100, 50, 4, 1).batch(0).tolist()


@given(st.integers(1, 40), st.data(), seeds, st.integers(0, 1000))
def test_iid_batches_hold_distinct_rows(rows, data, seed, activation):
    size = data.draw(st.integers(1, rows))
    batch = BatchSchedule("iid", rows, size, seed, 1).batch(activation)
    assert len(set(batch.tolist())) == len(batch) == size
    assert batch.min() >= 0
    assert batch.max() < rows


def test_iid_draws_every_row_about_as_often():
    schedule = BatchSchedule("iid", 10, 3, 0, 1)
    counts = np.bincount(np.concatenate(batches(schedule, 0, 2000)), minlength=10)
    assert abs(counts - 600).max() < 6 * np.sqrt(600 * 0.7)


# --- which other rows are refreshed ---


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


@pytest.mark.parametrize("kind", ["epochs", "iid"])
def test_private_schedules_differ_from_shared_ones_and_from_each_other(kind):
    drawn = {}
    for seed in ("shared", "private"):
        run = run_of(vertical_data(rows=40), schedule={"kind": kind, "seed": seed, "batch_size": 20})
        for client in run.runtime.clients:
            drawn[seed, client.index] = tuple(client.wake()[0].rows.tolist())
    assert len(set(drawn.values())) == 4


# --- settings ---


@pytest.mark.parametrize("text", ["none", "all", "lookahead"])
def test_policies_without_a_number(text):
    assert parse_refresh(text) == (text, 0)
    assert parse_refresh("random:3000") == ("random", 3000)


@pytest.mark.parametrize(
    "text", ["", "random", "random:0", "random:-1", "random:x", "all:3", "lookahed", "none:1"]
)
def test_an_unknown_policy_is_refused(text):
    with pytest.raises(ConfigError, match=f'VFL-4095.*"{text}"'):
        ScheduleSettings(refresh=text)


def test_settings_refuse_what_cannot_be():
    with pytest.raises(ConfigError, match=r"VFL-4091.*\-1"):
        ScheduleSettings(batch_size=-1)
    with pytest.raises(ConfigError, match="VFL-4093"):
        ScheduleSettings(seed="private", refresh="lookahead")
    with pytest.raises(ConfigError, match=r"VFL-4094.*10.*11"):
        ScheduleSettings(batch_size=11).check_rows(10)
    ScheduleSettings(batch_size=10).check_rows(10)


@pytest.mark.parametrize(
    ("rows", "batch", "epochs"), [(30, 30, 40), (1_000, 64, 40), (20_000, 128, 40), (10**7, 1024, 4)]
)
def test_sizes_left_open_follow_from_the_number_of_rows(rows, batch, epochs):
    sized = ScheduleSettings(batch_size=0, epochs=0).sized(rows)
    assert (sized.batch_size, sized.epochs) == (batch, epochs)
    assert ScheduleSettings(batch_size=7, epochs=2).sized(rows).batch_size == 7
