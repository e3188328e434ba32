"""Record ids: one canonical text for each, none missing, none twice.

Ids are compared as text and never repaired: "007" and 7 are two ids, since guessing that they are one
could join the records of two people.
"""

import polars as pl

from vafl.errors import DataError

_SHOWN = 3


def canonical_ids(column: pl.Series, source: str) -> pl.Series:
    """Ids as text: whole numbers in digits, text as it is.

    Args:
        source: the file, for messages.

    Raises:
        DataError: ids are neither text nor whole numbers, or missing, or not unique.
    """
    kind = column.dtype
    if not (kind.is_integer() or kind in (pl.String, pl.Categorical, pl.Enum)):
        raise DataError(
            "VFL-2031",
            f'"{source}": record ids must be text or whole numbers. Found {kind} in "{column.name}". Write '
            "them as text, the same way at every party.",
        )
    ids = column.cast(pl.String).rename("id")
    if missing := ids.null_count() + int((ids == "").sum()):
        raise DataError(
            "VFL-2032",
            f'"{source}": every record needs an id. Found {missing:,} without one in "{column.name}". '
            "Drop those rows, or name another id column.",
        )
    if ids.is_empty():
        raise DataError("VFL-2033", f'"{source}": a table needs records. Found none.')
    if ids.n_unique() < len(ids):
        twice = ids.filter(ids.is_duplicated()).unique(maintain_order=True)
        raise DataError(
            "VFL-2034",
            f'"{source}": a record\'s id must be unique. Found {len(twice):,} in "{column.name}" more than '
            f"once: {', '.join(twice.head(_SHOWN).to_list())}. Keep one row for each.",
        )
    return ids


def loosened(ids: pl.Series) -> pl.Series:
    """Ids without blanks around them, leading zeros and case: for advice about formats, never for joining."""
    return ids.str.strip_chars().str.to_lowercase().str.replace(r"^0+([0-9])", "$1")
