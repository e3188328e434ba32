"""Checkpoints are written atomically, and damaged ones are reported."""

import os
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from vafl.errors import Diverged, RunFolderError
from vafl.run.checkpoint import (
    MappedArray,
    flatten,
    has_checkpoint,
    load_checkpoint,
    load_facts,
    save_checkpoint,
    unflatten,
    write_atomically,
)


def test_what_was_saved_is_loaded(tmp_path):
    assert not has_checkpoint(tmp_path)
    tensors = {"head.bias": torch.randn(3), "step": torch.tensor(7)}
    tensors["head.shared"] = tensors["head.bias"]
    save_checkpoint(tmp_path, tensors, {"iteration": 12, "activations": [3, 4]})
    assert has_checkpoint(tmp_path)
    loaded, facts = load_checkpoint(tmp_path)
    assert facts == {"iteration": 12, "activations": [3, 4]}
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor)


def test_a_new_checkpoint_replaces_the_old_one_and_leaves_nothing_else(tmp_path):
    for iteration in (1, 2):
        save_checkpoint(tmp_path, {"x": torch.zeros(1)}, {"iteration": iteration})
    assert load_checkpoint(tmp_path)[1] == {"iteration": 2}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_write_that_dies_half_way_leaves_the_old_file(tmp_path, monkeypatch):
    write_atomically(tmp_path / "file", b"old")

    def dies(descriptor):
        raise OSError("the disk is full")

    monkeypatch.setattr("os.fsync", dies)
    with pytest.raises(OSError, match="the disk is full"):
        write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"


def test_an_optimisers_state_comes_back_and_steps_the_same():
    def trained():
        model = nn.Linear(3, 2)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def step(model, optimiser):
        model(torch.ones(4, 3)).square().sum().backward()
        optimiser.step()
        optimiser.zero_grad()

    first, optimiser = trained()
    step(first, optimiser)
    tensors, skeleton = flatten("optimiser", optimiser.state_dict())
    second, other = trained()
    second.load_state_dict(first.state_dict())
    other.load_state_dict(unflatten(skeleton, {name: tensor.clone() for name, tensor in tensors.items()}))
    step(first, optimiser)
    step(second, other)
    assert torch.equal(first.weight, second.weight)


def test_nothing_to_resume_from_is_said(tmp_path):
    with pytest.raises(RunFolderError, match="VFL-7032"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"junk", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "])
def test_a_damaged_checkpoint_is_said(tmp_path, content):
    (tmp_path / "checkpoint.safetensors").write_bytes(content)
    with pytest.raises(RunFolderError, match="VFL-7033"):
        load_checkpoint(tmp_path)


def test_a_mapped_array_outlives_its_maker(tmp_path):
    made = MappedArray(tmp_path / "cells", (3, 2), "<f4", fresh=True)
    made.array[1] = 5.0
    made.flush()
    found = MappedArray(tmp_path / "cells", (3, 2), "<f4", fresh=False)
    assert np.array_equal(found.array, [[0, 0], [5, 5], [0, 0]])


def test_a_table_has_its_room_on_the_disk_before_it_is_used(tmp_path):
    """Writing to mapped memory without disk space would kill the process."""
    path, size = tmp_path / "cells", 1 << 20
    MappedArray(path, (size // 4,), "<f4", fresh=True)
    assert path.stat().st_blocks * 512 >= size
    path.write_bytes(b"")
    os.truncate(path, size)  # a sparse file, as some copy tools create it
    MappedArray(path, (size // 4,), "<f4", fresh=False)
    assert path.stat().st_blocks * 512 >= size


def test_a_disk_without_room_is_said_and_not_filled(tmp_path, monkeypatch):
    monkeypatch.setattr("os.posix_fallocate", lambda *_: pytest.fail("the disk would be full for everybody"))
    room = shutil.disk_usage(tmp_path).total
    with pytest.raises(RunFolderError, match=r"VFL-7035.*No space left on device"):
        MappedArray(tmp_path / "cells", (room,), "<f4", fresh=True)


def test_a_mapped_array_of_another_size_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match=r"VFL-7036.*24"):
        MappedArray(tmp_path / "cells", (3, 2), "<f4", fresh=False)
    MappedArray(tmp_path / "cells", (2, 2), "<f4", fresh=True)
    with pytest.raises(RunFolderError, match="VFL-7036"):
        MappedArray(tmp_path / "cells", (3, 2), "<f4", fresh=False)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_model_that_diverged_leaves_the_last_good_checkpoint(tmp_path, wrong):
    save_checkpoint(tmp_path, {"x": torch.zeros(2)}, {"iteration": 1})
    with pytest.raises(Diverged, match=r"VFL-7031.*x"):
        save_checkpoint(tmp_path, {"x": torch.tensor([0.0, wrong])}, {"iteration": 2})
    assert load_checkpoint(tmp_path)[1] == {"iteration": 1}


def test_a_buffer_may_be_infinite(tmp_path):
    mask = torch.tensor([0.0, float("-inf")])
    save_checkpoint(tmp_path, {"mask": mask}, {}, buffers={"mask"})
    assert torch.equal(load_checkpoint(tmp_path)[0]["mask"], mask)


@pytest.mark.parametrize("what", ["facts", "tensors"])
def test_a_checkpoint_with_another_content_than_was_written_is_refused(tmp_path, what):
    """safetensors detects only a broken structure, not changed numbers."""
    save_checkpoint(tmp_path, {"x": torch.tensor([1.0, 2.0])}, {"iteration": 12345})
    path = tmp_path / "checkpoint.safetensors"
    content = path.read_bytes()
    old, new = (b"12345", b"12346") if what == "facts" else (content[-4:], b"\0\0\0\0")
    path.write_bytes(content.replace(old, new))
    with pytest.raises(RunFolderError, match="VFL-7033"):
        load_checkpoint(tmp_path)
    if what == "facts":
        with pytest.raises(RunFolderError, match="VFL-7033"):
            load_facts(tmp_path)
