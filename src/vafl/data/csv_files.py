"""CSV files as people have them: their separator, their coding, the names of their columns."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from vafl.errors import DataError

SEPARATORS = (",", ";", "\t", "|")
_PARQUET = b"PAR1"  # how such a file begins
_PACKED = (b"\x1f\x8b", b"\x28\xb5")  # gzip and zstd, which polars unpacks
_BLOCK = 8_000_000  # bytes parsed at once
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # what polars makes of a name's bytes that are no UTF-8
_AGAIN = "_duplicated_"  # what polars puts behind a name that was there before


def is_parquet(path: Path) -> bool:
    """Whether that is what the file is called, or is."""
    return path.suffix == ".parquet" or _first_bytes(path, 4) == _PARQUET


def _first_bytes(path: Path, count: int) -> bytes:
    """As many as the file has, at most `count`."""
    with path.open("rb") as file:
        return file.read(count)


def is_packed(path: Path) -> bool:
    """Whether the file is compressed."""
    return _first_bytes(path, 2) in _PACKED


def read_blocks(
    path: Path, schema: Mapping[str, pl.DataType], columns: Sequence[str], separator: str
) -> Iterator[pl.DataFrame]:
    """Read these columns of a CSV as text, some megabytes of lines at a time.

    polars has a streaming reader, which holds much more: 500 MB of a file of 560 MB, against 90 MB here.
    """
    has_header = True
    for block in _blocks(path):
        lines = pl.scan_csv(
            block,
            has_header=has_header,
            schema=schema,
            separator=separator,
            raise_if_empty=False,
            missing_columns="insert",  # where the first line of a block is short
        )
        yield lines.select(columns).collect()
        has_header = False


def _blocks(path: Path) -> Iterator[bytes]:
    """The file in blocks of whole lines. A line end inside quotes ends no line."""
    begun = b""
    with path.open("rb") as file:
        while read := file.read(_BLOCK):
            block = begun + read
            seen = np.frombuffer(block, np.uint8)
            ends = np.flatnonzero(seen == ord("\n"))
            quotes = np.flatnonzero(seen == ord('"'))
            outside = ends[np.searchsorted(quotes, ends) % 2 == 0]
            whole = int(outside[-1]) + 1 if len(outside) else 0
            begun = block[whole:]
            if whole:
                yield block[:whole]
    if begun:
        yield begun


def header_of(path: Path) -> tuple[str, list[str]]:
    """Return the separator that a file's first line seems to have, and the names of its columns.

    Raises:
        DataError: It is neither a CSV nor a Parquet file.
    """
    try:
        if is_parquet(path):
            return ",", pl.scan_parquet(path, glob=False).collect_schema().names()
        names = {
            mark: pl.scan_csv(path, infer_schema=False, separator=mark, glob=False).collect_schema().names()
            for mark in SEPARATORS
        }
    except (pl.exceptions.PolarsError, OSError) as error:
        cause = str(error).partition("\n")[0]
        raise DataError(
            "VFL-2091", f'"{path}" must be a CSV in UTF-8 with a header line, or a Parquet file. {cause}.'
        ) from error
    separator, columns = max(names.items(), key=lambda pair: len(pair[1]))
    check_names(columns, path, separator)
    return separator, columns


def not_utf_8(path: Path, found: str) -> DataError:
    """Return the error for a CSV in another coding, with the command that converts it."""
    coding = "UTF-16" if _first_bytes(path, 2) in _UTF_16 else "WINDOWS-1252"
    copy = f"{path.stem}-utf8{path.suffix}"
    return DataError(
        "VFL-2092",
        f'"{path}" must be UTF-8 text. Found {found}. Convert it: '
        f"`iconv -f {coding} -t UTF-8 {path.name} > {copy}`.",
    )


def check_names(columns: Iterable[str], path: Path, separator: str) -> None:
    """Raises DataError if polars calls a column otherwise than the file: it is no UTF-8, or one of two.

    A second column of the label's name would be a feature, and tell the label.
    """
    if unread := [name for name in columns if _UNKNOWN in name]:
        raise not_utf_8(path, f'a column "{unread[0]}", whose name is not')
    if any(_AGAIN in name for name in columns):
        lines = pl.scan_csv(path, has_header=False, infer_schema=False, separator=separator, glob=False)
        header = pl.Series(lines.head(1).collect().row(0))
        if twice := header.filter(header.is_duplicated()).to_list():
            raise DataError(
                "VFL-2093",
                f'"{path}": every column needs a name of its own. Found "{twice[0]}" more than once. Rename '
                "one of them; a file without a line of names needs one.",
            )
