"""Files that hold what only their owner may know, and are whole or not there."""

import os
import stat

import numpy as np
import polars as pl
import pytest
import torch

from vafl.data.alignment import Alignment
from vafl.files import remove_drafts, write_atomically
from vafl.runtime.checkpoint import MappedArray, save_checkpoint
from vafl.runtime.labels import draw_once


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_file_is_private_from_its_first_moment(tmp_path, monkeypatch):
    """Whoever opened it before a later chmod could read all that is written to it."""
    born, made = [], os.open

    def opened(path, flags, *others, **more):
        number = made(path, flags, *others, **more)
        if flags & os.O_CREAT:
            born.append((stat.S_IMODE(os.fstat(number).st_mode), bool(flags & os.O_EXCL)))
        return number

    monkeypatch.setattr("os.open", opened)
    write_atomically(tmp_path / "ledger", b"ids", private=True)
    assert born == [(0o600, True)]
    assert mode(tmp_path / "ledger") == 0o600


def test_nothing_is_written_through_a_link_somebody_left(tmp_path):
    (tmp_path / "victim").write_bytes(b"untouched")
    (tmp_path / "file.part").symlink_to(tmp_path / "victim")
    write_atomically(tmp_path / "file", b"content")
    assert (tmp_path / "victim").read_bytes() == b"untouched"
    assert not (tmp_path / "file").is_symlink()


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def dies(descriptor):
        raise OSError("the disk is full")

    monkeypatch.setattr("os.fsync", dies)
    with pytest.raises(OSError, match="the disk is full"):
        write_atomically(tmp_path / "file", b"content")
    assert not list(tmp_path.iterdir())


def test_what_a_crash_left_half_written_is_removed_and_nothing_else(tmp_path):
    draft, own = tmp_path / "best" / f"checkpoint.{'0' * 16}.part", tmp_path / "film.part"
    draft.parent.mkdir()
    for path in (draft, own):
        path.touch()
    remove_drafts(tmp_path)
    assert (draft.exists(), own.exists()) == (False, True)


def test_what_parties_keep_is_for_their_own_eyes(tmp_path):
    save_checkpoint(tmp_path / "client-1", {"x": torch.zeros(1)}, {})
    MappedArray(tmp_path / "client-1" / "table.records", (2, 2), "<f4", fresh=True)
    draw_once(torch.arange(6) % 2, 2, 1.0, "label", "records", tmp_path / "client-1" / "labels.safetensors")
    Alignment("0" * 32, 2, None, pl.Series(["a", "b"]), np.arange(2)).write(tmp_path / "own.parquet")
    assert mode(tmp_path / "client-1") == 0o700
    files = [entry for entry in tmp_path.rglob("*") if entry.is_file()]
    assert len(files) == 4
    assert {mode(entry) for entry in files} == {0o600}
