"""A ledger on disk that was truncated, edited, rolled back, torn by a crash, or read while it is written."""

import os
import shutil
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.privacy.ledger.crashes import Recorder
from tests.privacy.ledger.people import FIVE, opened
from vafl.errors import LedgerError, RunFolderError
from vafl.privacy.ledger.accounts import KINDS
from vafl.privacy.ledger.ledger import Ledger, read_ledger
from vafl.privacy.settings import PrivacySettings

FROZEN = PrivacySettings(mode="frozen", clip=1.0, noise=2.0, neighbours="zero_out", mu_max="unlimited")
BOB, DAN, EVE = 1, 3, 4
TORN = KINDS.index("torn")


def charge(path, times, **how):
    """Charge bob and dan in a run; return what the ledger shows then."""
    ledger, _ = opened(path, settings=FROZEN, **how)
    for _ in range(times):
        ledger.charge(np.array([BOB, DAN]), "batch", 0.25)
    ledger.close()
    return ledger.spent.tolist()


def head_of(path):
    return path.with_name(f"{path.name}.head")


def uses(path):
    return (lambda: Ledger(path, "set"), lambda: read_ledger(path))


def assert_refused(path, error=LedgerError):
    """Check that every use refuses the ledger and leaves the files unchanged."""
    before = {entry: entry.read_bytes() for entry in path.parent.iterdir()}
    for use in uses(path):
        with pytest.raises(error):
            use()
    assert {entry: entry.read_bytes() for entry in path.parent.iterdir()} == before


@pytest.fixture
def path(tmp_path):
    return tmp_path / "own" / "own.ledger"


def test_a_ledger_cut_at_any_byte_is_refused(path):
    charge(path, 3)
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for size in range(start, len(whole)):
        path.write_bytes(whole[:size])
        for use in uses(path):
            with pytest.raises(
                LedgerError, match=rf"seals 5 entries in {len(whole):,} bytes.*Found {size:,}"
            ):
                use()
    path.write_bytes(whole[: start - 1])
    assert_refused(path, RunFolderError)
    path.write_bytes(whole)
    assert charge(path, 0)[BOB] == 0.75


def test_a_flipped_bit_in_any_byte_of_a_ledger_is_refused(path):
    charge(path, 3)
    whole = path.read_bytes()
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        for use in uses(path):
            with pytest.raises(RunFolderError):
                use()
    path.write_bytes(whole)
    assert charge(path, 0)[BOB] == 0.75


@given(place=st.integers(0, 200), page=st.integers(0, 2), bit=st.integers(0, 7))
def test_a_flipped_bit_in_a_head_hides_no_charge(tmp_path_factory, place, page, bit):
    path = tmp_path_factory.mktemp("flip") / "own.ledger"
    charge(path, 3)
    content = bytearray(head_of(path).read_bytes())
    content[4096 * page + place] ^= 1 << bit
    head_of(path).write_bytes(content)
    for use in uses(path):
        try:
            ledger = use()
        except LedgerError:
            assert page == 0, "one seal is left"
        else:
            assert ledger.spent.tolist() == [0, 0.75, 0, 0.75, 0]
            ledger.close()


@pytest.mark.parametrize("squeezed", [False, True])
def test_an_older_copy_of_a_ledger_is_refused(path, tmp_path, monkeypatch, squeezed):
    charge(path, 3)
    shutil.copy(path, tmp_path / "older")
    if squeezed:
        monkeypatch.setattr("vafl.privacy.ledger.ledger._LONGEST", 0)
    charge(path, 3)
    newer = path.read_bytes()
    shutil.copy(tmp_path / "older", path)
    assert_refused(path)
    path.write_bytes(newer)
    assert charge(path, 0)[BOB] == 1.5


def test_an_older_copy_of_a_head_hides_no_charge(path, tmp_path):
    """It seals fewer entries, but the later ones continue its chain."""
    charge(path, 3)
    shutil.copy(head_of(path), tmp_path / "older")
    charge(path, 3)
    shutil.copy(tmp_path / "older", head_of(path))
    assert charge(path, 1)[BOB] == 1.75


def test_entries_of_another_ledger_are_refused(path):
    """Without the key, entries of other ledgers are the only material for a forgery."""
    charge(path, 3)
    other = path.with_name("other.ledger")
    charge(other, 3)
    own = path.read_bytes()
    path.write_bytes(other.read_bytes())
    assert_refused(path)
    start, foreign = own.index(b"\n") + 1, other.read_bytes()
    path.write_bytes(own[:start] + foreign[foreign.index(b"\n") + 1 :])
    assert_refused(path)


