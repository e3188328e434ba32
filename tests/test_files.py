"""Private files, and files that are complete or absent."""

import os
import stat

import numpy as np
import polars as pl
import pytest
import torch

from vafl.cli import main
from vafl.data.alignment.rows import Alignment
from vafl.files import remove_drafts, return_freed_memory, write_atomically
from vafl.observe.scores import ScoreFile
from vafl.run.checkpoint import MappedArray, save_checkpoint
from vafl.run.drawn_labels import draw_once


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_file_is_private_from_its_first_moment(tmp_path, monkeypatch):
    """A process that opened it before a later chmod could read everything that is written to it."""
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


CONFIG = """
[data]
name = "iris"
scale = "none"
[stop]
updates = 5
[schedule]
batch_size = 16
[privacy]
clip = 1.0
noise = 1.0
gradient_clip = 1.0
gradient_noise = 1.0
mu_max = "unlimited"
[network]
address = "127.0.0.1:0"
join_timeout = 100.0
"""
OPEN = {".lock", "config.toml", "history.jsonl", "status.json", "summary.json"}  # figures, no records
OWN = {"scores.parquet", "report.html"}


@pytest.mark.parametrize("command", ["run", "up"])
def test_what_a_run_derives_from_records_is_for_its_owner_only(tmp_path, command):
    """Models, ledgers, states, certificates and logs; figures and plots are for everyone who may look."""
    (tmp_path / "run.toml").write_text(CONFIG)
    before = os.umask(0o022)
    try:
        assert main([command, str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")]) == 0
    finally:
        os.umask(before)
    run = tmp_path / "run"
    folders = [path for path in run.iterdir() if path.is_dir()]
    assert {path.name for path in folders} >= {"models"} | (
        {"state", "certs", "logs"} if command == "up" else set()
    )
    for folder in folders:
        inside = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pem"]
        assert inside
        assert mode(folder) == 0o700 or {mode(path) for path in inside} == {0o600}, folder
    assert {mode(path) for path in run.glob("models/**/*") if path.is_file()} == {0o600}
    assert {mode(path) for path in (run / "models", *run.glob("models/*/"))} == {0o700}
    others = {path.name for path in run.iterdir() if path.is_file() and path.suffix not in (".png", ".svg")}
    assert others <= OPEN | OWN
    assert {name: mode(run / name) for name in OWN} == dict.fromkeys(OWN, 0o600)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_scores_are_for_their_owner_only_from_the_first_moment(tmp_path, ending):
    before = os.umask(0o022)
    try:
        with ScoreFile(tmp_path / f"scores.{ending}") as file:
            file.append(pl.DataFrame({"id": ["a"], "value": [1.0]}))
            drafts = [path for path in tmp_path.rglob("*") if path.is_file()]
            assert drafts
            folders = [path for path in tmp_path.iterdir() if path.is_dir()]
            assert all(mode(path) == 0o700 for path in folders)
            assert folders or {mode(path) for path in drafts} == {0o600}
    finally:
        os.umask(before)
    assert mode(tmp_path / f"scores.{ending}") == 0o600


def test_freed_memory_goes_back_or_nothing_happens(monkeypatch):
    return_freed_memory()
    monkeypatch.setattr("vafl.files.ctypes.CDLL", lambda name: object())  # a C library without malloc_trim
    return_freed_memory()
