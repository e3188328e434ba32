import numpy as np
import pytest
import torch

from tests.federation import run_of, vertical_data
from vafl.config import from_document
from vafl.errors import DataError, RunFolderError
from vafl.privacy.mechanism.labels import randomise
from vafl.run.drawn_labels import draw_once
from vafl.run.plan import make_plan
from vafl.run.server_state import ServerState

TRUE = torch.arange(600) % 3


def test_labels_are_drawn_once_and_read_ever_after(tmp_path):
    path = tmp_path / "deep" / "labels.safetensors"
    drawn = draw_once(TRUE, 3, 1.0, "label", "records", path)
    assert not torch.equal(drawn, TRUE)
    assert torch.equal(draw_once(TRUE, 3, 1.0, "label", "records", path), drawn)
    assert torch.equal(draw_once(TRUE.float(), 3, 1.0, "label", "records", path), drawn.float())
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["labels.safetensors"]


def test_two_servers_that_begin_together_train_on_one_draw(tmp_path, monkeypatch):
    """Otherwise both would spend epsilon, and the file would record only one draw."""
    path, others = tmp_path / "labels.safetensors", []

    def drawn_meanwhile(*arguments):
        monkeypatch.undo()
        others.append(draw_once(TRUE, 3, 1.0, "label", "records", path))
        return randomise(*arguments)

    monkeypatch.setattr("vafl.run.drawn_labels.randomise", drawn_meanwhile)
    assert torch.equal(draw_once(TRUE, 3, 1.0, "label", "records", path), others[0])
    assert [entry.name for entry in tmp_path.iterdir()] == ["labels.safetensors"]


@pytest.mark.parametrize(
    "terms", [(2.0, "label", "records"), (1.0, "other", "records"), (1.0, "label", "others")]
)
def test_labels_of_another_epsilon_or_column_or_of_others_are_refused(tmp_path, terms):
    path = tmp_path / "labels.safetensors"
    draw_once(TRUE, 3, 1.0, "label", "records", path)
    before = path.read_bytes()
    with pytest.raises(DataError, match="VFL-7072"):
        draw_once(TRUE, 3, *terms, path)
    assert path.read_bytes() == before


def test_a_damaged_file_is_refused_and_not_drawn_again(tmp_path):
    path = tmp_path / "labels.safetensors"
    draw_once(TRUE, 3, 1.0, "label", "records", path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match="VFL-7071"):
        draw_once(TRUE, 3, 1.0, "label", "records", path)


def test_runs_that_name_one_file_share_its_labels(tmp_path):
    data, labels = vertical_data(rows=500), {"epsilon": 1.0, "file": str(tmp_path / "labels.safetensors")}
    first, second = run_of(data, labels=labels), run_of(data, seed=2, labels=labels)
    assert torch.equal(first.data.labels, second.data.labels)


def server_state(folder, *, resume, **labels):
    plan = make_plan(from_document({"data": {"name": "iris"}, "labels": {"epsilon": 1.0, **labels}}))
    return ServerState(plan, folder, resume=resume)


def test_a_resumed_server_trains_on_the_labels_it_began_with(tmp_path):
    first = server_state(tmp_path, resume=False)
    first.save(0.0)
    again = server_state(tmp_path, resume=True)
    assert np.array_equal(again.server._evaluate._labels, first.server._evaluate._labels)


@pytest.mark.parametrize("kept", [{}, {"file": "elsewhere.safetensors"}])
@pytest.mark.parametrize("epsilon", [0.0, 2.0])
def test_a_server_that_drew_its_labels_does_not_go_on_with_others(tmp_path, monkeypatch, kept, epsilon):
    monkeypatch.chdir(tmp_path)
    server_state(tmp_path / "state", resume=False, **kept)
    with pytest.raises(RunFolderError, match=rf"VFL-7211.* 1 .*Found {epsilon:g}\. Set it to 1"):
        server_state(tmp_path / "state", resume=True, epsilon=epsilon)


def test_a_server_whose_labels_are_lost_does_not_resume(tmp_path):
    server_state(tmp_path, resume=False).save(0.0)
    (tmp_path / "labels.safetensors").unlink()
    with pytest.raises(RunFolderError, match="VFL-7212"):
        server_state(tmp_path, resume=True)
