"""Convert record ids to canonical text, and check that none is missing or duplicated.

Ids are compared as text and never repaired. "007" and 7 are different ids: a guess that they are the same
could join the records of two people.
"""

import polars as pl

from vafl.errors import DataError

_SHOWN = 3


def canonical_ids(column: pl.Series, source: str) -> pl.Series:
    """Return the ids as text: integers in digits, text unchanged.

    Args:
        source: the file's path, for error messages.

    Raises:
        DataError: ids are neither text nor integers, or one is missing or duplicated.
    """
    kind = column.dtype
    if not (kind.is_integer() or kind in (pl.String, pl.Categorical, pl.Enum)):
        raise DataError(
            "VFL-2031",
            f'"{source}": record ids must be text or integers. Found {kind} in "{column.name}". Write them '
            "as text, in the same format at every party.",
        )
    ids = column.cast(pl.String).rename("id")
    if missing := ids.null_count() + int((ids == "").sum()):
        raise DataError(
            "VFL-2032",
            f'"{source}": every record needs an id. Found {missing:,} without one in "{column.name}". '
            "Drop those rows, or name another id column.",
        )
    if ids.is_empty():
        raise DataError("VFL-2033", f'"{source}": a source must have records. Found none. Check its path.')
    if ids.n_unique() < len(ids):
        twice = ids.filter(ids.is_duplicated()).unique(maintain_order=True)
        raise DataError(
            "VFL-2034",
            f'"{source}": a record\'s id must be unique. Found {len(twice):,} in "{column.name}" more than '
            f"once: {', '.join(twice.head(_SHOWN).to_list())}. Keep one row per id.",
        )
    return ids


def loosened(ids: pl.Series) -> pl.Series:
    """Return ids in lower case, without surrounding whitespace and leading zeros.

    Use the result only to suggest that two formats differ, never to join records.
    """
    return ids.str.strip_chars().str.to_lowercase().str.replace(r"^0+([0-9])", "$1")
