"""Which rows a run trains on, which it validates with, and which it keeps for the final test."""

import hashlib
from dataclasses import dataclass

import numpy as np

from vafl.data.dataset import Dataset, Records
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
        """The rows of each part, by its name."""
        tests = self.train + self.validation
        return {
            "train": slice(0, self.train),
            "validation": slice(self.train, tests),
            "test": slice(tests, self.total),
        }

    @property
    def watched(self) -> str:
        """The part that evaluations use: validation rows, else test rows, else the training rows."""
        return next((name for name in ("validation", "test") if getattr(self, name)), "train")


@dataclass(frozen=True)
class Split:
    """Which record is which row.

    Attributes:
        order: [rows], record numbers: training rows first, then validation rows, then test rows.
        parts: how many there are of each.
    """

    order: Records
    parts: Parts

    @classmethod
    def of(
        cls, rows: int, settings: DataSettings, seed: int, *, tests: int = 0, together: int = 1
    ) -> "Split":
        """Draw the parts by a permutation that depends on the seed alone.

        Args:
            tests: the number of records at the end that are test rows already; 0 draws test rows.
            together: the number of consecutive records of one person. They stay in one part.

        Raises:
            DataError: There are too few rows.
        """
        units = (rows - tests) // together
        order = np.random.Generator(np.random.Philox(seed)).permutation(units)
        drawn = 0 if tests else round(units * settings.test_fraction)
        watched = round(rows // together * settings.validation_fraction)
        parts = [
            (np.sort(own)[:, None] * together + np.arange(together)).ravel()
            for own in (order[drawn + watched :], order[drawn : drawn + watched], order[:drawn])
        ]
        if not len(parts[0]) or not (tests or drawn) or (settings.validation_fraction and not watched):
            raise DataError(
                "VFL-2271",
                f"rows to train on and rows to test on are needed. Found {rows} rows, too few for "
                f"data.test_fraction = {settings.test_fraction} and data.validation_fraction = "
                f"{settings.validation_fraction}.",
            )
        parts[2] = np.concatenate([parts[2], np.arange(rows - tests, rows)])
        return cls(np.concatenate(parts), Parts(*map(len, parts)))

    @classmethod
    def of_dataset(cls, dataset: Dataset, settings: DataSettings, seed: int) -> "Split":
        """Draw what the data set leaves open: all parts, or the validation rows alone."""
        rows = len(dataset.labels)
        return cls.of(rows, settings, seed, tests=dataset.tests, together=dataset.together)

    def digest(self) -> str:
        """Return a short digest of which record is which row."""
        digest = hashlib.sha256(repr(self.parts).encode())
        digest.update(self.order.astype("<i8").tobytes())
        return digest.hexdigest()[:16]
