import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vafl.errors import BudgetExhausted, RunFolderError
from vafl.privacy.ledger import KINDS, Ledger, read_ledger


def rows(*numbers):
    return np.array(numbers, dtype=np.int64)


def test_charges_add_up_by_record_and_kind(tmp_path):
    ledger = Ledger(tmp_path / "own.ledger", 5, "set")
    assert ledger.charge(rows(0, 2), "batch", 0.5).all()
    assert ledger.charge(rows(2, 4), "refresh", 0.25).all()
    assert ledger.spent.tolist() == [0.5, 0, 0.75, 0, 0.25]
    assert ledger.counts[KINDS.index("batch")].tolist() == [1, 0, 1, 0, 0]
    assert ledger.counts[KINDS.index("refresh")].tolist() == [0, 0, 1, 0, 1]
    assert ledger.vectors == 4


def test_the_next_process_goes_on_with_it(tmp_path):
    path = tmp_path / "deep" / "own.ledger"
    first = Ledger(path, 5, "set")
    first.charge(rows(1), "batch", 1.0)
    first.close()
    second = Ledger(path, 5, "set")
    second.charge(rows(1), "batch", 1.0)
    assert read_ledger(path).spent.tolist() == [0, 2.0, 0, 0, 0]


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 4), min_size=1), st.booleans(), st.floats(0.01, 0.6))),
    st.floats(0.1, 2.0),
)
def test_no_history_of_charges_passes_the_limit(charges, limit):
    ledger, sent = Ledger(None, 5, "set"), np.zeros(5)
    for wanted, whole, cost in charges:
        chosen = rows(*sorted(wanted))
        charged = ledger.charge(chosen, "batch", cost, limit=limit, whole=whole)
        assert not whole or charged.all() or not charged.any()
        refused = chosen[~charged]
        if not whole:
            assert (ledger.spent[refused] + cost > limit**2).all()
        sent[chosen[charged]] += cost
    assert (sent <= limit**2 * (1 + 1e-9)).all()
    assert np.allclose(ledger.spent, sent)


def test_what_cannot_be_afforded_whole_is_refused_and_not_charged():
    ledger = Ledger(None, 3, "set")
    ledger.charge(rows(1), "batch", 0.9)
    with pytest.raises(
        BudgetExhausted, match=r"privacy.mu_max = 1 does not allow this release: it costs mu 0.5"
    ):
        ledger.require(rows(0, 1), "release", 0.25, 1.0)
    assert ledger.spent.tolist() == [0, 0.9, 0]


def test_the_first_use_in_training_is_noted_once():
    ledger = Ledger(None, 4, "set")
    ledger.charge(rows(0, 1), "refresh", 0.1)
    ledger.charge(rows(1, 2), "batch", 0.1, trains=True)
    ledger.charge(rows(1, 3), "batch", 0.1, trains=True)
    assert ledger.first_use.tolist() == [0, 4, 4, 6]


def test_two_processes_cannot_spend_one_budget(tmp_path):
    path = tmp_path / "own.ledger"
    held = Ledger(path, 5, "set")
    with pytest.raises(RunFolderError, match="in use by another process"):
        Ledger(path, 5, "set")
    held.close()
    Ledger(path, 5, "set")


@pytest.mark.parametrize(("records", "identity"), [(6, "set"), (5, "other")])
def test_a_ledger_of_other_records_is_refused(tmp_path, records, identity):
    path = tmp_path / "own.ledger"
    Ledger(path, 5, "set").close()
    with pytest.raises(RunFolderError, match="is for other records"):
        Ledger(path, records, identity)


@pytest.mark.parametrize("content", [b"", b"junk", b'{"format": "vafl ledger", "version": 9}', b"\0" * 9000])
def test_a_file_that_is_no_ledger_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "own.ledger"
    path.write_bytes(content)
    for use in (lambda: Ledger(path, 5, "set"), lambda: read_ledger(path)):
        with pytest.raises(RunFolderError, match="must be a privacy ledger"):
            use()
    assert path.read_bytes() == content


def test_a_cut_file_is_refused(tmp_path):
    path = tmp_path / "own.ledger"
    Ledger(path, 5, "set").close()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunFolderError, match="damaged"):
        Ledger(path, 5, "set")
    with pytest.raises(RunFolderError, match="damaged"):
        read_ledger(path)


def test_a_copy_reads_back(tmp_path):
    ledger = Ledger(None, 5, "set")
    ledger.charge(rows(3), "batch", 0.5)
    ledger.save_copy(tmp_path / "copies" / "own.ledger")
    copy = read_ledger(tmp_path / "copies" / "own.ledger")
    assert copy.spent.tolist() == ledger.spent.tolist()
    assert copy.vectors == 1


def test_killed_at_any_instant_it_never_shows_less_than_was_sent(tmp_path):
    command = [sys.executable, "-m", "tests.privacy.kill_ledger", str(tmp_path / "own.ledger"), "200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "200 kills" in done.stdout


def charged(path, times=3):
    ledger = Ledger(path, 5, "set")
    for _ in range(times):
        ledger.charge(rows(1, 3), "batch", 0.5, trains=True)
    ledger.close()
    return path.read_bytes()


@given(cut=st.integers(1, 31))
def test_an_entry_cut_short_paid_for_nothing_and_the_next_follows_the_last_whole_one(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "own.ledger"
    whole = charged(path)
    path.write_bytes(whole[:-cut])
    assert read_ledger(path).spent[1] == 1.0
    charged(path, 1)
    assert read_ledger(path).spent[1] == 1.5


def test_zeros_that_a_crashed_machine_left_at_the_end_are_no_entry(tmp_path):
    path = tmp_path / "own.ledger"
    path.write_bytes(charged(path) + bytes(4096))
    assert read_ledger(path).spent[1] == 1.5


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_before_the_last_entry_is_never_overlooked(tmp_path_factory, place, bit):
    path = tmp_path_factory.mktemp("flip") / "own.ledger"
    content = bytearray(charged(path))
    place %= len(content) - 32  # not in the last entry
    content[place] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(RunFolderError, match=r"damaged|must be a privacy ledger"):
        read_ledger(path)


def test_entries_are_replaced_by_their_balance(tmp_path, monkeypatch):
    monkeypatch.setattr("vafl.privacy.ledger._LONGEST", 1000)
    path, sizes = tmp_path / "own.ledger", []
    ledger = Ledger(path, 5, "set")
    for _ in range(200):
        ledger.charge(rows(1, 3), "batch", 0.5, trains=True)
        sizes.append(path.stat().st_size)
    assert max(sizes) < 1500
    with pytest.raises(RunFolderError, match="in use by another process"):
        Ledger(path, 5, "set")
    ledger.close()
    again = Ledger(path, 5, "set")
    assert (again.spent[1], again.vectors, again.first_use[3]) == (100.0, 400, 2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["own.ledger"]


def test_what_cannot_be_written_is_not_charged(tmp_path):
    ledger = Ledger(tmp_path / "own.ledger", 5, "set")
    ledger.close()
    ledger._file = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(RunFolderError, match="cannot be written, so nothing may be uploaded"):
        ledger.charge(rows(1), "batch", 0.5)
    assert ledger.spent[1] == 0
