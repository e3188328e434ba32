"""Load data sets of arrays: those bundled with scikit-learn, and public files in a folder."""

import gzip
import hashlib
import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vafl.arrays import Bytes
from vafl.data.dataset import Dataset, digest_of
from vafl.data.datasets.adult import load_adult
from vafl.data.datasets.cifar10 import load_cifar10
from vafl.data.datasets.credit_default import load_credit_default
from vafl.data.datasets.mimic3 import load_mimic3
from vafl.data.datasets.modelnet40 import load_modelnet40
from vafl.data.datasets.parkinson import load_parkinson
from vafl.data.datasets.physionet2012 import load_physionet2012
from vafl.data.datasets.public import require
from vafl.data.settings import DataSettings
from vafl.errors import DataError

# Bundled with scikit-learn: name -> whether it is a regression.
_BUNDLED = {"digits": False, "breast_cancer": False, "wine": False, "iris": False, "diabetes": True}
_IDX = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST"}
# MD5 of the training images -> the data set.
_IDX_OF = {"f68b3c2dcbeaaa9fbdd348bbdeb94873": "mnist", "8d4fb7e6c68d591d4c3dfef9ec88bf0d": "fashion_mnist"}
_PUBLIC: dict[str, Callable[[Path], Dataset]] = {
    "cifar10": load_cifar10,
    "parkinson": load_parkinson,
    "modelnet40": load_modelnet40,
    "physionet2012": load_physionet2012,
    "mimic3": load_mimic3,
    "adult": load_adult,
    "credit_default": load_credit_default,
}


def load(settings: DataSettings) -> Dataset:
    """Read the data set that the settings name."""
    if settings.name in _BUNDLED:
        return _load_bundled(settings)
    if settings.name in _IDX:
        return _load_idx(settings)
    return _PUBLIC[settings.name](_folder(settings))


def _folder(settings: DataSettings) -> Path:
    return Path(settings.folder or os.environ.get("VAFL_DATA", ""))


def _load_bundled(settings: DataSettings) -> Dataset:
    from sklearn import datasets as bundled  # noqa: PLC0415 - slow to import, and not needed otherwise

    regression = _BUNDLED[settings.name]
    bunch = getattr(bundled, f"load_{settings.name}")()
    features = bunch.data.astype(np.float32)
    columns = tuple(map(str, bunch.feature_names))
    if settings.name == "digits":
        features, columns = features.reshape(-1, 1, 8, 8) / np.float32(16), ()
    labels = bunch.target.astype(np.float32 if regression else np.int64)
    classes = None if regression else tuple(map(str, range(labels.max() + 1)))
    return Dataset(settings.name, features, labels, columns, classes, digest=digest_of(features))


def _load_idx(settings: DataSettings) -> Dataset:
    folder = _folder(settings) / settings.name
    files = [
        f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
    ]
    require(_IDX[settings.name], (folder / name for name in files), "the data set's home page")
    _refuse_the_other(settings.name, folder / files[0])
    images, labels, test_images, test_labels = (read_idx(folder / name) for name in files)
    return Dataset(
        name=settings.name,
        features=np.concatenate([images, test_images])[:, None].astype(np.float32) / np.float32(255),
        labels=np.concatenate([labels, test_labels]).astype(np.int64),
        classes=tuple(map(str, range(10))),
        tests=len(test_images),
    )


def _refuse_the_other(name: str, images: Path) -> None:
    """Raise DataError if the images belong to the other of MNIST and Fashion-MNIST.

    Both have files of the same names and shapes, so only a digest can tell them apart.
    """
    actual = _IDX_OF.get(hashlib.md5(images.read_bytes(), usedforsecurity=False).hexdigest(), name)
    if actual != name:
        raise DataError(
            "VFL-2261",
            f'"{images}" must belong to {_IDX[name]}. Found a file of {_IDX[actual]}. Move it to the folder '
            f"{actual}.",
        )


def read_idx(path: Path) -> Bytes:
    """Read a gzipped idx file of unsigned bytes, the format of MNIST.

    Raises:
        DataError: the file is damaged or has another format.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            "VFL-2262", f'"{path}" must be a gzip file. Found: {error}. Download it again.'
        ) from error
    axes = content[3] if len(content) > 3 else 0
    if content[:3] != b"\x00\x00\x08" or len(content) < 4 + 4 * axes:
        raise DataError(
            "VFL-2263",
            f'"{path}" must be an idx file of bytes. Found the header {content[:16].hex()}. Download it '
            "again.",
        )
    shape = tuple(np.frombuffer(content, ">u4", axes, 4).tolist())
    if len(content) != 4 + 4 * axes + math.prod(shape):
        raise DataError(
            "VFL-2264",
            f'"{path}" must have {shape} bytes after its header. Found {len(content)} with the header. '
            "Download it again.",
        )
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)
