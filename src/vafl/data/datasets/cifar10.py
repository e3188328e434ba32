"""Load CIFAR-10 from the official binary batches, or from the same images as lossless WebP sheets."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from vafl.arrays import Bytes, Floats
from vafl.data.dataset import Dataset
from vafl.data.datasets.public import require, require_count, require_digest
from vafl.errors import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = "test_batch"
_SIDE, _CHANNELS = 32, 3
_PIXELS = _CHANNELS * _SIDE * _SIDE
_SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html (the binary version)"


@dataclass(frozen=True)
class Edition:
    """The expected content of the files.

    Attributes:
        pictures: the number of images in each batch.
        digests: batch -> MD5 of its official binary file. A batch without a digest is not checked.
    """

    pictures: int
    digests: dict[str, str]


OFFICIAL = Edition(
    10_000,
    {
        "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
)


def load_cifar10(folder: Path, edition: Edition = OFFICIAL) -> Dataset:
    """Read folder/cifar10: images [rows, 3, 32, 32] in 0..1."""
    folder = folder / "cifar10"
    if (folder / "cifar-10-batches-bin").is_dir():
        folder /= "cifar-10-batches-bin"
    read = _read_sheet if (folder / f"{_TEST}.webp").is_file() else _read_binary
    if read is _read_binary:
        _refuse_pickles(folder)
        require("CIFAR-10", (folder / f"{name}.bin" for name in (*_TRAIN, _TEST)), _SOURCE)
    batches = [read(folder, name, edition) for name in (*_TRAIN, _TEST)]
    return Dataset(
        name="cifar10",
        features=np.concatenate([_pictures(batch) for batch in batches]),
        labels=np.concatenate([batch[:, 0] for batch in batches]).astype(np.int64),
        classes=CLASSES,
        tests=len(batches[-1]),
    )


def _pictures(records: Bytes) -> Floats:
    return records[:, 1:].reshape(-1, _CHANNELS, _SIDE, _SIDE).astype(np.float32) / np.float32(255)


def _refuse_pickles(folder: Path) -> None:
    """Raise DataError if the folder has the Python version of CIFAR-10, which consists of pickles."""
    folders = (folder, folder / "cifar-10-batches-py")
    if pickles := [path for parent in folders for path in parent.glob("test_batch")]:
        raise DataError(
            "VFL-2121",
            f'CIFAR-10 must be the binary version. Found "{pickles[0]}", a pickle of the Python version. '
            "vafl does not read pickles, because they can run any code. Download the binary version "
            f"(cifar-10-binary.tar.gz) from {_SOURCE}.",
        )


def _read_binary(folder: Path, name: str, edition: Edition) -> Bytes:
    """Return a batch, [pictures, 1 + 3072]: the label, then the red, green and blue planes."""
    path = folder / f"{name}.bin"
    content = path.read_bytes()
    require_count(path, "bytes", len(content), edition.pictures * (1 + _PIXELS))
    return _checked(path, name, np.frombuffer(content, np.uint8).reshape(-1, 1 + _PIXELS), edition)


def _read_sheet(folder: Path, name: str, edition: Edition) -> Bytes:
    """Return a batch in the same form, from a sheet of tiles and a file of labels.

    The tiles are in reading order. The labels are those of all training or all test rows.
    """
    path = folder / f"{name}.webp"
    labels = folder / ("test_labels.npy" if name == _TEST else "train_labels.npy")
    require("CIFAR-10", (path, labels), _SOURCE)
    try:
        with Image.open(path) as image:
            sheet = np.asarray(image.convert("RGB"))
        numbers = np.load(labels, allow_pickle=False)
    except (OSError, ValueError, UnidentifiedImageError) as error:
        raise DataError(
            "VFL-2122", f'"{path}" must be a WebP sheet with its labels. Found: {error}. Download it again.'
        ) from error
    across = sheet.shape[1] // _SIDE
    require_count(path, "pictures", (sheet.shape[0] // _SIDE) * across, edition.pictures)
    require_count(labels, "labels", len(numbers), edition.pictures * (1 if name == _TEST else len(_TRAIN)))
    first = 0 if name == _TEST else edition.pictures * _TRAIN.index(name)
    tiles = sheet.reshape(-1, _SIDE, across, _SIDE, _CHANNELS).transpose(0, 2, 4, 1, 3)
    records = np.empty((edition.pictures, 1 + _PIXELS), np.uint8)
    records[:, 0] = numbers[first : first + edition.pictures]
    records[:, 1:] = tiles.reshape(edition.pictures, _PIXELS)
    return _checked(path, name, records, edition)


def _checked(path: Path, name: str, records: Bytes, edition: Edition) -> Bytes:
    require_digest(path, records.tobytes(), edition.digests.get(name, ""))
    if records[:, 0].max() >= len(CLASSES):
        raise DataError(
            "VFL-2123", f'"{path}" must have labels 0..9. Found {records[:, 0].max()}. Download it again.'
        )
    return records
