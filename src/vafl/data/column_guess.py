"""Guess from a label column whether the task is classification or regression."""

from pathlib import Path

import polars as pl

from vafl.data.encoding import as_names
from vafl.errors import DataError

_MOST_NUMBERED_CLASSES = 20  # with more distinct numbers, they are measurements and not class numbers


def _no_numbers(column: pl.Series) -> str:
    """Return why a column's values cannot be used as numbers; "" if they can."""
    numbers = column.cast(pl.Float32, strict=False)
    wrong = column.filter(~numbers.is_finite().fill_null(value=False))
    if not len(wrong):
        return "" if column.dtype.is_numeric() or column.dtype == pl.Boolean else "the values are text"
    present = wrong.drop_nulls()
    example = f', such as "{str(present[0])[:20]}"' if len(present) else ""
    if len(wrong) > len(column) / 2 and len(present):
        return f"the values are text{example}"
    return f"{len(wrong):,} of {len(column):,} values are missing or not numbers{example}"


def task_of(label: pl.Series, csv: Path) -> tuple[str, str]:
    """Return `classification` or `regression`, and a short description of the label's values.

    Raises:
        DataError: the label has fewer than two values, or values that neither task can use.
    """
    values = label.n_unique()
    if values < 2:
        raise DataError(
            "VFL-2071",
            f'"{csv}": a label must have at least two different values. Found {values} in {len(label):,} '
            f'lines of "{label.name}". Choose another --label, or add lines.',
        )
    about = f"{values:,} different values"
    if label.cast(pl.Float64, strict=False).n_unique() > _MOST_NUMBERED_CLASSES:
        task, wrong = "regression", _no_numbers(label)
    else:
        task, wrong = "classification", f"{gaps:,} are missing" if (gaps := label.null_count()) else ""
        if values > max(_MOST_NUMBERED_CLASSES, len(label) / 2):
            wrong = f"most of the {len(label):,} lines have different text"
        if values <= _MOST_NUMBERED_CLASSES:
            about += f": {', '.join(as_names(label.drop_nulls().unique().sort()))}"
    if wrong:
        raise DataError(
            "VFL-2072",
            f'"{csv}": labels must be numbers, or few different classes, and none missing. Found in '
            f'"{label.name}": {wrong}. Drop those lines, or choose another --label.',
        )
    return task, about
