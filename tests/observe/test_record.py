"""Run folders: after a crash, and before they are overwritten."""

import math

import pytest

from vafl.errors import RunFolderError
from vafl.folders import HeldFolder
from vafl.observe.evaluation import Evaluation
from vafl.observe.record import RunFolder, read_run

SUMMARY = {
    "metric": {"name": "accuracy", "value": 0.5},
    "watched": "test",
    "kept": {"updates": 20, "validation": None, "test": {"accuracy": 0.5}},
    "baselines": {},
}


def point(updates):
    return Evaluation(updates + 0.5, updates, 10, 20, None, 0.5, {"accuracy": 0.5})


def test_what_a_crash_undid_is_taken_out_of_the_history(tmp_path):
    with RunFolder(tmp_path) as folder:
        folder.begin("")
        for updates in (0, 10, 20, 30):
            folder.append(point(updates))
    history = tmp_path / "history.jsonl"
    history.write_bytes(history.read_bytes() + b'{"seconds": 4')  # an incomplete line
    with RunFolder(tmp_path, resume=True) as folder:
        folder.begin("")
        assert folder.rewind(20.0) == [point(0), point(10)]  # that of update 20 took until 20.5
        folder.append(point(20))
        folder.finish(SUMMARY)
    assert [each.updates for each in read_run(tmp_path).evaluations] == [0, 10, 20]


@pytest.mark.parametrize("line", [b"\0\0\n", b"[]\n", b'{"of": "another version"}\n'])
def test_a_history_that_is_damaged_is_left_as_it_is(tmp_path, line):
    with RunFolder(tmp_path) as folder:
        folder.append(point(0))
        content = (tmp_path / "history.jsonl").read_bytes() + line
        (tmp_path / "history.jsonl").write_bytes(content)
        with pytest.raises(RunFolderError, match=r"VFL-8021.*2"):
            folder.rewind(100.0)
    assert (tmp_path / "history.jsonl").read_bytes() == content


def test_a_run_that_goes_on_has_not_ended(tmp_path):
    with RunFolder(tmp_path) as folder:
        folder.begin("")
        folder.append(point(0))
        folder.finish(SUMMARY)
    read_run(tmp_path)
    with RunFolder(tmp_path, resume=True) as folder:
        read_run(tmp_path)  # the finished run is unchanged, so that callers can still check it
        folder.begin("")
        with pytest.raises(RunFolderError, match="VFL-8027"):
            read_run(tmp_path)


def test_a_run_that_went_on_with_another_headline_is_read_by_the_last(tmp_path):
    """Every evaluation records all metrics, so the earlier ones have the new headline metric, too."""
    with RunFolder(tmp_path) as folder:
        folder.append(Evaluation(0.5, 0, 10, 20, None, 0.7, {"auc": 0.7, "accuracy": 0.5}))
        folder.append(Evaluation(1.5, 10, 10, 20, None, 0.6, {"auc": 0.8, "accuracy": 0.6}))
        folder.finish(SUMMARY)
    assert [each.metric for each in read_run(tmp_path).evaluations] == [0.5, 0.6]


def test_what_is_not_a_number_is_not_recorded(tmp_path):
    with RunFolder(tmp_path) as folder, pytest.raises(ValueError, match="JSON"):
        folder.append(Evaluation(0.5, 0, 10, 20, None, math.nan))
    assert (tmp_path / "history.jsonl").read_bytes() == b""


def test_a_folder_in_use_is_left_alone(tmp_path):
    """Otherwise a second server would empty the folder of the first before it finds the port taken."""
    with RunFolder(tmp_path) as folder:
        folder.begin("seed = 1")
        folder.append(point(0))
        before = sorted(tmp_path.iterdir())
        for how in ({"overwrite": True}, {"resume": True}):
            with pytest.raises(RunFolderError, match="VFL-1041"):
                RunFolder(tmp_path, **how)
        assert sorted(tmp_path.iterdir()) == before
    with RunFolder(tmp_path, overwrite=True):
        assert [entry.name for entry in tmp_path.iterdir()] == [".lock"]


def test_a_folder_whose_client_is_at_work_is_not_replaced(tmp_path):
    with RunFolder(tmp_path) as folder:
        folder.begin("")
    with HeldFolder(tmp_path / "state" / "client-1"), pytest.raises(RunFolderError, match="VFL-1041"):
        RunFolder(tmp_path, overwrite=True)
    assert (tmp_path / "config.toml").is_file()
    with RunFolder(tmp_path, overwrite=True):
        assert not (tmp_path / "config.toml").exists()


def test_a_folder_that_is_refused_is_not_touched(tmp_path):
    (tmp_path / "thesis.doc").touch()
    for overwrite in (False, True):
        with pytest.raises(RunFolderError, match="Choose another --out"):
            RunFolder(tmp_path, overwrite=overwrite)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.doc"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ["models/precious.bin", "logs/app.log", "config.toml"],
            r"VFL-8025.*models/precious\.bin",
        ),
        (
            ["logs/app.log", "config.toml", "history.jsonl"],
            r"VFL-8026.*\.lock",
        ),
        ([".lock", "config.toml", "models/mine/model.safetensors/deep"], "VFL-8025"),
        ([".lock", "models/bank/notes.txt"], r"VFL-8025.*models/bank/notes\.txt"),
    ],
)
def test_overwrite_takes_nothing_that_no_run_wrote(tmp_path, names, said):
    """Other programs also use folder names such as models and logs."""
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("precious\n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunFolderError, match=said):
        RunFolder(tmp_path, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_is_followed_by_no_overwrite(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        folder.begin("")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "models" / "bank").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match=r"VFL-8025.*models/bank"):
        RunFolder(tmp_path / "run", overwrite=True)


def test_a_run_that_crashed_or_was_written_before_there_was_a_lock_is_replaced(tmp_path):
    with RunFolder(tmp_path) as folder:
        folder.begin("")
        folder.append(point(0))
    (tmp_path / "config.toml.0123456789abcdef.part").touch()
    (tmp_path / ".lock").unlink()
    with RunFolder(tmp_path, overwrite=True):
        assert [entry.name for entry in tmp_path.iterdir()] == [".lock"]
