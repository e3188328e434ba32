"""The server's file of marks: its content, its place, and damaged files."""

import errno

import pytest

from tests.companies import configuration
from vafl.config import from_document
from vafl.errors import RunFolderError
from vafl.protocol.messages import LedgerMark
from vafl.run.marks import MarkFile, marks_path


def mark(number):
    return bytes([number]) * 16


def test_marks_outlast_the_process_and_the_run_and_follow_the_name(tmp_path):
    path = tmp_path / "new" / "server.marks"
    first = MarkFile(path, ["bank", "shop"])
    assert first.recall(0) == b""
    assert not path.exists()
    first.remember(LedgerMark(0, 1, mark(1)))
    first.remember(LedgerMark(1, 1, mark(2)))
    first.remember(LedgerMark(0, 2, mark(3)))
    again = MarkFile(path, ["clinic", "shop", "bank"])
    assert [again.recall(client) for client in range(3)] == [b"", mark(2), mark(3)]
    assert oct(path.stat().st_mode)[-3:] == "600"


def test_servers_that_share_a_file_keep_each_others_marks(tmp_path):
    path = tmp_path / "server.marks"
    one, other = MarkFile(path, ["bank"]), MarkFile(path, ["shop"])
    one.remember(LedgerMark(0, 1, mark(1)))
    other.remember(LedgerMark(0, 1, mark(2)))
    one.remember(LedgerMark(0, 2, mark(3)))
    assert MarkFile(path, ["shop"]).recall(0) == mark(2)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"format": "vafl ledger marks 2", "marks": {}}',
        b'{"format": "vafl ledger marks 1", "marks": []}',
        b'{"format": "vafl ledger marks 1", "marks": {"bank": 5}}',
        b'{"format": "vafl ledger marks 1", "marks": {"bank": "zz"}}',
        b'{"format": "vafl ledger marks 1", "marks": {"bank": "00"}}',
    ],
)
def test_a_damaged_file_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "server.marks"
    path.write_bytes(content)
    with pytest.raises(RunFolderError, match="VFL-7121"):
        MarkFile(path, ["bank"])
    assert path.read_bytes() == content


def test_a_mark_that_cannot_be_written_is_remembered_until_it_can(tmp_path, caplog, monkeypatch):
    def fail(path, content, **how):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("vafl.run.marks.write_atomically", fail)
    marks = MarkFile(tmp_path / "server.marks", ["bank", "shop"])
    marks.remember(LedgerMark(0, 1, mark(1)))
    marks.remember(LedgerMark(0, 2, mark(2)))
    assert marks.recall(0) == mark(2)
    assert caplog.text.count("privacy.ledger") == 1
    monkeypatch.undo()
    marks.remember(LedgerMark(1, 1, mark(3)))
    again = MarkFile(tmp_path / "server.marks", ["bank", "shop"])
    assert [again.recall(client) for client in range(2)] == [mark(2), mark(3)]


def test_it_is_where_the_ledger_of_the_server_would_be(tmp_path):
    run, tables = tmp_path / "run", configuration(tmp_path / "tables")
    assert marks_path(tables, run) == tmp_path / "tables" / "server.marks"
    named = configuration(tmp_path / "tables", privacy={"ledger": str(tmp_path / "accounts")})
    assert marks_path(named, run) == tmp_path / "accounts" / "server.marks"
    assert marks_path(from_document({"data": {"name": "iris"}}), run) == run / "state" / "server.marks"
