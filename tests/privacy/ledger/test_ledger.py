import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.privacy.ledger.people import FIVE, opened
from tests.waiting import LIMIT
from vafl.errors import BudgetExhausted, LedgerError, RunFolderError
from vafl.privacy.ledger.accounts import KINDS
from vafl.privacy.ledger.ledger import Ledger, read_history, read_ledger
from vafl.privacy.settings import PrivacySettings


def rows(*numbers):
    return np.array(numbers, dtype=np.int64)


def of_person(ledger):
    """Return the figures by person, independent of the order of the accounts."""
    return dict(zip(ledger.ids.to_list(), ledger.spent.tolist(), strict=True))


def test_charges_add_up_by_record_and_kind(tmp_path):
    ledger, _ = opened(tmp_path / "own.ledger")
    assert ledger.charge(rows(0, 2), "batch", 0.5).all()
    assert ledger.charge(rows(2, 4), "refresh", 0.25).all()
    assert ledger.spent.tolist() == [0.5, 0, 0.75, 0, 0.25]
    assert ledger.counts[KINDS.index("batch")].tolist() == [1, 0, 1, 0, 0]
    assert ledger.counts[KINDS.index("refresh")].tolist() == [0, 0, 1, 0, 1]


def test_the_account_follows_the_person_into_the_next_alignment(tmp_path):
    path = tmp_path / "deep" / "own.ledger"
    ledger, accounts = opened(path)
    ledger.charge(accounts[rows(1, 3)], "batch", 1.0)
    ledger.close()
    ledger, accounts = opened(path, ("fay", "dan", None, "bob"), "next")
    assert ledger.spent[accounts[rows(0, 1, 3)]].tolist() == [0, 1, 1]
    assert ledger.charge(accounts, "batch", 1.0, limit=2**0.5).tolist() == [True, True, True, True]
    assert ledger.charge(accounts, "batch", 1.0, limit=2**0.5).tolist() == [True, False, True, False]
    assert of_person(read_ledger(path)) == {"ann": 0, "bob": 2, "cleo": 0, "dan": 2, "eve": 0, "fay": 2}


@pytest.mark.parametrize("longest", [0, 1 << 30])
def test_runs_that_differ_in_their_neighbours_add_up_to_what_each_would_count(tmp_path, monkeypatch, longest):
    """With `replace`, distances are twice as large, so mu^2 is four times as large for every run."""
    monkeypatch.setattr("vafl.privacy.ledger.ledger._LONGEST", longest)
    path, replaced = tmp_path / "own.ledger", PrivacySettings(neighbours="replace")
    ledger, _ = opened(path)
    ledger.charge(rows(0, 1), "batch", 1.0)
    ledger.close()
    ledger, _ = opened(path, settings=replaced)
    assert ledger.charge(rows(1, 2), "batch", 2.0, limit=5**0.5).tolist() == [False, True]
    assert ledger.charge(rows(1, 2), "batch", 2.0, limit=6**0.5).all()
    assert ledger.spent.tolist() == [4, 6, 4, 0, 0]
    ledger.close()
    assert read_ledger(path).spent.tolist() == [4, 6, 4, 0, 0]
    assert [share.spent for share in read_history(path, "bob")] == [1.0, 0.5]
    assert opened(path)[0].spent.tolist() == [1, 1.5, 1, 0, 0]
    ledger, _ = opened(None, settings=replaced)
    ledger.charge(rows(3), "batch", 2.0)
    ledger.save_copy(tmp_path / "copy.ledger")
    assert read_ledger(tmp_path / "copy.ledger").spent.tolist() == [0, 0, 0, 2, 0]


def test_rows_of_nobody_cost_nothing_and_are_never_refused():
    ledger, accounts = opened(None, ("ann", None, "bob", None))
    for cost in (1.0, np.inf, 1.0):
        assert ledger.charge(accounts, "batch", cost, carried=cost).all()
    ledger, accounts = opened(None, ("ann", None, "bob", None))
    for _ in range(3):
        charged = ledger.charge(accounts, "batch", 1.0, limit=1.0)
    assert charged.tolist() == [False, True, False, True]


