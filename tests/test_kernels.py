"""Both versions of each loop mean the same; the compiled one cannot be made to leave its arrays."""

import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st

from vafl import kernels
from vafl.config import from_document
from vafl.kernels import portable
from vafl.protocol.table import record_type
from vafl.run.assembly import build

LARGEST = 2.0**20
compiled = pytest.mark.skipif(not kernels.NATIVE, reason="no compiler when vafl was installed")
VERSIONS = [portable]
if kernels.NATIVE:
    from vafl.kernels import _native, native

    VERSIONS.append(native)


def test_they_are_compiled_wherever_they_can_be():
    header = Path(sysconfig.get_path("include")) / "Python.h"
    assert kernels.NATIVE or not (shutil.which("cc") and header.exists())


@pytest.mark.parametrize("loops", VERSIONS)
@pytest.mark.parametrize("shape", [(50,), (50, 10), (50, 3, 4, 4), (50, 0), (50, 300)])
@pytest.mark.parametrize("kind", [np.float32, np.int64, np.int32, np.uint8])
def test_gathered_rows(loops, shape, kind):
    random = np.random.default_rng(0)
    matrix = (100 * random.random(shape)).astype(kind)
    for rows in (random.integers(50, size=80), np.empty(0, np.int64)):
        found = loops.gather(matrix, rows)
        assert found.dtype == kind
        assert np.array_equal(found, matrix[rows])
    chosen = np.array([3, 1])
    for apart in (matrix[::2], matrix[::-1], np.asfortranarray(matrix), np.stack([matrix, matrix], 1)[:, 1]):
        assert np.array_equal(loops.gather(apart, chosen), apart[chosen])
    if matrix.ndim == 2:
        assert np.array_equal(loops.gather(matrix[:, 2:7], chosen), matrix[chosen, 2:7])
        assert np.array_equal(loops.gather(matrix[:, ::2], chosen), matrix[chosen, ::2])


@pytest.mark.parametrize("loops", VERSIONS)
def test_rows_that_lie_apart_are_not_copied_to_gather_a_few(loops):
    """Ten terabytes of addresses over one row of memory: nobody could go through all of it."""
    one = np.ones((1, 3), np.float32)
    many = np.lib.stride_tricks.as_strided(one, (10**12, 3), (0, 4))
    rows = np.array([0, 10**12 - 1])
    assert loops.gather(many, rows).tolist() == [[1, 1, 1]] * 2
    sums = np.lib.stride_tricks.as_strided(one.astype(np.float64), (10**12, 3), (0, 8))
    assert loops.gather_sums(sums, rows).tolist() == [[1, 1, 1]] * 2


@pytest.mark.parametrize("loops", VERSIONS)
def test_gathered_sums_are_rounded(loops):
    sums = (np.random.default_rng(0).random((30, 9)) * 1e9)[:, 1:8]
    rows = np.array([29, 0, 5, 5])
    found = loops.gather_sums(sums, rows)
    assert found.dtype == np.float32
    assert np.array_equal(found, sums[rows].astype(np.float32))


@pytest.mark.parametrize("loops", VERSIONS)
@pytest.mark.parametrize("own", [-1, 0, 1])
def test_counted_delays(loops, own):
    delays = np.array([[0, 3], [3, 100], [3, 102], [99, 0]], np.int32)  # forever is 100
    stored_at, rows = np.full((9, 4), 99, np.int32)[:, 1:3], np.array([7, 0, 2, 5])
    stored_at[rows] = 8 - delays
    counts = np.zeros((2, 102), np.int64)
    assert loops.count_delays(stored_at, rows, counts, 8, own, 100) == 99
    expected = np.zeros_like(counts)
    for client, places in enumerate([(2, 5, 5, 101), (5, 1, 1, 2)]):
        np.add.at(expected[client], [0] * 4 if client == own else list(places), 1)
    assert np.array_equal(counts, expected)
    before = counts.copy()
    assert (
        loops.count_delays(np.array([[9, 9], [-90, 9]], np.int32), np.arange(2), counts, 10, -1, 200) == 100
    )
    assert np.array_equal(counts, before)  # there is no bin for 100
    assert loops.count_delays(stored_at, rows[:0], counts, 8, own, 100) == 0
    assert np.array_equal(counts, before)


