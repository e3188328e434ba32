import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vafl.errors import ConfigError, InvalidMessage
from vafl.protocol.table import FOREVER, EmbeddingTable, record_type

ROWS, CLIENTS = 5, 3
ALL = np.arange(ROWS)

row_sets = st.lists(st.integers(0, ROWS - 1), unique=True, max_size=ROWS)
stores = st.tuples(st.integers(0, CLIENTS - 1), row_sets)
float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)


def paper_delays(history):
    """tau[n, m], counted step by step as in equation (3): 1 if just stored, otherwise one more."""
    tau = np.full((ROWS, CLIENTS), np.inf)
    for stored in history:
        fresh = np.zeros((ROWS, CLIENTS), dtype=bool)
        for client, rows in stored:
            fresh[rows, client] = True
        tau = np.where(fresh, 1, tau + 1)
    return tau


@given(st.lists(st.lists(stores, max_size=4), max_size=12))
def test_delays_follow_equation_3_for_any_history(history):
    table = EmbeddingTable(ROWS, [2] * CLIENTS, summed=False)
    for iteration, stored in enumerate(history):
        for client, numbers in stored:
            rows = np.array(numbers, np.int64)
            table.store(client, rows, np.ones((len(rows), 2), np.float32), iteration)
            assert (table.delays(rows, iteration)[:, client] == 0).all()
    found = table.delays(ALL, len(history)).astype(float)
    found[found >= FOREVER] = np.inf
    assert np.array_equal(found, paper_delays(history))


@given(
    st.lists(
        st.tuples(
            st.integers(0, CLIENTS - 1), st.integers(0, ROWS - 1), st.lists(float32s, min_size=2, max_size=2)
        ),
        max_size=30,
    )
)
def test_running_sums_equal_recomputed_sums_after_any_history(history):
    """The rounding error depends on the present values only, even if 3e38 was stored in between."""
    table = EmbeddingTable(ROWS, [2] * CLIENTS, summed=True)
    for client, row, values in history:
        table.store(client, np.array([row]), np.array([values], np.float32), 0)
    cells = table.cells.astype(np.float64).reshape(ROWS, CLIENTS, 2)
    error = np.abs(table.sums - cells.sum(1))
    assert (error <= 1e-12 * np.abs(cells).sum(1) + 1e-8).all()


def test_a_small_embedding_survives_a_huge_one_that_came_and_went():
    table, row = EmbeddingTable(1, [1, 1], summed=True), np.array([0])
    for client, value in ((0, 1.0), (1, 1e30), (1, 2.0)):
        table.store(client, row, np.array([[value]], np.float32), 0)
    assert table.read(row).item() == 3.0


def test_sums_do_not_drift_over_a_long_history():
    table, rows = EmbeddingTable(4, [3] * 2, summed=True), np.arange(4)
    generator = np.random.default_rng(0)
    for step in range(2000):
        table.store(step % 2, rows, generator.standard_normal((4, 3), np.float32), step)
    cells = table.cells.astype(np.float64).reshape(4, 2, 3)
    assert np.allclose(table.sums, cells.sum(1), rtol=0, atol=1e-12)


def test_a_read_gives_sums_or_all_cells_in_the_order_asked():
    summed, joined = EmbeddingTable(3, [2, 2], summed=True), EmbeddingTable(3, [2, 1], summed=False)
    for table in (summed, joined):
        table.store(0, np.array([2, 0]), np.array([[1, 2], [3, 4]], np.float32), 0)
    summed.store(1, np.array([0]), np.array([[10, 20]], np.float32), 0)
    joined.store(1, np.array([0]), np.array([[10]], np.float32), 0)
    wanted = np.array([0, 1, 2])
    assert summed.read(wanted).tolist() == [[13, 24], [0, 0], [1, 2]]
    assert summed.read(wanted).dtype == np.float32
    assert joined.read(wanted).tolist() == [[3, 4, 10], [0, 0, 0], [1, 2, 0]]
    assert joined.clients == 2


