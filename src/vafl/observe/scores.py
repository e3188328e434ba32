"""A file of scores with one line per record.

It is written in chunks to a temporary file, which replaces the target at the end. Scores are about people, so
both files are private to their owner from the first byte on.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import polars as pl

from vafl.arrays import States
from vafl.errors import ConfigError
from vafl.files import make_private_file, make_private_folder, sync_folder

ENDINGS = (".csv", ".parquet")


class ScoreFile:
    """Writes a table in chunks. Use it as a context manager. If the block fails, no new file is left.

    Args:
        path: A path that ends in .csv or .parquet. An existing file is replaced at the end.

    Raises:
        ConfigError: The path has another ending.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix not in ENDINGS:
            raise ConfigError(
                "VFL-8041", f'the file of scores must end in {" or ".join(ENDINGS)}. Found "{path}".'
            )
        self.path, self._chunks = path, 0
        self._draft = path.with_name(path.name + ".part")
        self._parts = path.with_name(path.name + ".parts")  # Parquet cannot be appended to
        self._file: BinaryIO | None = None

    def __enter__(self) -> "ScoreFile":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.suffix == ".csv":
            make_private_file(self._draft)
            self._file = self._draft.open("wb")
        else:
            shutil.rmtree(self._parts, ignore_errors=True)
            make_private_folder(self._parts)
        return self

    def append(self, table: pl.DataFrame) -> None:
        """Add the rows of a table."""
        if self._file is not None:
            table.write_csv(self._file, include_header=not self._chunks)
        else:
            table.write_parquet(self._parts / f"{self._chunks:09}.parquet")
        self._chunks += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._file is not None:
                self._file.close()
            elif error is None:
                make_private_file(self._draft)
                pl.scan_parquet(sorted(self._parts.iterdir()), glob=False).sink_parquet(self._draft)
            if error is None:
                _sync(self._draft)
                self._draft.replace(self.path)
                sync_folder(self.path.parent)
        finally:
            self._draft.unlink(missing_ok=True)
            shutil.rmtree(self._parts, ignore_errors=True)


def missing_column(states: States, parties: Sequence[str], words: Sequence[str], answered: int) -> pl.Series:
    """Return a column with the parties that did not answer and why, such as `shop: late, bank: declined`.

    A row is empty if all parties answered.

    Args:
        states: [rows, parties], indices into `words`.
        words: the name of each state.
        answered: the state of a party that answered.
    """
    # There are few different combinations of states, so build each text once.
    kinds, places = np.unique(states, axis=0, return_inverse=True)
    texts = [
        ", ".join(
            f"{party}: {words[state]}"
            for party, state in zip(parties, kind, strict=True)
            if state != answered
        )
        for kind in kinds.tolist()
    ]
    return pl.Series("missing", texts, dtype=pl.String).gather(places.ravel())


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
