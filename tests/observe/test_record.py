"""Run folders that a crash has left behind."""

import pytest

from vafl.errors import RunFolderError
from vafl.observe.record import RunFolder, read_run
from vafl.runtime.training import Point


def point(updates):
    return Point(updates + 0.5, updates, 10, 20, None, 0.5)


def test_what_a_crash_undid_is_taken_out_of_the_history(tmp_path):
    with RunFolder(tmp_path, "") as folder:
        for updates in (0, 10, 20, 30):
            folder.append(point(updates))
    history = tmp_path / "history.jsonl"
    history.write_bytes(history.read_bytes() + b'{"seconds": 4')  # cut short
    with RunFolder(tmp_path, "", resume=True) as folder:
        assert folder.rewind(20.0) == [point(0), point(10)]  # that of update 20 took until 20.5
        folder.append(point(20))
        folder.finish({"metric": {"name": "accuracy", "value": 0.5}})
    assert [each.updates for each in read_run(tmp_path).points] == [0, 10, 20]


def test_a_run_that_goes_on_has_not_ended(tmp_path):
    with RunFolder(tmp_path, "") as folder:
        folder.append(point(0))
        folder.finish({"metric": {"name": "accuracy", "value": 0.5}})
    read_run(tmp_path)
    with RunFolder(tmp_path, "", resume=True), pytest.raises(RunFolderError, match="summary"):
        read_run(tmp_path)
