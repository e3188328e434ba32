"""A data set in one place, checked, before it is split over the parties."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vafl.errors import DataError

Array = npt.NDArray[np.float32]
Features = npt.NDArray[np.floating[Any]]  # float64 where columns are to be scaled before they are rounded
Labels = npt.NDArray[np.generic]
Records = npt.NDArray[np.int64]
Split = Literal["train", "test"]


@dataclass(frozen=True)
class Dataset:
    """Features and labels of the training and the test rows.

    Attributes:
        train, test: [rows, columns], series [rows, steps, columns], or images [rows, channels,
            height, width].
        columns: the names of the columns of a table or of series; empty for images.
        classes: the sorted class names, which labels index; None for regression.
        record_digest: of which records these are, in which order, and which are held out.
        records: [rows], each row's number among all records of the source, training rows first; None if
            they are counted as they come.
        validation: so many of the test rows, the first, are to watch the training by.
        fitted: whether features were made by statistics of all training rows: then one row's features say
            something of the others.
    """

    name: str
    train: Features
    test: Features
    train_labels: Labels
    test_labels: Labels
    columns: tuple[str, ...] = ()
    classes: tuple[str, ...] | None = None
    record_digest: str = ""
    records: Records | None = None
    validation: int = 0
    fitted: bool = False

    def __post_init__(self) -> None:
        if len(self.train) == 0 or len(self.test) == 0:
            raise DataError(
                f"{self.name}: training and test rows are both needed. Found {len(self.train)} and "
                f"{len(self.test)}. Give more rows, or another data.test_fraction."
            )
        for features, labels in ((self.train, self.train_labels), (self.test, self.test_labels)):
            if len(features) != len(labels):
                raise DataError(
                    f"{self.name}: one label a row is needed. Found {len(features)} rows and {len(labels)} "
                    "labels. Do the files belong together?"
                )
            self._check_finite(features)
        if self.classes is not None and len(np.unique(self.train_labels)) < 2:
            raise DataError(
                f"{self.name}: training labels must show at least two classes. Found only "
                f'"{self.classes[int(self.train_labels[0])]}". Is data.label the right column?'
            )

    @classmethod
    def of_rows(
        cls,
        name: str,
        features: Features,
        labels: Labels,
        train: Sequence[int],
        test: Sequence[int],
        *,
        columns: tuple[str, ...],
        classes: tuple[str, ...] | None,
    ) -> "Dataset":
        """These rows of one table to train on, those to test."""
        return cls(
            name=name,
            train=np.ascontiguousarray(features[train]),
            test=np.ascontiguousarray(features[test]),
            train_labels=labels[train],
            test_labels=labels[test],
            columns=columns,
            classes=classes,
            record_digest=digest_records(train, test, of=np.ascontiguousarray(features).data),
            records=np.array([*train, *test], dtype=np.int64),
        )

    @property
    def is_table(self) -> bool:
        """Whether columns differ in what they measure, and so in scale; an image's pixels do not."""
        return self.train.ndim < 4

    def _check_finite(self, features: Features) -> None:
        if np.isfinite(features).all():
            return
        flat = features.reshape(-1, features.shape[-1] if self.columns else features[0].size)
        bad = np.flatnonzero(~np.isfinite(flat).all(axis=0))
        names = [self.columns[i] if self.columns else f"#{i}" for i in bad[:5].tolist()]
        raise DataError(
            f"{self.name}: features must be finite numbers. Found NaN or infinity in {len(bad)} column(s): "
            f"{', '.join(names)}. Fill or drop the missing values first."
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


def split_rows(count: int, test_fraction: float, seed: int) -> tuple[Sequence[int], Sequence[int]]:
    """Training and test rows by a shuffle that only the seed decides."""
    order = np.random.Generator(np.random.Philox(seed)).permutation(count)
    tests = round(count * test_fraction)
    return np.sort(order[tests:]).tolist(), np.sort(order[:tests]).tolist()


def with_validation(dataset: Dataset, fraction: float, seed: int) -> Dataset:
    """So many of all rows are taken from the training rows to watch the training by."""
    if not fraction:
        return dataset
    rows = len(dataset.train) + len(dataset.test)
    share = round(fraction * rows) / len(dataset.train)
    if not 0 < share < 1:
        raise DataError(
            f"{dataset.name}: data.validation_fraction = {fraction} of {rows} rows must be one row or more, "
            f"and fewer than the {len(dataset.train)} to train on."
        )
    train, watched = split_rows(len(dataset.train), share, seed)
    numbers = np.arange(rows) if dataset.records is None else dataset.records
    held_out = np.concatenate([watched, np.arange(len(dataset.train), rows)])
    return replace(
        dataset,
        train=dataset.train[train],
        test=np.concatenate([dataset.train[watched], dataset.test]),
        train_labels=dataset.train_labels[train],
        test_labels=np.concatenate([dataset.train_labels[watched], dataset.test_labels]),
        record_digest=digest_records(
            numbers[train].tolist(), numbers[held_out].tolist(), of=dataset.record_digest.encode()
        ),
        records=np.concatenate([numbers[train], numbers[held_out]]),
        validation=len(watched),
    )


def digest_records(train: Sequence[int], test: Sequence[int], of: bytes | memoryview = b"") -> str:
    """A short digest of the record numbers of both parts, in order, and of what is numbered; never of labels,
    for others see it."""
    both = hashlib.sha256(of)
    for part in (train, test):
        both.update(np.asarray(part, dtype="<i8").tobytes() + b"|")
    return both.hexdigest()[:16]


def standardised(train: Features, test: Features) -> tuple[Array, Array]:
    """Zero mean and unit deviation per column by the training rows alone; of series, over all steps.

    Both are taken in float64, and a constant column keeps its scale: rounding is no deviation.
    """
    over = (0, 1) if train.ndim == 3 else (0,)
    mean, deviation = train.mean(over, dtype=np.float64), train.std(over, dtype=np.float64)
    deviation[(train == train[(0,) * len(over)]).all(over)] = 1
    own, held_out = (((part - mean) / deviation).astype(np.float32) for part in (train, test))
    return own, held_out