class Model:
    """What a table of concatenated embeddings holds, as one plain array per client."""

    def __init__(self, widths):
        self.cells = [np.zeros((ROWS, width), np.float32) for width in widths]
        self.stored_at = [[None] * ROWS for _ in widths]

    def store(self, client, rows, values, iteration):
        for row, value in zip(rows, values, strict=True):
            self.cells[client][row] = value
            self.stored_at[client][row] = iteration

    def read(self, rows):
        return np.concatenate([cells[rows] for cells in self.cells], axis=1)

    def read_filled(self, rows):
        parts, gaps = [], {}
        for client, (cells, stored_at) in enumerate(zip(self.cells, self.stored_at, strict=True)):
            known = [row for row in range(ROWS) if stored_at[row] is not None]
            mean = cells[known].mean(0, dtype=np.float64) if known else np.zeros(cells.shape[1])
            unsent = [row for row in rows if stored_at[row] is None]
            parts.append([mean if row in unsent else cells[row] for row in rows])
            gaps |= {client: unsent} if unsent else {}
        return np.concatenate(parts, axis=1), gaps


@given(
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    moves=st.lists(st.tuples(st.integers(0, 3), row_sets), max_size=10),
    wanted=row_sets.filter(bool),
    seed=st.integers(0, 2**32),
)
def test_clients_of_different_widths_share_a_table(widths, moves, wanted, seed):
    table, model = EmbeddingTable(ROWS, widths, summed=False), Model(widths)
    generator, rows = np.random.default_rng(seed), np.array(wanted)
    for iteration, (number, stored) in enumerate(moves):
        client = number % len(widths)
        values = generator.standard_normal((len(stored), widths[client]), np.float32)
        table.store(client, np.array(stored, np.int64), values, iteration)
        model.store(client, stored, values, iteration)
    inputs = table.read(rows)
    assert inputs.flags.c_contiguous
    assert np.array_equal(inputs, model.read(rows))
    filled, gaps = table.read_filled(rows)
    expected, expected_gaps = model.read_filled(wanted)
    np.testing.assert_allclose(filled, expected, rtol=1e-6, atol=1e-7)
    assert {client: missing.tolist() for client, missing in gaps.items()} == expected_gaps
    for client, cells in enumerate(model.cells):
        assert np.array_equal(table.column(client), cells)
        assert np.array_equal(inputs[:, table.columns[client]], cells[rows])
        replaced = inputs.copy()
        replaced[:, table.columns[client]] = cells[rows].mean(0, dtype=np.float64)
        np.testing.assert_allclose(table.without(client, rows, inputs), replaced, rtol=1e-6, atol=1e-7)
    delays = table.delays(rows, len(moves))
    for client, stored_at in enumerate(model.stored_at):
        for delay, row in zip(delays[:, client], wanted, strict=True):
            assert delay == len(moves) - stored_at[row] if stored_at[row] is not None else delay >= FOREVER


@pytest.mark.parametrize(
    ("widths", "summed", "size"),
    [
        ([10] * 4, True, 256),
        ([3], True, 40),
        ([10] * 4, False, 176),
        ([2, 1, 4], False, 40),
        ([2], False, 16),
    ],
)
def test_a_row_is_one_record_with_everything_a_step_needs(widths, summed, size):
    table = EmbeddingTable(6, widths, summed=summed)
    assert record_type(widths, summed=summed).itemsize == table.nbytes / 6 == size
    assert table.records.ctypes.data % 64 == 0
    parts = [table.stored_at, table.cells, *([table.sums] if summed else [])]
    assert all(np.shares_memory(part, table.records) and part.strides[0] == size for part in parts)
    assert table.cells.shape == ((6, len(widths), widths[0]) if summed else (6, sum(widths)))
    assert [table.column(client).shape for client in range(len(widths))] == [(6, width) for width in widths]
    assert (table.stored_at == -FOREVER).all()
    assert not table.cells.any()


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("as_bytes", [True, False])
def test_a_table_is_opened_again_over_its_memory_with_sums_made_anew(summed, as_bytes, tmp_path):
    kind = record_type([2, 2], summed=summed)
    held = np.memmap(tmp_path / "records", kind, "w+", shape=(4,))
    held["stored_at"] = -FOREVER
    first = EmbeddingTable(4, [2, 2], summed=summed, memory=held)
    first.store(1, np.array([3, 0]), np.array([[1, 2], [3, 4]], np.float32), 6)
    first.store(0, np.array([3]), np.array([[10, 20]], np.float32), 7)
    held["sums"] = np.nan  # as if a crash had interrupted a write
    held.flush()
    again = np.fromfile(tmp_path / "records", np.uint8 if as_bytes else kind)
    second = EmbeddingTable(4, [2, 2], summed=summed, memory=again)
    assert np.array_equal(second.cells, first.cells)
    assert second.stored_at.tolist() == [[-FOREVER, 6], [-FOREVER] * 2, [-FOREVER] * 2, [7, 6]]
    assert second.read(np.array([3, 1])).tolist() == (
        [[11, 22], [0, 0]] if summed else [[10, 20, 1, 2], [0, 0, 0, 0]]
    )
    second.store(1, np.array([2]), np.array([[5, 6]], np.float32), 8)
    assert np.shares_memory(second.cells, again)