@pytest.mark.parametrize("loops", VERSIONS)
@pytest.mark.parametrize("below", [-1, -2, -3, -(2**31)])
def test_a_delay_below_zero_is_counted_nowhere(loops, below):
    counts = np.zeros((2, 50), np.int64)
    with pytest.raises(ValueError, match="must be 0 or more"):
        loops.count_delays(-np.array([[3, 4], [below, 1]], np.int32), np.arange(2), counts, 0, -1, 100)
    assert not counts.any()


@pytest.mark.parametrize("loops", VERSIONS)
@pytest.mark.parametrize("shape", [(1, 1), (10, 3), (0, 3), (3, 0), (500, 40)])
def test_a_row_is_added_to_every_row(loops, shape):
    random = np.random.default_rng(0)
    matrix, row = random.standard_normal(shape, np.float32), random.standard_normal(shape[1], np.float32)
    expected, before = matrix + row, row.copy()
    assert loops.add_row(matrix, row) is None
    assert np.array_equal(matrix, expected)
    assert np.array_equal(row, before)


@compiled
@given(st.integers(0, 40), st.integers(0, 70), st.integers(0, 2**32))
def test_both_versions_add_the_same_row(rows, width, seed):
    random = np.random.default_rng(seed)
    one, row = random.standard_normal((rows, width), np.float32), random.standard_normal(width, np.float32)
    other = one.copy()
    portable.add_row(one, row)
    native.add_row(other, row)
    assert np.array_equal(one, other)


@pytest.mark.parametrize("loops", VERSIONS)
def test_summed_rows(loops):
    matrix = np.arange(30, dtype=np.float32).reshape(10, 3)
    assert loops.sum_rows(matrix).tolist() == [135.0, 145.0, 155.0]
    assert loops.sum_rows(np.asfortranarray(matrix)).tolist() == [135.0, 145.0, 155.0]
    assert loops.sum_rows(matrix[:0]).tolist() == [0.0, 0.0, 0.0]
    many = np.full((1_000_000, 2), 1e-7, np.float32)  # in float32, each that comes would be cut short
    assert loops.sum_rows(many).tolist() == pytest.approx([0.1, 0.1], rel=1e-6)
    assert loops.sum_rows(np.full((2, 40), 3e38, np.float32)).tolist() == [np.inf] * 40


def a_table(width=3, rows=20):
    """Cells of two clients, when they were stored and their sums, in records as a table has them."""
    records = np.zeros(rows, record_type([width] * 2, summed=True))
    records["cells"] = np.random.default_rng(1).random((rows, 2, width), np.float32)
    records["sums"] = records["cells"].sum(1, dtype=np.float64)
    held = records["cells"].reshape(rows, 2 * width)
    assert np.shares_memory(held, records)
    return held, records["stored_at"], records["sums"]


@pytest.mark.parametrize("loops", VERSIONS)
def test_stored_rows_are_one_clients_own(loops):
    held, stored_at, _ = a_table()
    before, rows = held.copy(), np.array([7, 0, 19])
    fresh = np.full((3, 3), 5, np.float32)
    assert loops.store(held[:, 3:], stored_at[:, 1], rows, fresh, 9) is True
    before[rows, 3:] = 5
    assert np.array_equal(held, before)
    assert np.flatnonzero(stored_at[:, 1] == 9).tolist() == [0, 7, 19]
    assert not stored_at[:, 0].any()


@pytest.mark.parametrize("loops", VERSIONS)
@pytest.mark.parametrize("huge", [0.0, 2e6, -2e6])
def test_sums_follow_what_is_stored_and_what_is_huge_is_told(loops, huge):
    held, stored_at, sums = a_table()
    rows, fresh = np.array([3, 4]), np.array([[1, 2, 3], [4, 5, 6 + huge]], np.float32)
    expected = sums.copy()
    expected[rows] += fresh - held[rows, :3].astype(np.float64)
    arguments = (held[:, :3], stored_at[:, 0], rows)
    assert loops.store_summed(*arguments, fresh, sums, 2, LARGEST) is not bool(huge)
    assert np.allclose(sums, expected, rtol=1e-15)
    assert loops.store_summed(*arguments, np.zeros_like(fresh), sums, 3, LARGEST) is not bool(huge)