@pytest.mark.parametrize("longest", [0, 1 << 30])
@given(
    runs=st.lists(
        st.tuples(
            st.permutations([*FIVE, None, None]).flatmap(
                lambda people: st.integers(1, 7).map(lambda count: people[:count])
            ),
            st.lists(st.tuples(st.sets(st.integers(0, 6), min_size=1), st.sampled_from([0.25, 0.5, 3.0]))),
            st.sampled_from(["first", "second"]),
        ),
        max_size=6,
    )
)
def test_through_any_alignments_everyone_has_spent_what_was_charged(tmp_path_factory, longest, runs):
    """Charges may be kept singly (a large _LONGEST) or as sums. Each run's share is known."""
    path = tmp_path_factory.mktemp("people") / "own.ledger"
    spent, shares = dict.fromkeys(FIVE, 0.0), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vafl.privacy.ledger.ledger._LONGEST", longest)
        patch.setattr("os.fsync", lambda file: None)  # this test is about sums, not about disks
        patch.setattr("os.fdatasync", lambda file: None)
        for people, uploads, run in runs:
            ledger, accounts = opened(path, people, run)
            for chosen, cost in uploads:
                sent = rows(*sorted(row for row in chosen if row < len(people)))
                charged = ledger.charge(accounts[sent], "batch", cost, limit=2.0)
                for row, paid in zip(sent, charged, strict=True):
                    person = people[row]
                    assert paid == (person is None or spent[person] + cost <= 4.0)
                    if paid and person is not None:
                        spent[person] += cost
                        shares[person, run] = shares.get((person, run), 0.0) + cost
            ledger.close()
    if runs:
        known = of_person(read_ledger(path))
        assert known == {person: spent[person] for person in known}
        assert all(person in known for person in FIVE if spent[person])
    for person in FIVE if runs else ():
        found = {}
        for share in read_history(path, person):
            found[share.spender.run] = found.get(share.spender.run, 0.0) + share.spent
        assert found == {run: cost for (own, run), cost in shares.items() if own == person}


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 4), min_size=1), st.booleans(), st.floats(0.01, 0.6))),
    st.floats(0.1, 2.0),
)
def test_no_history_of_charges_passes_the_limit(charges, limit):
    ledger, sent = Ledger.in_memory(5), np.zeros(5)
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


@pytest.mark.parametrize("twice", [(1, 1), (3, 1, 3)])
def test_a_record_named_twice_is_refused_for_it_would_be_charged_once(twice):
    ledger = Ledger.in_memory(5)
    with pytest.raises(ValueError, match="each record at most once"):
        ledger.charge(rows(*twice), "batch", 1.0)
    assert not ledger.spent.any()


def test_what_cannot_be_afforded_whole_is_refused_and_not_charged():
    ledger = Ledger.in_memory(3)
    ledger.charge(rows(1), "batch", 0.9)
    with pytest.raises(BudgetExhausted, match=r"VFL-5051.*1.*release.*0\.5"):
        ledger.require(rows(0, 1), "release", 0.25, 1.0)
    assert ledger.spent.tolist() == [0, 0.9, 0]


def test_what_others_uploads_carry_is_counted_from_the_first_use_at_the_price_of_each(tmp_path):
    """After a record was trained on, mu^2 is 1 for each vector of the first run, and 4 for each later one."""
    path = tmp_path / "own.ledger"
    ledger, accounts = opened(path)
    ledger.charge(accounts[rows(0, 1)], "refresh", 0.0, carried=1.0)
    ledger.charge(accounts[rows(1, 2)], "batch", 0.0, carried=1.0, trains=True)
    ledger.charge(accounts[rows(1, 3)], "batch", 0.0, carried=1.0, trains=True)
    assert ledger.accounts.total.tolist() == [0, 2, 2, 0, 0]
    ledger.close()
    ledger, accounts = opened(path, FIVE[::-1], "next")
    assert of_person(ledger)["bob"] == 2, "a limit sees what was carried before"
    ledger.charge(accounts, "prediction", 0.0, carried=4.0)
    for read in (ledger, read_ledger(path)):
        assert read.accounts.total.tolist() == [0, 22, 22, 20, 0]
    assert [share.spent for share in read_history(path, "bob")] == [2, 20]


