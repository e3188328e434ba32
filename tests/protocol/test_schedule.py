import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.federation import run_of, vertical_data
from vafl.errors import ConfigError
from vafl.protocol.schedule import BatchSchedule, ScheduleSettings, parse_refresh

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