@pytest.mark.parametrize("missing", ["own.ledger", "own.ledger.head"])
def test_one_of_the_two_files_alone_is_refused(path, missing):
    charge(path, 1)
    (path.parent / missing).unlink()
    assert_refused(path)
    assert not (path.parent / missing).exists()


def test_both_are_for_their_owner_only(path):
    charge(path, 1)
    assert {entry.name: oct(entry.stat().st_mode)[-3:] for entry in path.parent.iterdir()} == {
        "own.ledger": "600",
        "own.ledger.head": "600",
    }


def next_entry(path):
    """Return the bytes that one more charge appends."""
    size, head = path.stat().st_size, head_of(path).read_bytes()
    charge(path, 1)
    entry = path.read_bytes()[size:]
    path.write_bytes(path.read_bytes()[:size])
    head_of(path).write_bytes(head)
    return entry


def test_an_entry_that_was_not_sealed_counts_if_it_is_whole(path):
    charge(path, 3)
    with path.open("ab") as file:
        file.write(next_entry(path))
    assert read_ledger(path).spent.tolist() == [0, 1, 0, 1, 0]
    assert charge(path, 1) == [0, 1.25, 0, 1.25, 0]


def test_an_entry_that_was_not_sealed_is_on_disk_before_its_seal(path, monkeypatch):
    """The process that wrote it may have been killed before its own sync."""
    charge(path, 3)
    with path.open("ab") as file:
        file.write(next_entry(path))
    synced = []
    monkeypatch.setattr("os.fdatasync", lambda file: synced.append(os.fstat(file).st_ino))
    Ledger(path, "set").close()
    assert synced == [path.stat().st_ino, head_of(path).stat().st_ino]


@pytest.mark.parametrize("how", ["short", "zeros", "flipped"])
def test_an_entry_that_was_torn_is_charged_to_everyone(path, caplog, how):
    charge(path, 3)
    entry = next_entry(path)
    torn = {"short": entry[:-1], "zeros": bytes(4096), "flipped": entry[:-1] + bytes([entry[-1] ^ 1])}[how]
    with path.open("ab") as file:
        file.write(torn)
    assert read_ledger(path).spent.tolist() == [0, 0.75, 0, 0.75, 0], "it may be about to be written"
    ledger = Ledger(path, "set")
    assert ledger.spent.tolist() == [0.25, 1, 0.25, 1, 0.25]
    assert ledger.counts[TORN].tolist() == [1] * 5
    assert "mu^2 0.25 is charged to each of its 5 accounts" in caplog.text
    ledger.close()
    assert charge(path, 1) == [0.25, 1.25, 0.25, 1.25, 0.25], "once"
    assert read_ledger(path).spent.tolist() == [0.25, 1.25, 0.25, 1.25, 0.25]


def test_a_torn_entry_costs_what_the_dearest_upload_of_the_run_would(path):
    """For embed_only, every record may have been trained on, and all later uploads carry it."""
    cases = {
        "dp_train": {
            "clip": 1.0,
            "noise": 2.0,
            "gradient_clip": 1.0,
            "gradient_noise": 1.0,
            "mu_max": "unlimited",
        },
        "none": {},
        "embed_only": {"clip": 1.0, "noise": 2.0},
    }
    found = {}
    for mode, chosen in cases.items():
        own = path.with_name(f"{mode}.ledger")
        settings = PrivacySettings(mode=mode, neighbours="zero_out", **chosen)
        ledger, _ = opened(own, settings=settings)
        ledger.close()
        with own.open("ab") as file:
            file.write(b"torn")
        ledger, _ = opened(own, settings=settings)
        ledger.charge(np.array([EVE]), "batch", settings.upload_cost, carried=settings.carried_cost)
        found[mode] = ledger.accounts.total.tolist()
        ledger.close()
    assert found["dp_train"] == [1.25] * 4 + [1.5]
    assert found["none"] == [np.inf] * 5
    assert found["embed_only"] == [1.25] * 4 + [1.5]


def test_before_the_first_run_a_torn_entry_can_have_cost_nothing(path):
    Ledger(path, "set").close()
    with path.open("ab") as file:
        file.write(b"torn")
    assert charge(path, 1) == [0, 0.25, 0, 0.25, 0]
    assert read_ledger(path).spent.tolist() == [0, 0.25, 0, 0.25, 0]