def test_a_limit_counts_what_an_earlier_unbounded_run_has_spent(tmp_path):
    path = tmp_path / "own.ledger"
    ledger, accounts = opened(path)
    ledger.charge(accounts[rows(0)], "batch", np.inf, carried=np.inf, trains=True)
    ledger.charge(accounts[rows(1)], "batch", np.inf, carried=np.inf, trains=True)
    ledger.close()
    ledger, accounts = opened(path, run="next")
    assert ledger.charge(accounts, "batch", 1.0, limit=9.0).tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("longest", [0, 1 << 30])
def test_an_unbounded_run_hides_nothing_of_what_later_ones_spend(tmp_path, monkeypatch, longest):
    """First a run without a clip on Ann and Bob, then a bounded run that carries Cleo in Dan's vectors."""
    monkeypatch.setattr("vafl.privacy.ledger.ledger._LONGEST", longest)
    path = tmp_path / "own.ledger"
    for run, people, cost in (("first", ("ann", "bob"), np.inf), ("second", ("cleo", "dan"), 1.0)):
        ledger, accounts = opened(path, people, run)
        for row in (0, 1, 1, 1):
            ledger.charge(accounts[rows(row)], "batch", cost / 4, carried=cost, trains=True)
        ledger.close()
    ledger, accounts = opened(path, ("ann", "cleo"), "third")
    ledger.charge(accounts[rows(0)], "batch", 0.25)
    assert ledger.accounts.total.tolist() == [np.inf, np.inf, 3.25, 2.75]
    assert [share.spent for share in read_history(path, "cleo")] == [3.25]
    assert [share.spent for share in read_history(path, "ann")] == [np.inf, 0.25]


def test_two_processes_cannot_spend_one_budget(tmp_path):
    path = tmp_path / "own.ledger"
    held, _ = opened(path)
    with pytest.raises(RunFolderError, match="VFL-5063"):
        Ledger(path, "set")
    held.close()
    Ledger(path, "set")


def test_a_ledger_of_other_records_is_refused(tmp_path):
    path = tmp_path / "own.ledger"
    Ledger(path, "set").close()
    with pytest.raises(RunFolderError, match=r"VFL-5032.*set.*other"):
        Ledger(path, "other")


def test_a_folder_that_cannot_be_written_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="VFL-5031"):
        Ledger(tmp_path / "file" / "own.ledger", "set")


def test_a_copy_reads_back(tmp_path):
    ledger = Ledger.in_memory(5)
    ledger.charge(rows(3), "batch", 0.5)
    ledger.save_copy(tmp_path / "copies" / "own.ledger")
    copy = read_ledger(tmp_path / "copies" / "own.ledger")
    assert copy.spent.tolist() == ledger.spent.tolist()
    assert copy.counts.sum() == 1