def test_sums_that_are_right_are_not_written_again(monkeypatch):
    """Otherwise the first checkpoint after a resume would write the whole file."""
    monkeypatch.setattr("vafl.protocol.table._MENDED_ROWS", 2)
    first = EmbeddingTable(5, [2, 2], summed=True)
    first.store(0, np.arange(5), np.arange(10, dtype=np.float32).reshape(5, 2), 0)
    drifted = first.sums + 1e-12
    first.sums[:] = drifted
    first.sums[3, 1] = 100.0
    second = EmbeddingTable(5, [2, 2], summed=True, memory=first.records)
    assert second.sums[3].tolist() == [6.0, 7.0]
    others = [0, 1, 2, 4]
    assert np.array_equal(second.sums[others], drifted[others])


def test_bytes_count_cells_stamps_and_sums():
    assert EmbeddingTable(10, [4, 4], summed=False).nbytes == 10 * 8 * 4 + 10 * 2 * 4
    assert EmbeddingTable(10, [4, 4], summed=True).nbytes == 10 * 8 * 4 + 10 * 2 * 4 + 10 * 4 * 8


def test_a_sum_needs_one_width():
    with pytest.raises(ConfigError, match=r"VFL-4221.*\[2, 3\]"):
        EmbeddingTable(4, [2, 3], summed=True)


@pytest.mark.parametrize(
    ("rows", "width", "said"),
    [
        ([0, 5], 2, r"VFL-4082.*4.*0.*5"),
        ([-1], 2, r"VFL-4082.*\-1"),
        ([1], 3, r"VFL-4222.*1.*2.*3"),
        ([3, 1, 3], 2, "VFL-4081"),
    ],
)
def test_check_refuses_and_changes_nothing(rows, width, said):
    table = EmbeddingTable(ROWS, [2] * CLIENTS, summed=True)
    table.store(1, ALL, np.ones((ROWS, 2), np.float32), 7)
    before = table.cells.copy(), table.sums.copy(), table.stored_at.copy()
    with pytest.raises(InvalidMessage, match=said):
        table.check(1, np.array(rows), np.zeros((len(rows), width), np.float32))
    assert np.array_equal(table.cells, before[0])
    assert np.array_equal(table.sums, before[1])
    assert np.array_equal(table.stored_at, before[2])


def test_check_takes_no_rows_and_all_rows():
    table = EmbeddingTable(ROWS, [2] * CLIENTS, summed=False)
    table.check(0, np.empty(0, np.int64), np.empty((0, 2), np.float32))
    table.check(0, ALL[::-1].copy(), np.zeros((ROWS, 2), np.float32))


@given(st.lists(stores, max_size=12), st.integers(-1, CLIENTS - 1))
def test_delays_are_counted_as_they_are_read(history, own):
    table = EmbeddingTable(ROWS, [2] * CLIENTS, summed=True)
    for iteration, (client, numbers) in enumerate(history):
        rows = np.array(numbers, np.int64)
        table.store(client, rows, np.ones((len(rows), 2), np.float32), iteration)
    counts, rows, now = np.zeros((CLIENTS, 20), np.int64), ALL[::2].copy(), len(history)
    delays = table.delays(rows, now)
    longest = table.count_delays(rows, now, counts, own)
    assert longest == delays[delays < FOREVER].max(initial=0)
    for client, used in enumerate(delays.T):
        places = [0 if client == own else 1 if delay >= FOREVER else delay + 2 for delay in used]
        assert counts[client].tolist() == np.bincount(places, minlength=20).tolist()