@compiled
@given(st.integers(1, 40), st.integers(1, 70), st.integers(0, 2**32))
def test_both_versions_store_the_same(rows, width, seed):
    random = np.random.default_rng(seed)
    results = []
    chosen = random.permutation(rows)[: random.integers(rows + 1)]
    fresh = random.normal(size=(len(chosen), width)).astype(np.float32)
    for loops in (portable, native):
        held, stored_at, sums = a_table(width, rows)
        exact = loops.store_summed(held[:, width:], stored_at[:, 1], chosen, fresh, sums, 7, LARGEST)
        results.append((held, stored_at, sums, exact))
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("loops", VERSIONS)
@pytest.mark.parametrize("classes", [1, 2, 10, 100])
@pytest.mark.parametrize("scale", [0.1, 10.0, 1000.0])
def test_softmax_is_torchs(loops, classes, scale):
    random = np.random.default_rng(2)
    scores = (scale * random.normal(size=(500, classes))).astype(np.float32)
    labels, weights = random.integers(classes, size=500), random.random(500, np.float32)
    exact = torch.from_numpy(scores).double().requires_grad_()
    each = F.cross_entropy(exact, torch.from_numpy(labels), reduction="none")
    weighted = each @ torch.from_numpy(weights).double()
    (slopes,) = torch.autograd.grad(weighted, exact)
    before = scores.copy()
    loss, found = loops.softmax(scores, labels, weights)
    assert loss == pytest.approx(weighted.item(), rel=1e-6, abs=1e-5)
    assert np.allclose(found, slopes.numpy(), rtol=1e-5, atol=2e-7)
    assert np.array_equal(scores, before)


@pytest.mark.parametrize("loops", VERSIONS)
@pytest.mark.parametrize("classes", [3, 255, 300])
def test_labels_are_taken_as_they_are_kept(loops, classes):
    random = np.random.default_rng(3)
    scores, weights = random.standard_normal((600, classes), np.float32), random.random(600, np.float32)
    labels = random.integers(classes, size=600)
    labels[-1] = classes - 1
    expected, slopes = loops.softmax(scores, labels, weights)
    kinds = [np.uint8] * (classes < 256) + [np.uint16, np.uint32, np.uint64, np.int16, np.int32]
    for kept in [labels.astype(kind) for kind in kinds] + [np.repeat(labels, 2)[::2]]:
        loss, found = loops.softmax(scores, kept, weights)
        assert loss == expected
        assert np.array_equal(found, slopes)


@pytest.mark.parametrize("loops", VERSIONS)
def test_scores_that_lie_apart_are_scores(loops):
    random = np.random.default_rng(4)
    scores, weights = random.standard_normal((8, 6), np.float32), np.ones(8, np.float32)
    labels = np.zeros(8, np.int64)
    expected, slopes = loops.softmax(scores[:, :3].copy(), labels, weights)
    for apart in (scores[:, :3], np.asfortranarray(scores[:, :3])):
        loss, found = loops.softmax(apart, labels, weights)
        assert loss == pytest.approx(expected)
        assert np.allclose(found, slopes)


@pytest.mark.parametrize("loops", VERSIONS)
def test_a_share_is_within_a_few_units_of_the_last_place(loops):
    below = np.linspace(-86.9, 0, 100_001, dtype=np.float32)
    scores = np.stack([np.zeros_like(below), below], 1)
    _, slopes = loops.softmax(scores, np.zeros(len(below), np.int64), np.ones(len(below), np.float32))
    exact = np.exp(below.astype(np.float64))
    assert np.abs(slopes[:, 1] / (exact / (1 + exact)) - 1).max() < 4e-7


@pytest.mark.parametrize("loops", VERSIONS)
@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_no_number_makes_no_loss(loops, broken, place):
    scores = np.zeros((4, 3), np.float32)
    scores[2, place] = broken
    assert not np.isfinite(loops.softmax(scores, np.zeros(4, np.int64), np.ones(4, np.float32))[0])


@pytest.mark.parametrize("loops", VERSIONS)
def test_minus_infinity_is_a_share_of_nothing_and_no_loss_only_at_the_label(loops):
    scores, weights = np.array([[0, 0, -np.inf]], np.float32), np.ones(1, np.float32)
    assert loops.softmax(scores, np.array([2]), weights)[0] == np.inf
    loss, slopes = loops.softmax(scores, np.array([0]), weights)
    assert loss == pytest.approx(np.log(2))
    assert slopes.tolist() == [[-0.5, 0.5, 0.0]]


