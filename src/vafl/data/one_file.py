"""Divide the columns of one CSV or Parquet file among several parties.

The label holder gets the label column, and each client gets some of the other columns. A record's id is its
line number, so no alignment is needed.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from vafl.data.alignment.rows import Alignment
from vafl.data.columns import match_columns, no_column
from vafl.data.csv_files import header_of
from vafl.data.encoding import is_usable
from vafl.data.labels import label_classes
from vafl.data.settings import LABEL_HOLDER, DataSettings, PartitionSettings
from vafl.data.source_settings import TableSettings
from vafl.data.tables import Table
from vafl.errors import ConfigError, DataError


def deal(
    settings: DataSettings, partition: PartitionSettings, *, labelled: bool = True
) -> tuple[DataSettings, dict[str, TableSettings]]:
    """Return the data settings with the clients' names, and the source settings of each party.

    Args:
        labelled: whether the file must have the label column; predictions do not need it.

    Raises:
        ConfigError: there are fewer columns than clients.
        DataError: the file or a column is missing.
    """
    path = Path(settings.path)
    if not path.is_file():
        raise DataError(
            "VFL-2221", f'data.path must be a CSV or Parquet file. Found no file "{path}". Correct the path.'
        )
    separator, columns = header_of(path)
    for needed in (settings.label, settings.weight) if labelled else ():
        if needed and needed not in columns:
            raise no_column(path, needed, columns)
    kept = [name for name in columns if name not in ("", settings.label, settings.weight)]
    ignored = match_columns(kept, {"ignore": settings.ignore}, "data")["ignore"] if settings.ignore else []
    kept = [name for place, name in enumerate(kept) if place not in set(ignored)]
    table = TableSettings(str(path), "", separator=separator)
    clients = {
        name: replace(table, features=tuple(features)) for name, features in _shares(kept, partition).items()
    }
    label, weight = (name if name in columns else "" for name in (settings.label, settings.weight))
    # The label holder has no features: all other columns belong to the clients.
    holder = replace(table, label=label, weight=weight, ignore=("*",))
    return replace(settings, parties=tuple(clients)), {LABEL_HOLDER: holder, **clients}


def _shares(columns: list[str], partition: PartitionSettings) -> dict[str, list[str]]:
    """Return each client's columns: by [partition.groups], or divided evenly."""
    if partition.groups:
        matched = match_columns(columns, partition.groups)
        return {name: [columns[place] for place in places] for name, places in matched.items()}
    if partition.clients > len(columns):
        raise ConfigError(
            "VFL-2222",
            f"partition.clients must be at most {len(columns)}, the number of feature columns. Found "
            f"{partition.clients}. Use fewer clients.",
        )
    bounds = np.linspace(0, len(columns), partition.clients + 1).round().astype(int)
    return {
        f"client-{number}": columns[bounds[number - 1] : bounds[number]]
        for number in range(1, partition.clients + 1)
    }


def number_lines(table: Table, task: str, *, labelled: bool) -> Alignment:
    """Return an alignment in which line n of the file is row n at every party.

    The token is a digest of all columns except label and weight. It identifies the file. Other parties see
    it, so it must not depend on the labels.

    Args:
        table: the label holder's table.
        labelled: whether the labels, and so their classes, are needed.
    """
    label, secret = table.settings.label, (table.settings.label, table.settings.weight)
    columns = [name for name, kind in table.schema.items() if is_usable(kind)]
    digest, rows = hashlib.sha256(repr([name for name in columns if name not in secret]).encode()), 0
    # Read all columns: polars reports lines with missing or extra fields only then.
    for batch in table.all_batches(columns):
        digest.update(batch.drop(secret, strict=False).write_csv(include_header=False).encode())
        rows += batch.height
    if not rows:
        raise DataError(
            "VFL-2223", f'"{table.path}": a table must have records. Found none. Check the path of the table.'
        )
    ids = pl.Series("id", np.arange(rows)).cast(pl.String)
    classes = label_classes(table, task) if labelled else None
    return Alignment(digest.hexdigest()[:32], rows, classes, ids, np.arange(rows), label=label)
