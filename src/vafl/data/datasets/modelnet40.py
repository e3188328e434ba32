"""Load ModelNet40 as images: several views of each object, from .npz files or folders of PNG files."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from PIL import Image, UnidentifiedImageError

from vafl.arrays import Bytes, Integers
from vafl.data.dataset import Dataset
from vafl.data.datasets.public import missing_data
from vafl.errors import DataError

CLASSES = 40
SIDE = 32
_SOURCE = (
    "https://modelnet.cs.princeton.edu (render the meshes), or take the 12 rendered views that come with "
    "MVCNN, https://github.com/jongchyisu/mvcnn_pytorch"
)
_NUMBERED = re.compile(r"(?P<object>.+?)[._-]*v?(?P<view>\d+)$")


def load_modelnet40(folder: Path) -> Dataset:
    """Read folder/modelnet40: views [rows, views, height, width], grey in 0..1.

    The folder has either *_train.npz and *_test.npz with `views`, `labels` and `class_names`, or folders
    class/train and class/test with PNG files whose names end in the number of the view. PNG files are scaled
    to 32 x 32.
    """
    folder = folder / "modelnet40"
    read = _read_npz if list(folder.glob("*_train.npz")) else _read_pictures
    train, train_labels, classes = read(folder, "train")
    test, test_labels, test_classes = read(folder, "test")
    if classes != test_classes or train.shape[1:] != test.shape[1:]:
        raise DataError(
            "VFL-2151",
            f'"{folder}": training and test objects must have the same classes and views. Found '
            f"{len(classes)} classes of {list(train.shape[1:])} and {len(test_classes)} of "
            f"{list(test.shape[1:])}. Download both from the same source.",
        )
    if len(classes) != CLASSES:
        raise DataError(
            "VFL-2152", f'"{folder}" must have {CLASSES} classes. Found {len(classes)}. Download all of them.'
        )
    return Dataset(
        name="modelnet40",
        features=np.concatenate([train, test]).astype(np.float32) / np.float32(255),
        labels=np.concatenate([train_labels, test_labels]).astype(np.int64),
        classes=tuple(classes),
        tests=len(test),
    )


Part = tuple[Bytes, Integers, list[str]]


def _read_npz(folder: Path, split: str) -> Part:
    path = next(iter(sorted(folder.glob(f"*_{split}.npz"))), None)
    if path is None:
        raise missing_data("ModelNet40's views", folder, f"*_{split}.npz", _SOURCE)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            views, labels, names = arrays["views"], arrays["labels"], arrays["class_names"]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise DataError(
            "VFL-2153",
            f'"{path}" must have the arrays views, labels and class_names. Found: {error}. Download it '
            "again.",
        ) from error
    if views.dtype != np.uint8 or views.ndim != 4 or labels.max(initial=0) >= len(names):
        raise DataError(
            "VFL-2154",
            f'"{path}": views must be uint8 [objects, views, height, width] and labels index class_names. '
            f"Found {views.dtype} {list(views.shape)}, labels up to {labels.max(initial=0)}. Download it "
            "again.",
        )
    return views, labels, [str(name) for name in names]


def _read_pictures(folder: Path, split: str) -> Part:
    classes = sorted(path.parent.name for path in folder.glob(f"*/{split}") if path.is_dir())
    if not classes:
        raise missing_data("ModelNet40's views", folder, f"class/{split}/*.png", _SOURCE)
    objects = [
        (number, views) for number, name in enumerate(classes) for views in _objects(folder / name / split)
    ]
    counts = {len(views) for _, views in objects}
    if len(counts) != 1:
        raise DataError(
            "VFL-2155",
            f'"{folder}": every object must have the same number of views. Found {sorted(counts)} in '
            f"{split}. Download the missing images.",
        )
    pictures = np.stack([np.stack([_picture(path) for path in views]) for _, views in objects])
    return pictures, np.array([number for number, _ in objects]), classes


def _objects(folder: Path) -> Sequence[list[Path]]:
    """Return the files of each object: objects by name, views by number."""
    objects: dict[str, list[tuple[int, Path]]] = defaultdict(list)
    for path in folder.glob("*.png"):
        if match := _NUMBERED.match(path.stem):
            objects[match["object"]].append((int(match["view"]), path))
    return [[path for _, path in sorted(objects[name])] for name in sorted(objects)]


def _picture(path: Path) -> Bytes:
    try:
        with Image.open(path) as image:
            small = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
            return np.asarray(small)
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(
            "VFL-2156", f'"{path}" must be a PNG image. Found: {error}. Download it again.'
        ) from error
