"""Split the records into training, validation and test rows."""

import hashlib
from dataclasses import dataclass

import numpy as np

from vafl.arrays import RowIds
from vafl.data.dataset import Dataset
from vafl.data.settings import DataSettings
from vafl.errors import DataError


@dataclass(frozen=True)
class Parts:
    """The number of rows of each part. Training rows come first, then validation rows, then test rows."""

    train: int
    validation: int = 0
    test: int = 0

    @property
    def total(self) -> int:
        """The number of all rows."""
        return self.train + self.validation + self.test

    @property
    def slices(self) -> dict[str, slice]:
        """The rows of each part, by the part's name."""
        first_test = self.train + self.validation
        return {
            "train": slice(0, self.train),
            "validation": slice(self.train, first_test),
            "test": slice(first_test, self.total),
        }

    @property
    def watched(self) -> str:
        """The part that evaluations use: validation if it has rows, otherwise test, otherwise train."""
        return next((name for name in ("validation", "test") if getattr(self, name)), "train")


@dataclass(frozen=True)
class Split:
    """The record that each row is.

    Attributes:
        order: [rows], record numbers: training rows first, then validation rows, then test rows.
        parts: the number of rows of each part.
    """

    order: RowIds
    parts: Parts

    @classmethod
    def of(
        cls, rows: int, settings: DataSettings, seed: int, *, tests: int = 0, together: int = 1
    ) -> "Split":
        """Draw the parts by a permutation that depends on the seed only, so that all parties agree.

        Args:
            tests: the number of records at the end that the source reserves for testing; 0 draws test rows.
            together: the number of consecutive records of one person. They stay in the same part.

        Raises:
            DataError: there are too few rows for the fractions.
        """
        units = (rows - tests) // together
        order = np.random.Generator(np.random.Philox(seed)).permutation(units)
        drawn = 0 if tests else round(units * settings.test_fraction)
        watched = round(rows // together * settings.validation_fraction)
        parts = [
            (np.sort(part)[:, None] * together + np.arange(together)).ravel()
            for part in (order[drawn + watched :], order[drawn : drawn + watched], order[:drawn])
        ]
        if not len(parts[0]) or not (tests or drawn) or (settings.validation_fraction and not watched):
            raise DataError(
                "VFL-2271",
                f"a run needs training rows, test rows and the validation rows that are set. Found {rows} "
                f"rows, too few for data.test_fraction = {settings.test_fraction} and "
                f"data.validation_fraction = {settings.validation_fraction}. Add rows, or change the "
                "fractions.",
            )
        parts[2] = np.concatenate([parts[2], np.arange(rows - tests, rows)])
        return cls(np.concatenate(parts), Parts(*map(len, parts)))

    @classmethod
    def of_dataset(cls, dataset: Dataset, settings: DataSettings, seed: int) -> "Split":
        """Draw all parts or, if the data set has its own test rows, only the validation rows."""
        rows = len(dataset.labels)
        return cls.of(rows, settings, seed, tests=dataset.tests, together=dataset.together)

    def digest(self) -> str:
        """Return a short digest of the order and the parts."""
        digest = hashlib.sha256(repr(self.parts).encode())
        digest.update(self.order.astype("<i8").tobytes())
        return digest.hexdigest()[:16]
