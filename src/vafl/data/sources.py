"""Where data sets come from: scikit-learn's own, public files in a folder, or the user's CSV."""

import gzip
import hashlib
import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from vafl.data.adult import load_adult
from vafl.data.cifar10 import load_cifar10
from vafl.data.columns import no_column
from vafl.data.credit_default import load_credit_default
from vafl.data.csv_files import read_csv
from vafl.data.dataset import Dataset, Features, Labels, digest_of
from vafl.data.encoding import LARGEST
from vafl.data.mimic3 import load_mimic3
from vafl.data.modelnet40 import load_modelnet40
from vafl.data.parkinson import load_parkinson
from vafl.data.physionet2012 import load_physionet2012
from vafl.data.public import require
from vafl.data.settings import DataSettings
from vafl.errors import DataError

# scikit-learn's own; is it a regression?
_BUNDLED = {"digits": False, "breast_cancer": False, "wine": False, "iris": False, "diabetes": True}
_IDX = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST"}
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
    if settings.name in _PUBLIC:
        return _PUBLIC[settings.name](_folder(settings))
    return _load_csv(settings)


def _folder(settings: DataSettings) -> Path:
    return Path(settings.folder or os.environ.get("VAFL_DATA", ""))


def _load_bundled(settings: DataSettings) -> Dataset:
    from sklearn import datasets as bundled  # noqa: PLC0415 - takes longer to load than all the rest

    regression = _BUNDLED[settings.name]
    bunch = getattr(bundled, f"load_{settings.name}")()
    features = bunch.data.astype(np.float32)
    columns = tuple(map(str, bunch.feature_names))
    if settings.name == "digits":
        features, columns = features.reshape(-1, 1, 8, 8) / np.float32(16), ()
    return _split(settings, features, bunch.target, columns, regression)


def _load_csv(settings: DataSettings) -> Dataset:
    path = Path(settings.path)
    if not path.is_file():
        raise DataError(f'data.path must be a CSV file. Found nothing at "{path}".')
    table = read_csv(path)
    for name in (settings.label, *settings.ignore):
        if name not in table.columns:
            raise no_column(path, name, table.columns)
    if table[settings.label].null_count():
        raise DataError(f'"{path}": the label column "{settings.label}" has missing values. Drop those rows.')
    features = table.drop(settings.label, *settings.ignore)
    words = [name for name, kind in features.schema.items() if not (kind.is_numeric() or kind == pl.Boolean)]
    if words:
        raise DataError(
            f'"{path}": features must be numbers. Found text in {", ".join(words[:5])}. Encode these columns '
            "as numbers, or list them in data.ignore."
        )
    numbers = features.cast(pl.Float64).fill_null(float("nan")).to_numpy(writable=True)
    numbers[np.abs(numbers) > LARGEST] = np.nan
    regression = settings.task == "regression"
    return _split(settings, numbers, table[settings.label].to_numpy(), tuple(features.columns), regression)


def _split(
    settings: DataSettings,
    features: Features,
    labels: npt.NDArray[Any],
    columns: tuple[str, ...],
    regression: bool,
) -> Dataset:
    numbers, classes = encode_labels(labels, regression=regression, name=settings.name)
    return Dataset(
        settings.name, features, numbers, columns=columns, classes=classes, digest=digest_of(features)
    )


def encode_labels(values: Labels, *, regression: bool, name: str) -> tuple[Labels, tuple[str, ...] | None]:
    """Class numbers and names, or float labels."""
    if regression:
        try:
            numbers = values.astype(np.float32)
        except (TypeError, ValueError) as error:
            raise DataError(f"{name}: the label of a regression must be a number. {error}.") from None
        if not np.isfinite(numbers).all():
            raise DataError(f"{name}: labels must be finite numbers. Found NaN or infinity: drop those rows.")
        return numbers, None
    if values.dtype.kind == "f" and not np.isfinite(values.astype(np.float64)).all():
        raise DataError(f"{name}: labels must not be missing. Found NaN: drop those rows.")
    classes, indices = np.unique(values, return_inverse=True)
    return indices.astype(np.int64), tuple(map(str, classes.tolist()))


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
    """The two sets have files of the same names and shapes: only a digest tells them apart."""
    found = _IDX_OF.get(hashlib.md5(images.read_bytes(), usedforsecurity=False).hexdigest(), name)
    if found != name:
        raise DataError(
            f"\"{images}\" must be {_IDX[name]}'s. Found {_IDX[found]}'s. Put it into the folder {found}."
        )


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """A gzipped idx file of unsigned bytes, as MNIST's."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f'"{path}" must be a gzip file. {error}. Download it again.') from error
    axes = content[3] if len(content) > 3 else 0
    if content[:3] != b"\x00\x00\x08" or len(content) < 4 + 4 * axes:
        raise DataError(
            f'"{path}" must be an idx file of bytes. Found a header {content[:16].hex()}. Download it again.'
        )
    shape = tuple(np.frombuffer(content, ">u4", axes, 4).tolist())
    if len(content) != 4 + 4 * axes + math.prod(shape):
        raise DataError(f'"{path}" must hold {shape} bytes. Found {len(content)} in all. Download it again.')
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)
