"""What the label column of a table seems to ask for: classes, or numbers."""

from pathlib import Path

import polars as pl

from vafl.data.encoding import as_names
from vafl.errors import DataError

_MOST_NUMBERED_CLASSES = 20  # numbers of more different values are measured, not numbers of classes


def _no_numbers(column: pl.Series) -> str:
    """Why a column's values cannot be used as numbers; empty if they can."""
    numbers = column.cast(pl.Float32, strict=False)
    lacking = column.filter(~numbers.is_finite().fill_null(value=False))
    if not len(lacking):
        return "" if column.dtype.is_numeric() or column.dtype == pl.Boolean else "it is text"
    shown = lacking.drop_nulls()
    such = f', such as "{str(shown[0])[:20]}"' if len(shown) else ""
    if len(lacking) > len(column) / 2 and len(shown):
        return f"it is text{such}"
    return f"{len(lacking):,} of {len(column):,} values are missing or no numbers{such}"


def task_of(label: pl.Series, csv: Path) -> tuple[str, str]:
    """Classification or regression, and what the label is like.

    Raises:
        DataError: it cannot be learnt.
    """
    values = label.n_unique()
    if values < 2:
        raise DataError(
            "VFL-2071",
            f'"{csv}": a label needs two different values or more. Found {values} in {len(label):,} lines of '
            f'"{label.name}". Name another --label, or bring more lines.',
        )
    about = f"{values:,} different values"
    if label.cast(pl.Float64, strict=False).n_unique() > _MOST_NUMBERED_CLASSES:
        task, wrong = "regression", _no_numbers(label)
    else:
        task, wrong = "classification", f"{gaps:,} are missing" if (gaps := label.null_count()) else ""
        if values > max(_MOST_NUMBERED_CLASSES, len(label) / 2):
            wrong = f"most of the {len(label):,} lines have a text of their own"
        if values <= _MOST_NUMBERED_CLASSES:
            about += f": {', '.join(as_names(label.drop_nulls().unique().sort()))}"
    if wrong:
        raise DataError(
            "VFL-2072",
            f'"{csv}": every label must be a number, or there must be few. In "{label.name}", {wrong}. '
            "Drop those lines, or name another --label.",
        )
    return task, about
