import numpy as np
import pytest
from PIL import Image

from vafl.data.datasets.modelnet40 import load_modelnet40
from vafl.errors import DataError

CLASSES = [f"kind{number:02}" for number in range(40)]


def views(seed, objects):
    return np.random.default_rng(seed).integers(0, 256, (objects, 3, 32, 32), dtype=np.uint8)


def write_npz(folder, **changed):
    folder.mkdir(exist_ok=True)
    for seed, (split, objects) in enumerate((("train", 80), ("test", 40))):
        arrays = {
            "views": views(seed, objects),
            "labels": np.arange(objects, dtype=np.uint8) % 40,
            "class_names": np.array(CLASSES),
        }
        np.savez(folder / f"views_{split}.npz", **{**arrays, **changed})


def test_views_from_npz(tmp_path):
    write_npz(tmp_path / "modelnet40")
    data = load_modelnet40(tmp_path)
    assert data.features.shape == (120, 3, 32, 32)
    assert np.array_equal(np.rint(data.features[80:] * 255), views(1, 40))
    assert data.classes == tuple(CLASSES)
    assert data.labels[41] == 1


def test_views_from_folders_of_pictures(tmp_path):
    for number, name in enumerate(CLASSES):
        for split, objects in (("train", 1), ("test", 1)):
            folder = tmp_path / "modelnet40" / name / split
            folder.mkdir(parents=True)
            for index in range(objects):
                for view in (1, 2, 10):  # by number, not by name
                    picture = Image.new("RGB", (64, 64), (number * 4 + view,) * 3)
                    picture.save(folder / f"{name}_{index:04}.obj.shaded_v{view}.png")
    data = load_modelnet40(tmp_path)
    assert data.features.shape == (80, 3, 32, 32)
    assert np.rint(data.features[47, :, 0, 0] * 255).tolist() == [29, 30, 38]
    assert data.labels.tolist() == [*range(40), *range(40)]
    (tmp_path / "modelnet40" / "kind03" / "test" / "kind03_0000.obj.shaded_v2.png").unlink()
    with pytest.raises(DataError, match=r"VFL-2155.*\[2, 3\].*test"):
        load_modelnet40(tmp_path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"views": np.zeros((80, 3, 32, 32))}, r"VFL-2154.*float64"),
        ({"labels": np.full(80, 40)}, r"VFL-2154.*40"),
        ({"class_names": np.array(CLASSES[:39]), "labels": np.zeros(80)}, r"VFL-2152.*40.*39"),
        ({"class_names": np.array(CLASSES, dtype=object)}, "VFL-2153"),
    ],
)
def test_other_arrays_are_refused(tmp_path, changed, said):
    write_npz(tmp_path / "modelnet40", **changed)
    with pytest.raises(DataError, match=said):
        load_modelnet40(tmp_path)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(DataError, match=r"VFL-2181.*class/train/\*\.png"):
        load_modelnet40(tmp_path)
