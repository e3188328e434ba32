"""The feature cache: when a file is used again, who may read it, and what a crash or a full disk leaves."""

import errno
import fcntl
import gc
import os

import numpy as np
import pytest
import torch

from tests.data.sources.making import fitted, opened, wanted, write_array, write_images, write_series
from vafl.data.sources import cache
from vafl.data.sources.cache import FeatureCache
from vafl.errors import DataError

IDS = [f"P{number}" for number in range(40)]


@pytest.fixture(autouse=True)
def small_memory(monkeypatch):
    monkeypatch.setattr(cache, "IN_MEMORY", 64)


@pytest.fixture
def source(tmp_path):
    return opened(write_array(tmp_path, IDS, np.random.default_rng(0).normal(size=(40, 3))))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def features(source, folder, records=None, **options):
    records = wanted(*IDS) if records is None else records
    encoder, _ = fitted(source, records, **options)
    return FeatureCache(folder).features(source, encoder, records, records.height)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def unreadable(monkeypatch, source):
    """Make reading the source fail from now on, after fitting."""
    encoder, _ = fitted(source, wanted(*IDS))
    monkeypatch.setattr(type(encoder), "read", lambda *arguments: pytest.fail("the source was read"))
    return encoder


def test_small_features_stay_in_memory_and_large_ones_do_not(source, folder, monkeypatch):
    expected = features(source, None)
    assert torch.equal(features(source, folder), expected)
    assert len(files(folder)) == 1
    monkeypatch.setattr(cache, "IN_MEMORY", 40 * 3 * 4)
    assert torch.equal(features(source, folder / "other"), expected)
    assert not (folder / "other").exists()


def test_only_the_owner_can_read_the_features(source, folder):
    before = os.umask(0)
    try:
        features(source, folder)
    finally:
        os.umask(before)
    (path,) = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    folder.chmod(0o777)
    with pytest.raises(DataError, match=r"VFL-2434.*777"):
        features(source, folder)


def test_a_file_is_used_again_without_reading_the_source(source, folder, monkeypatch):
    first = features(source, folder)
    encoder = unreadable(monkeypatch, source)
    again = FeatureCache(folder).features(source, encoder, wanted(*IDS), 40)
    assert torch.equal(again, first)
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-4])  # a file of another size is none of ours
    with pytest.raises(pytest.fail.Exception):
        FeatureCache(folder).features(source, encoder, wanted(*IDS), 40)


def test_other_content_records_or_encoders_are_other_features(tmp_path, source, folder):
    held = features(source, folder)
    names = {files(folder)[0]}
    copy = held.clone()
    for records, options in ((wanted(*IDS[::-1]), {}), (wanted(*IDS), {"scale": False})):
        features(source, folder, records, **options)
        names |= set(files(folder))
    changed = opened(write_array(tmp_path, IDS, np.ones((40, 3))))
    features(changed, folder)
    names |= set(files(folder))
    assert len(names) == 4
    assert len(files(folder)) == 1  # the others were deleted
    assert torch.equal(held, copy)  # though a process that has mapped one keeps its content


def test_files_of_other_parties_and_other_files_stay(source, folder):
    features(source, folder)
    kept = [f"bank.north.{'0' * 32}.features", "bank.notes", f"bank.{'0' * 31}.features"]
    for name in kept:
        (folder / name).write_bytes(b"")
    (folder / f"bank.{'0' * 32}.features").write_bytes(b"")
    features(source, folder)
    assert set(kept) < set(files(folder))
    assert len(files(folder)) == len(kept) + 1


def test_a_crash_leaves_no_half_file_that_is_used(source, folder, monkeypatch):
    expected = features(source, None)
    encoder, _ = fitted(source, wanted(*IDS))
    read = type(encoder).read

    def dies(self, source, records, rows, into):
        into[:3] = 9
        raise KeyboardInterrupt

    monkeypatch.setattr(type(encoder), "read", dies)
    with pytest.raises(KeyboardInterrupt):
        FeatureCache(folder).features(source, encoder, wanted(*IDS), 40)
    assert files(folder) == []
    monkeypatch.setattr(type(encoder), "read", read)
    drafts = [folder / f"bank.{digit * 32}.features.{digit * 16}.part" for digit in "01"]
    for draft in drafts:
        draft.write_bytes(b"left by a kill")
    with drafts[1].open("rb") as used:  # by another process of this party
        fcntl.flock(used, fcntl.LOCK_EX)
        assert torch.equal(features(source, folder), expected)
        assert not drafts[0].exists()
        assert drafts[1].exists()
    features(source, folder)
    assert len(files(folder)) == 1


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "VFL-2431"),
        (errno.EFBIG, "VFL-2431"),
        (errno.ENOMEM, "VFL-2432"),
        (errno.EACCES, "VFL-2433"),
    ],
)
def test_a_full_disk_and_other_limits_are_named(source, folder, monkeypatch, number, code):
    def refuse(path, size):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cache, "reserve", refuse)
    with pytest.raises(DataError, match=code):
        features(source, folder)
    assert files(folder) == []


def test_a_file_in_place_of_the_folder_is_named(source, folder):
    folder.write_text("")
    with pytest.raises(DataError, match="VFL-2433"):
        features(source, folder)


@pytest.mark.parametrize("kind", ["images", "series"])
def test_other_kinds_are_the_same_from_the_file(tmp_path, folder, kind):
    if kind == "images":
        settings = write_images(tmp_path / "photos", IDS)
    else:
        lines = [(name, step, place) for place, name in enumerate(IDS) for step in range(1 + place % 3)]
        settings = write_series(tmp_path, lines, cache=str(folder))
    own, records = opened(settings), wanted(*IDS[::2])
    encoder, _ = fitted(own, records, flags_absent=True)
    expected = encoder.read(own, records, 30)
    found = FeatureCache(folder).features(own, encoder, records, 30)
    assert found.numpy().tolist() == expected.tolist()


def test_the_mapping_ends_with_the_tensor(source, folder):
    held = features(source, folder)
    name = files(folder)[0]

    def maps():
        with open("/proc/self/maps", encoding="utf-8") as lines:
            return [line for line in lines if name in line]

    (line,) = maps()
    assert line.split()[1] == "r--s"  # neither a copy in memory nor writable
    assert held[:5].is_contiguous()
    assert held.contiguous().data_ptr() == held.data_ptr()
    del held
    gc.collect()
    assert not maps()