@pytest.mark.parametrize("longest", [1 << 30, 100], ids=["appended", "squeezed"])
def test_a_crash_at_any_instant_leaves_a_ledger_that_shows_what_was_sent(tmp_path, monkeypatch, longest):
    """This includes a power cut: bytes that were not synced are present, missing, or partly present."""
    monkeypatch.setattr("vafl.privacy.ledger.ledger._LONGEST", longest)
    folder, sent = tmp_path / "own", [0.0]
    folder.mkdir()
    with monkeypatch.context() as patch:
        recorder = Recorder(folder, patch, lambda: sent[0])
        ledger, _ = opened(folder / "own.ledger", settings=FROZEN)
        for _ in range(6):
            ledger.charge(np.array([BOB, DAN]), "batch", 0.25)
            sent[0] += 0.25
        ledger.close()
    monkeypatch.setattr("os.fsync", lambda file: None)  # this test is about order, not about disks
    monkeypatch.setattr("os.fdatasync", lambda file: None)
    crashes = list(recorder.crashes())
    assert len(crashes) > 100
    torn = 0
    for number, left in enumerate(crashes):
        copy = tmp_path / str(number)
        left.restore(copy)
        ledger, _ = opened(copy / "own.ledger", settings=FROZEN)
        unknown = ledger.counts[TORN].max() * 0.25
        assert ledger.spent[EVE] == unknown <= 0.25
        assert left.noted <= ledger.spent[BOB] <= left.noted + 0.25
        torn += unknown > 0
        ledger.charge(np.array([BOB]), "batch", 0.25)
        ledger.close()
        assert read_ledger(copy / "own.ledger").spent[BOB] == ledger.spent[BOB]
        assert {entry.name for entry in copy.iterdir() if entry.suffix != ".part"} == {
            "own.ledger",
            "own.ledger.head",
        }
    assert torn > 20


def test_a_crash_while_a_torn_entry_is_charged_forgets_nothing(tmp_path, monkeypatch):
    folder = tmp_path / "own"
    path = folder / "own.ledger"
    charge(path, 3)
    with path.open("ab") as file:
        file.write(bytes(500))
    with monkeypatch.context() as patch:
        recorder = Recorder(folder, patch, lambda: None)
        Ledger(path, "set").close()
    for number, left in enumerate(recorder.crashes()):
        left.restore(tmp_path / str(number))
        ledger = Ledger(tmp_path / str(number) / "own.ledger", "set")
        assert ledger.spent[BOB] >= 1.0
        assert ledger.spent[EVE] in (0.25, 0.5)
        ledger.close()


def test_a_reader_sees_all_that_was_charged_while_charges_are_appended_and_replaced(path, monkeypatch):
    monkeypatch.setattr("vafl.privacy.ledger.ledger._LONGEST", 1000)
    ledger, _ = opened(path, settings=FROZEN)
    sent, over, failed = [0], threading.Event(), []

    def write():
        try:
            while not over.is_set():
                ledger.charge(np.array([BOB, DAN]), "batch", 0.25)
                sent[0] += 1
        except BaseException as error:
            failed.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        last = 0
        while last < 300 and not failed:
            known = sent[0]
            last = int(read_ledger(path).counts[0][BOB])
            assert known <= last
    finally:
        over.set()
        writer.join()
    assert not failed
    assert last <= sent[0] + 1
    ledger.close()


def test_an_entry_that_fits_on_the_disk_in_part_is_taken_back(path, monkeypatch):
    """Otherwise the next process would charge everyone for it."""
    ledger, _ = opened(path, settings=FROZEN)
    monkeypatch.setattr("os.pwritev", lambda file, parts, place: 3)
    with pytest.raises(RunFolderError, match="VFL-5034"):
        ledger.charge(np.array([BOB]), "batch", 0.25)
    monkeypatch.undo()
    with pytest.raises(RunFolderError, match="VFL-5033"):
        ledger.charge(np.array([BOB]), "batch", 0.25)
    assert charge(path, 0) == [0.0] * len(FIVE)


@pytest.mark.parametrize(
    "content", [b"", b"junk", b"\0" * 9000, b"[]\n", b'{"format": "vafl run"}\n', b'"format"\n']
)
def test_a_file_that_is_no_ledger_is_refused_and_left_alone(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    for use in uses(path):
        with pytest.raises(RunFolderError, match="VFL-5036"):
            use()
    assert [entry.read_bytes() for entry in path.parent.iterdir()] == [content]


@pytest.mark.parametrize("version", [1, 2, 9])
def test_a_ledger_of_another_version_is_refused_with_the_way_out(path, version):
    path.parent.mkdir()
    path.write_bytes(b'{"format": "vafl ledger", "version": %d, "identity": "set"} 00000000\n' % version)
    for use in uses(path):
        with pytest.raises(
            RunFolderError, match=rf"of version {version}\..* version 3\..*lower privacy.mu_max"
        ):
            use()
    assert len(list(path.parent.iterdir())) == 1