def test_a_copy_cut_short_is_refused(tmp_path):
    path = tmp_path / "own.ledger"
    ledger = Ledger.in_memory(5)
    ledger.charge(rows(3), "batch", 0.5)
    ledger.save_copy(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(LedgerError):
        read_ledger(path)


def test_killed_at_any_instant_it_never_shows_less_than_was_sent(tmp_path):
    command = [sys.executable, "-m", "tests.privacy.ledger.kill_ledger", str(tmp_path / "own.ledger"), "200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * LIMIT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "200 kills" in done.stdout


def test_charges_are_replaced_by_their_sums(tmp_path, monkeypatch):
    monkeypatch.setattr("vafl.privacy.ledger.ledger._LONGEST", 1000)
    path, sizes = tmp_path / "own.ledger", []
    ledger, _ = opened(path)
    for _ in range(200):
        ledger.charge(rows(1, 3), "batch", 0.5, carried=0.25, trains=True)
        sizes.append(path.stat().st_size)
    assert max(sizes) < 2 * sizes[0] + 1000
    with pytest.raises(RunFolderError, match="VFL-5063"):
        Ledger(path, "set")
    ledger.close()
    again, _ = opened(path)
    assert again.spent[1] == 100.0
    assert again.accounts.total[1] == 100.0 + 0.5 * 199
    assert {entry.name for entry in tmp_path.iterdir()} == {"own.ledger", "own.ledger.head"}


def test_what_cannot_be_written_is_not_charged(tmp_path):
    ledger, _ = opened(tmp_path / "own.ledger")
    ledger._journal._file = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(RunFolderError, match="VFL-5034"):
        ledger.charge(rows(1), "batch", 0.5)
    assert ledger.spent[1] == 0


def test_what_does_not_reach_the_disk_itself_is_not_charged(tmp_path, monkeypatch):
    ledger, _ = opened(tmp_path / "own.ledger")
    monkeypatch.setattr("os.fdatasync", lambda file: os.close(-1))
    with pytest.raises(RunFolderError, match="VFL-5034"):
        ledger.charge(rows(1), "batch", 0.5)
    assert ledger.spent[1] == 0


def test_a_ledger_knows_its_marks_and_no_others(tmp_path):
    path = tmp_path / "own.ledger"
    ledger, _ = opened(path)
    marks = [ledger.mark() for _ in range(3)]
    assert {len(mark) for mark in marks} == {16}
    assert len(set(marks)) == 3
    ledger.close()
    ledger, _ = opened(path)
    assert all(ledger.knows(mark) for mark in marks)
    assert not ledger.knows(bytes(16))
    assert not ledger.knows(b"")
    ledger.close()


def test_a_mark_that_was_accepted_is_known_and_shown(tmp_path):
    path, mark = tmp_path / "own.ledger", bytes(range(16))
    ledger, _ = opened(path)
    ledger.accept(mark)
    assert ledger.knows(mark)
    ledger.close()
    ledger, _ = opened(path)
    assert ledger.knows(mark)
    assert len(ledger.accepted) == 1
    assert read_ledger(path).accepted == ledger.accepted
    ledger.close()


def test_the_last_marks_of_every_run_survive_when_charges_are_replaced_by_their_sums(tmp_path, monkeypatch):
    """A server that the client meets again after many runs with others shows the last mark it received."""
    path = tmp_path / "own.ledger"
    monkeypatch.setattr("os.fsync", lambda file: None)
    monkeypatch.setattr("os.fdatasync", lambda file: None)
    marks = {}
    for run in ("first", "second"):
        ledger, _ = opened(path, run=run)
        ledger.accept(run.encode().ljust(16))
        for number in range(300):
            ledger.charge(rows(1, 3), "batch", 0.5)
            marks[run, number] = ledger.mark()
        ledger.close()
    long, spent = path.stat().st_size, read_ledger(path).spent.tolist()
    monkeypatch.setattr("vafl.privacy.ledger.ledger._LONGEST", 0)
    ledger, _ = opened(path, run="second")
    ledger.charge(rows(0), "batch", 0.5)
    ledger.charge(rows(0), "batch", 0.5)
    ledger.close()
    assert path.stat().st_size < long / 2
    ledger, _ = opened(path, run="second")
    assert ledger.spent.tolist() == [1.0, *spent[1:]]
    assert {key for key, mark in marks.items() if ledger.knows(mark)} >= {
        (run, number) for run in ("first", "second") for number in range(44, 300)
    }
    assert not ledger.knows(marks["first", 0])
    assert len(ledger.accepted) == 2
    assert ledger.knows(b"first".ljust(16))
    ledger.close()
