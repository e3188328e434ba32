"""CSV files as people have them: which mark separates their fields, and whether they are UTF-8."""

from collections.abc import Iterable
from pathlib import Path

import polars as pl

from vafl.errors import DataError

SEPARATORS = (",", ";", "\t", "|")
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # what polars makes of a name's bytes that are no UTF-8


def read_csv(path: Path) -> pl.DataFrame:
    """All of a CSV, with types by all of its lines.

    Raises:
        DataError: it is none.
    """
    try:
        return pl.read_csv(path, separator=read_header(path)[0], infer_schema_length=None, glob=False)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f'"{path}" must be a CSV with a header line, in UTF-8. {error}') from error


def read_header(path: Path) -> tuple[str, list[str]]:
    """The separator that a CSV's first line seems to have, and the names of the columns."""
    names = {
        mark: pl.scan_csv(path, infer_schema=False, separator=mark, glob=False).collect_schema().names()
        for mark in SEPARATORS
    }
    separator, columns = max(names.items(), key=lambda pair: len(pair[1]))
    check_utf8(columns, path)
    return separator, columns


def check_utf8(columns: Iterable[str], path: Path) -> None:
    """Raises DataError if a column's name was no UTF-8: it would be called otherwise than it is."""
    if unread := [name for name in columns if _UNKNOWN in name]:
        raise DataError(
            f'"{path}" must be UTF-8 text. Found a column "{unread[0]}", whose name is not. Save it '
            "as UTF-8; for a file from an old spreadsheet: `iconv -f WINDOWS-1252 -t UTF-8`."
        )