@compiled
@pytest.mark.parametrize("row", [20, -1, 2**62, -(2**62)])
def test_a_row_that_is_not_there_changes_nothing(row):
    held, stored_at, sums = a_table()
    before = held.copy(), stored_at.copy(), sums.copy()
    rows, fresh = np.array([1, row]), np.ones((2, 3), np.float32)
    with pytest.raises(IndexError, match="below 20"):
        native.store(held[:, :3], stored_at[:, 0], rows, fresh, 1)
    with pytest.raises(IndexError, match="below 20"):
        native.store_summed(held[:, :3], stored_at[:, 0], rows, fresh, sums, 1, LARGEST)
    with pytest.raises(IndexError, match="below 20"):
        native.gather(held, rows)
    with pytest.raises(IndexError, match="below 20"):
        native.gather_sums(sums, rows)
    counts = np.zeros((2, 50), np.int64)
    with pytest.raises(IndexError, match="below 20"):
        native.count_delays(stored_at, rows, counts, 1, -1, 100)
    assert not counts.any()
    with pytest.raises(IndexError, match="below 3"):
        native.softmax(fresh, rows, np.ones(2, np.float32))
    for kind in (np.uint8, np.uint16, np.uint32):
        with pytest.raises(IndexError, match="below 3"):
            native.softmax(fresh, np.array([1, 3], kind), np.ones(2, np.float32))
    with pytest.raises(IndexError, match="below 3"):
        native.softmax(fresh, np.array([1, -1], np.int8), np.ones(2, np.float32))
    assert all(map(np.array_equal, (held, stored_at, sums), before))


@compiled
def test_what_does_not_fit_is_refused():
    held, stored_at, sums = a_table()
    cells, at, rows, fresh = held[:, :3], stored_at[:, 0], np.array([1, 2]), np.ones((2, 3), np.float32)
    misplaced = np.frombuffer(bytes(25), np.uint8)[1:].view(np.float32).reshape(2, 3)
    for wrong in (
        (cells, at, rows, fresh[:1], 1),
        (cells, at, rows, fresh[:, :2], 1),
        (cells, at[:5], rows, fresh, 1),
        (cells, at, rows.astype(np.int32), fresh, 1),
        (cells, at, np.arange(4)[::2], fresh, 1),
        (cells, at, rows, fresh.astype(np.float64), 1),
        (cells, at, rows, fresh.T.copy().T, 1),
        (cells, at, rows, misplaced, 1),
        (cells, at, rows, fresh.ravel(), 1),
        (cells, at, rows, fresh, 2**31),
        (cells, at, rows, fresh, "1"),
        (cells, at, rows, fresh),
        (cells, at, rows, fresh, 1, 2),
        (None, at, rows, fresh, 1),
        (held.T[:3].T[:, ::2], at, rows, fresh[:, :2].copy(), 1),
    ):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            native.store(*wrong)
    held.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        native.store(held[:, :3], at, rows, fresh, 1)
    with pytest.raises(ValueError, match="shapes"):
        native.store_summed(np.ones((20, 3), np.float32), at, rows, fresh, sums[:19], 1, LARGEST)
    with pytest.raises(ValueError, match="shapes"):
        _native.gather(held, rows, np.empty((2, 5), np.float32))
    with pytest.raises(ValueError, match="shapes"):
        _native.gather(np.float32(1), rows, np.empty(2, np.float32))
    with pytest.raises(ValueError, match="shapes"):
        _native.gather(held[:, ::2], rows, np.empty((2, 3), np.float32))
    with pytest.raises(ValueError, match="shapes"):
        _native.gather(np.ones((4, 3, 2)).swapaxes(1, 2), rows, np.empty((2, 2, 3)))
    with pytest.raises(TypeError, match="must have 2 axes"):
        native.gather_sums(sums[:, ::2], rows)
    for counts in (np.zeros((3, 9), np.int64), np.zeros((2, 1), np.int64)):
        with pytest.raises(ValueError, match="shapes"):
            native.count_delays(stored_at, rows, counts, 1, -1, 9)
    counts = np.zeros((2, 9), np.int64)
    for wrong in (
        (stored_at, rows, counts, 2**31, -1, 9),
        (stored_at, rows, counts, 1, 2**70, 9),
        (stored_at, rows, counts, 1, -1, 2**31),
        (stored_at, rows, counts, 1, -1, "9"),
        (stored_at, rows, counts, 1, -1),
        (stored_at, rows.astype(np.int32), counts, 1, -1, 9),
        (stored_at, rows, counts.astype(np.int32), 1, -1, 9),
        (stored_at, rows, counts[:, ::2], 1, -1, 9),
        (stored_at.astype(np.int64), rows, counts, 1, -1, 9),
        (np.zeros((20, 4), np.int32)[:, ::2], rows, counts, 1, -1, 9),
    ):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            native.count_delays(*wrong)
    assert not counts.any()
    with pytest.raises(ValueError, match="shapes"):
        native.softmax(fresh, np.array([0]), np.ones(2, np.float32))
    with pytest.raises(ValueError, match="shapes"):
        _native.softmax(fresh, np.array([0, 1]), np.ones(2, np.float32), np.empty((2, 2), np.float32))
    for labels in (np.zeros(2), np.zeros(2, np.int8), np.zeros(4, np.uint8)[::2]):
        with pytest.raises((TypeError, ValueError)):
            _native.softmax(fresh, labels, np.ones(2, np.float32), np.empty((2, 3), np.float32))
    with pytest.raises(ValueError, match="shapes"):
        _native.sum_rows(fresh, np.empty(2, np.float32))
    assert not stored_at.any()


