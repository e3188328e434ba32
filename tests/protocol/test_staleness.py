import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.federation import run_of, vertical_data
from vafl.protocol.staleness import EXACT_BELOW, DelayLog
from vafl.protocol.table import FOREVER, EmbeddingTable

CLIENTS = 3
delay = st.one_of(
    st.integers(0, 12),
    st.integers(0, EXACT_BELOW - 1),
    st.just(FOREVER + 5),
)
step = st.tuples(
    st.lists(st.lists(delay, min_size=CLIENTS, max_size=CLIENTS), min_size=1, max_size=4),
    st.one_of(st.none(), st.integers(0, CLIENTS - 1)),
)


def record(log, delays, own, iteration=7):
    """Record a step that uses one row for each line of `delays`."""
    table = EmbeddingTable(len(delays), [1] * len(delays[0]), summed=False)
    table.stored_at[:] = iteration - np.array(delays, dtype=np.int32)
    log.record(table, np.arange(len(delays)), iteration, own)


def smallest_reached_by(values, percent):
    """Return the smallest delay that at least this percentage of the uses do not exceed."""
    return next(v for v in sorted(values) if 100 * sum(w <= v for w in values) >= percent * len(values))


@given(st.lists(step, max_size=8), st.one_of(st.none(), st.integers(1, 20)))
def test_summaries_equal_a_count_by_hand(steps, bound):
    log = DelayLog(CLIENTS, bound)
    for delays, own in steps:
        record(log, delays, own)
    for client, found in enumerate(log.summaries()):
        used = [line[client] for delays, own in steps if own != client for line in delays]
        known = [value for value in used if value < FOREVER]
        assert found.uses == len(known)
        assert found.never == len(used) - len(known)
        assert found.over_bound == (0 if bound is None else sum(value > bound for value in used))
        assert found.max == max(known, default=0)
        assert found.mean == (sum(known) / len(known) if known else 0.0)
        assert found.p50 == (smallest_reached_by(known, 50) if known else 0)
        assert found.p99 == (smallest_reached_by(known, 99) if known else 0)


def test_counting_is_the_same_however_often_it_is_looked_at():
    generator = np.random.default_rng(0)
    once, often = DelayLog(2), DelayLog(2)
    for _ in range(150):
        delays = generator.integers(0, 300, (3, 2))
        record(once, delays, 0)
        record(often, delays, 0)
        often.summaries()
    assert once.summaries() == often.summaries()
    assert once.summaries()[1].uses == 450
    assert once.summaries()[0].uses == 0


def test_very_long_delays_share_a_bin_but_keep_maximum_and_mean_exact():
    log = DelayLog(1)
    for _ in range(5):
        record(log, [[EXACT_BELOW + 100], [EXACT_BELOW + 300]], None)
    found = log.summaries()[0]
    assert (found.max, found.mean, found.uses) == (EXACT_BELOW + 300, EXACT_BELOW + 200, 10)
    assert log.state()["counts"].numel() < 2 * EXACT_BELOW
    assert found.p50 == found.p99 == EXACT_BELOW


@pytest.mark.parametrize(("clients", "bound", "sampled"), [(8, 0, 1), (16, 0, 2), (16, 1000, 1)])
def test_with_many_clients_a_share_of_the_rows_stands_for_all(clients, bound, sampled):
    run = run_of(vertical_data(clients=clients), rule={"delay_bound": bound}, stop={"updates": 1})
    run.train()
    used = run.runtime.server.delays.summaries()
    active = [number for number, delay in enumerate(used) if delay.uses + delay.never == 0]
    assert len(active) == 1
    assert {delay.uses + delay.never for n, delay in enumerate(used) if n not in active} == {4}
    assert {delay.sampled for delay in used} == {sampled}


@pytest.mark.parametrize("batch", [1, 3, 8, 20])
def test_of_all_rows_that_steps_use_one_in_so_many_is_counted(batch):
    log, generator = DelayLog(1, every=8), np.random.default_rng(0)
    for _ in range(240):
        record(log, generator.choice([2, 5, FOREVER], (batch, 1)), None)
    (found,) = log.summaries()
    assert found.uses + found.never == 240 * batch
    assert (found.sampled, found.max) == (8, 5)
