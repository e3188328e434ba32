"""Parkinson's Disease Classification (UCI 470): speech features of 252 people, three recordings each."""

from pathlib import Path

import numpy as np
import polars as pl

from vafl.data.dataset import Dataset, split_rows
from vafl.data.public import plain_or_gzipped
from vafl.errors import DataError

_FILE = "pd_speech_features.csv"
_SOURCE = "the UCI Machine Learning Repository (data set 470)"
_ROWS, _COLUMNS, _SUBJECTS = 756, 755, 252


def load_parkinson(folder: Path, test_fraction: float, seed: int) -> Dataset:
    """Reads folder/parkinson; whole people are held out, as their recordings are alike.

    The file may have the row of group names above its header that the repository's copy has.
    """
    path = plain_or_gzipped("Parkinson's speech features", folder / "parkinson" / _FILE, _SOURCE)
    table = _read(path)
    if table.shape != (_ROWS, _COLUMNS) or table["id"].n_unique() != _SUBJECTS:
        raise DataError(
            f'"{path}" must have {_ROWS} rows of {_SUBJECTS} people and {_COLUMNS} columns. Found '
            f"{table.height} rows and {table.width} columns. Download it again."
        )
    people, of_row = np.unique(table["id"].to_numpy(), return_inverse=True)
    _, held_out = split_rows(len(people), test_fraction, seed)
    is_test = np.isin(of_row, held_out)
    train, test = np.flatnonzero(~is_test).tolist(), np.flatnonzero(is_test).tolist()
    features = table.drop("id", "class").cast(pl.Float32)
    labels = table["class"].cast(pl.Int64).to_numpy()
    return Dataset.of_rows(
        "parkinson",
        features.to_numpy(),
        labels,
        train,
        test,
        columns=tuple(features.columns),
        classes=("control", "patient"),
    )


def _read(path: Path) -> pl.DataFrame:
    try:
        first = pl.read_csv(path, n_rows=1, has_header=False, infer_schema=False)
        skipped = 0 if "id" in first.row(0) else 1
        table = pl.read_csv(path, skip_rows=skipped, infer_schema_length=None)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f'"{path}" must be a CSV with a header line. {error} Download it again.') from error
    if missing := {"id", "class"} - set(table.columns):
        raise DataError(
            f'"{path}" must have the columns id and class. Missing: {", ".join(sorted(missing))}.'
        )
    return table