@compiled
def test_a_row_that_does_not_fit_is_added_to_nothing():
    matrix, row = np.ones((2, 3), np.float32), np.ones(3, np.float32)
    misplaced = np.frombuffer(bytearray(25), np.uint8)[1:].view(np.float32)
    for wrong in (
        (matrix, row[:2]),
        (matrix, row[:1]),
        (matrix, np.ones(4, np.float32)),
        (matrix, np.ones(6, np.float32)[::2]),
        (matrix, row.astype(np.float64)),
        (matrix, row[None]),
        (matrix, matrix),
        (matrix, misplaced[:3]),
        (matrix, np.float32(1)),
        (matrix, None),
        (matrix,),
        (matrix, row, 1),
        (row, row),
        (matrix.astype(np.float64), row),
        (matrix[:, :2], row[:2]),
        (matrix.T, row[:2]),
        (misplaced.reshape(2, 3), row),
    ):
        with pytest.raises((TypeError, ValueError)):
            native.add_row(*wrong)
    matrix.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        native.add_row(matrix, row)
    assert (matrix == 1).all()
    assert not misplaced.any()


@compiled
def test_an_index_that_turns_bad_while_numbers_are_read_is_found():
    held, stored_at, sums = a_table()
    rows, fresh = np.array([1, 2]), np.ones((2, 3), np.float32)

    class Iteration:
        def __index__(self):
            rows[1] = 20
            return 1

    for use in (
        lambda: native.store(held[:, :3], stored_at[:, 0], rows, fresh, Iteration()),
        lambda: native.store_summed(held[:, :3], stored_at[:, 0], rows, fresh, sums, Iteration(), LARGEST),
        lambda: native.count_delays(stored_at, rows, np.zeros((2, 9), np.int64), Iteration(), -1, 9),
    ):
        rows[1] = 2
        with pytest.raises(IndexError, match="below 20"):
            use()
    assert not stored_at.any()


@compiled
def test_objects_which_python_counts_are_not_copied_as_bytes():
    with pytest.raises(TypeError, match="must hold no objects"):
        native.gather(np.array([[object()]]), np.array([0]))


@compiled
def test_a_run_by_numpy_ends_where_one_by_compiled_loops_does(monkeypatch):
    def trained():
        run = build(from_document({"stop": {"updates": 60}}))
        while run.runtime.updates < 60:
            run.runtime.advance()
        return [p.detach().clone() for model in (*run.models, run.head) for p in model.parameters()]

    by_loops = trained()
    for name in kernels.__all__[1:]:
        monkeypatch.setattr(kernels, name, getattr(portable, name))
    for one, other in zip(by_loops, trained(), strict=True):
        torch.testing.assert_close(one, other)
