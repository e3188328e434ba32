"""Load Default of Credit Card Clients (UCI 350): predict who will not pay next month."""

from pathlib import Path

import polars as pl

from vafl.data.dataset import Dataset, digest_of
from vafl.data.datasets.public import plain_or_gzipped, require_count
from vafl.errors import DataError

_FILE = "UCI_Credit_Card.csv"
_ROWS = 30_000
_LABELS = ("default.payment.next.month", "default payment next month")
_SOURCE = "the UCI Machine Learning Repository (data set 350), saved as CSV with one header line"


def load_credit_default(folder: Path, rows: int = _ROWS) -> Dataset:
    """Read folder/credit_default: 23 numbers for each client. The file must have `rows` clients."""
    path = plain_or_gzipped("Default of Credit Card Clients", folder / "credit_default" / _FILE, _SOURCE)
    try:
        table = pl.read_csv(path, infer_schema_length=None)
        label = next(name for name in _LABELS if name in table.columns)
        columns = table.drop("ID", label).cast(pl.Float32)
        labels = table[label].cast(pl.Int64).to_numpy()
    except (pl.exceptions.PolarsError, OSError, StopIteration) as error:
        raise DataError(
            "VFL-2131",
            f'"{path}" must be a CSV of numbers with the columns ID and {_LABELS[0]}. Found: {error} '
            "Download it again.",
        ) from error
    require_count(path, "clients", table.height, rows)
    features = columns.to_numpy()
    return Dataset(
        name="credit_default",
        features=features,
        labels=labels,
        columns=tuple(columns.columns),
        classes=("paid", "default"),
        digest=digest_of(features),
    )
