"""Read the labels and the weights of the records from the server's table."""

import numpy as np
import polars as pl

from vafl.arrays import Doubles, Labels
from vafl.data.encoding import as_names, as_numbers
from vafl.data.tables import POSITION, Table
from vafl.errors import ConfigError, DataError

_MOST_CLASSES = 1000


def label_classes(table: Table, task: str) -> tuple[str, ...] | None:
    """Return the sorted class names, numbers in numeric order; None for a regression or without labels.

    Raises:
        DataError: there are fewer than 2 or more than 1,000 classes.
    """
    if task == "regression" or not table.settings.label:
        return None
    label = table.settings.label
    distinct = [_names(table, batch).unique().drop_nulls() for batch in table.all_batches([label])]
    names = pl.concat(distinct).unique().to_list()
    if not 2 <= len(names) <= _MOST_CLASSES:
        hint = (
            "Check that it is the right column."
            if len(names) < 2
            else 'For numbers, set data.task = "regression".'
        )
        raise DataError(
            "VFL-2211",
            f'"{table.path}": labels must have 2 to {_MOST_CLASSES} classes. Found {len(names):,} in '
            f'"{label}". {hint}',
        )
    return tuple(sorted(names, key=_in_order))


def read_labels(table: Table, wanted: pl.DataFrame, classes: tuple[str, ...] | None) -> Labels:
    """Return the labels [rows] of the wanted records: class numbers, or the values of a regression.

    Args:
        wanted: `id` and POSITION of every row.
        classes: the class names; None for a regression.

    Raises:
        ConfigError: no label column is set.
        DataError: a label is missing or unknown, or the table has changed since it was aligned.
    """
    label = table.settings.label
    if not label:
        raise ConfigError(
            "VFL-2212",
            f"training needs {table.section}.label, the column to predict. Found none. Set it to the "
            "name of the label column.",
        )
    labels: Labels = np.zeros(wanted.height, dtype=np.float32 if classes is None else np.int64)
    lines = 0
    for batch in table.batches([label], wanted):
        if classes is None:
            values = as_numbers(batch.select(table.values(label, table.schema[label])).to_series())
            unknown = np.isnan(values)
        else:
            names = _names(table, batch)
            numbers = {name: number for number, name in enumerate(classes)}
            values = names.replace_strict(numbers, default=-1, return_dtype=pl.Int64).fill_null(-1).to_numpy()
            unknown = values < 0
        if unknown.any():
            expected = "a number" if classes is None else f"one of {', '.join(classes[:5])}"
            value = batch[label].filter(pl.Series(unknown))[0]
            again = ", and run `vafl align` again" if table.settings.id else ""
            raise DataError(
                "VFL-2213",
                f'"{table.path}": every record needs a label: {expected}. Found {int(unknown.sum()):,} '
                f'records without one, such as {value!r} in "{label}". Drop those lines{again}.',
            )
        labels[batch[POSITION].to_numpy()] = values
        lines += batch.height
    table.check_found(lines, wanted)
    return labels


def read_weights(table: Table, wanted: pl.DataFrame) -> Doubles | None:
    """Return the weight of each record in the training loss, [rows]; None without a weight column.

    Args:
        wanted: `id` and POSITION of every row.

    Raises:
        DataError: a weight is missing, negative or not a finite number.
    """
    column = table.settings.weight
    if not column:
        return None
    weights = np.zeros(wanted.height)
    for batch in table.batches([column], wanted):
        values = as_numbers(batch.select(table.values(column, table.schema[column])).to_series())
        wrong = ~(values >= 0)  # true for NaN too
        if wrong.any():
            value = batch[column].filter(pl.Series(wrong))[0]
            raise DataError(
                "VFL-2214",
                f'"{table.path}": weights must be numbers of 0 or more. Found {int(wrong.sum()):,} that are '
                f'not, such as {value!r} in "{column}". Correct them, or choose another column.',
            )
        weights[batch[POSITION].to_numpy()] = values
    return weights


def _names(table: Table, batch: pl.DataFrame) -> pl.Series:
    """Return the class names in a batch's label column."""
    label = table.settings.label
    return as_names(batch.select(table.values(label, table.schema[label])).to_series())


def _in_order(name: str) -> tuple[float, str]:
    """Return a sort key: numbers first and by value, then other names by text."""
    try:
        return float(name), name
    except ValueError:
        return np.inf, name
