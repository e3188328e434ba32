"""Load Parkinson's Disease Classification (UCI 470): speech of 252 people, three recordings each."""

from pathlib import Path

import polars as pl

from vafl.data.dataset import Dataset, digest_of
from vafl.data.datasets.public import plain_or_gzipped
from vafl.errors import DataError

_FILE = "pd_speech_features.csv"
_SOURCE = "the UCI Machine Learning Repository (data set 470)"
_ROWS, _COLUMNS, _SUBJECTS, _RECORDINGS = 756, 755, 252, 3


def load_parkinson(folder: Path) -> Dataset:
    """Read folder/parkinson. Splits keep a person's recordings together, because they are similar.

    The file may have a line of group names above its header, like the repository's copy.
    """
    path = plain_or_gzipped("Parkinson's speech features", folder / "parkinson" / _FILE, _SOURCE)
    table = _read(path)
    if table.shape != (_ROWS, _COLUMNS) or set(_recordings(table)) != {_RECORDINGS}:
        raise DataError(
            "VFL-2161",
            f'"{path}" must have {_ROWS} rows of {_SUBJECTS} people, {_RECORDINGS} each, and {_COLUMNS} '
            f"columns. Found {table.height} rows and {table.width} columns. Download it again.",
        )
    table = table.sort("id", maintain_order=True)
    columns = table.drop("id", "class").cast(pl.Float32)
    features = columns.to_numpy()
    return Dataset(
        name="parkinson",
        features=features,
        labels=table["class"].cast(pl.Int64).to_numpy(),
        columns=tuple(columns.columns),
        classes=("control", "patient"),
        together=_RECORDINGS,
        digest=digest_of(features),
    )


def _recordings(table: pl.DataFrame) -> list[int]:
    """Return the number of rows of each person."""
    return table["id"].value_counts()["count"].to_list()


def _read(path: Path) -> pl.DataFrame:
    try:
        first = pl.read_csv(path, n_rows=1, has_header=False, infer_schema=False)
        skipped = 0 if "id" in first.row(0) else 1
        table = pl.read_csv(path, skip_rows=skipped, infer_schema_length=None)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(
            "VFL-2162", f'"{path}" must be a CSV with a header line. Found: {error} Download it again.'
        ) from error
    if missing := {"id", "class"} - set(table.columns):
        raise DataError(
            "VFL-2163",
            f'"{path}" must have the columns id and class. Missing: {", ".join(sorted(missing))}. Download '
            "it again.",
        )
    return table
