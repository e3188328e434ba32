"""A checked data set of arrays, before its columns are divided among the parties."""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vafl.arrays import Doubles, Features, Floats, Labels
from vafl.errors import DataError


@dataclass(frozen=True)
class Dataset:
    """Features and labels of all records, in the source's order.

    Attributes:
        features: [rows, columns], series [rows, steps, columns], or images [rows, channels, height, width].
        labels: [rows].
        columns: the names of the columns of a table or of series; empty for images.
        classes: the class names, which labels index; None for regression.
        tests: the number of records at the end that the source reserves for testing; 0 if it reserves none.
        together: the number of consecutive records of one person. A split keeps them together.
        digest: identifies the records. It does not depend on the labels, because other parties see it.
        fitted: whether features were computed with statistics of all training rows, so that one row's
            features reveal something about the others.
    """

    name: str
    features: Features
    labels: Labels
    columns: tuple[str, ...] = ()
    classes: tuple[str, ...] | None = None
    tests: int = 0
    together: int = 1
    digest: str = ""
    fitted: bool = False

    def __post_init__(self) -> None:
        if len(self.features) != len(self.labels):
            raise DataError(
                "VFL-2101",
                f"{self.name}: every row needs one label. Found {len(self.features)} rows and "
                f"{len(self.labels)} labels. Check that the files belong together.",
            )
        self._check_finite()

    @property
    def is_table(self) -> bool:
        """Return whether columns have different scales, as in tables and series, but not in images."""
        return self.features.ndim < 4

    def _check_finite(self) -> None:
        if np.isfinite(self.features).all():
            return
        width = self.features.shape[-1] if self.columns else self.features[0].size
        bad = np.flatnonzero(~np.isfinite(self.features.reshape(-1, width)).all(axis=0))
        names = [self.columns[i] if self.columns else f"#{i}" for i in bad[:5].tolist()]
        raise DataError(
            "VFL-2102",
            f"{self.name}: features must be finite numbers. Found NaN or infinity in {len(bad)} column(s): "
            f"{', '.join(names)}. Fill or drop the missing values first.",
        )


def digest_of(*contents: npt.ArrayLike) -> str:
    """Return a short digest of arrays of numbers."""
    digest = hashlib.sha256()
    for content in contents:
        digest.update(np.ascontiguousarray(content).data)
        digest.update(b"|")
    return digest.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Standard:
    """Scales each column of an array to zero mean and unit deviation; for series, over all steps.

    Attributes:
        mean, deviation: statistics of the training rows, in float64. A constant column has deviation 1, so
            that rounding errors are not magnified.
    """

    mean: Doubles
    deviation: Doubles

    @classmethod
    def fit(cls, train: Features) -> "Standard":
        """Measure the training rows, [rows, columns], [rows, steps, columns] or images."""
        over = (0, 1) if train.ndim == 3 else (0,)
        mean, deviation = train.mean(over, dtype=np.float64), train.std(over, dtype=np.float64)
        # Compare with the first value to find constant columns: rounding may give them a deviation above 0.
        deviation[(train == train[(0,) * len(over)]).all(over)] = 1
        return cls(mean, deviation)

    def __call__(self, features: Features) -> Floats:
        """Scale rows of the same shape."""
        return ((features - self.mean) / self.deviation).astype(np.float32)
