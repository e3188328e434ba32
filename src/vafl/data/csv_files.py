"""Read CSV files: detect the separator, check encoding and column names, and parse in blocks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from vafl.errors import DataError

SEPARATORS = (",", ";", "\t", "|")
_PARQUET = b"PAR1"  # the first bytes of a Parquet file
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5")  # the first bytes of gzip and zstd, which polars decompresses
_BLOCK = 8_000_000  # bytes parsed at once
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # byte order marks
_UNDECODED = "\N{REPLACEMENT CHARACTER}"  # polars puts it in a column name for bytes that are not UTF-8
_DUPLICATE = "_duplicated_"  # polars appends it to the name of a second column of the same name


def is_parquet(path: Path) -> bool:
    """Return whether the file is Parquet, by its suffix or by its first bytes."""
    return path.suffix == ".parquet" or _first_bytes(path, 4) == _PARQUET


def _first_bytes(path: Path, count: int) -> bytes:
    """Return the first `count` bytes, or fewer if the file is shorter."""
    with path.open("rb") as file:
        return file.read(count)


def is_packed(path: Path) -> bool:
    """Return whether the file is compressed."""
    return _first_bytes(path, 2) in _COMPRESSED


def read_blocks(
    path: Path, schema: Mapping[str, pl.DataType], columns: Sequence[str], separator: str
) -> Iterator[pl.DataFrame]:
    """Read these columns of a CSV as text, in blocks of about 8 MB of lines.

    This needs less memory than polars' streaming reader: 90 MB instead of 500 MB for a file of 560 MB.
    """
    has_header = True
    for block in _blocks(path):
        lines = pl.scan_csv(
            block,
            has_header=has_header,
            schema=schema,
            separator=separator,
            raise_if_empty=False,
            missing_columns="insert",  # the first line of a block may have fewer fields than the header
        )
        yield lines.select(columns).collect()
        has_header = False


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the file in blocks of complete lines. A line break inside quotes does not end a line."""
    rest = b""
    with path.open("rb") as file:
        while read := file.read(_BLOCK):
            # A block always starts outside quotes, so a line break after an even number of quotes ends a
            # line. An escaped quote ("") counts as two and does not change that.
            block = rest + read
            content = np.frombuffer(block, np.uint8)
            breaks = np.flatnonzero(content == ord("\n"))
            quotes = np.flatnonzero(content == ord('"'))
            ends = breaks[np.searchsorted(quotes, breaks) % 2 == 0]
            complete = int(ends[-1]) + 1 if len(ends) else 0
            rest = block[complete:]
            if complete:
                yield block[:complete]
    if rest:
        yield rest


def header_of(path: Path) -> tuple[str, list[str]]:
    """Return the separator and the column names of a file.

    The separator is the one that splits the first line into the most columns.

    Raises:
        DataError: the file is neither CSV nor Parquet, or its column names are not unique UTF-8.
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
            "VFL-2091",
            f'"{path}" must be a CSV in UTF-8 with a header line, or a Parquet file. Found: {cause}. Convert '
            "it to one of these formats.",
        ) from error
    separator, columns = max(names.items(), key=lambda pair: len(pair[1]))
    check_names(columns, path, separator)
    return separator, columns


def not_utf_8(path: Path, found: str) -> DataError:
    """Return the error for a CSV in another encoding, with the command that converts it."""
    encoding = "UTF-16" if _first_bytes(path, 2) in _UTF_16 else "WINDOWS-1252"
    copy = f"{path.stem}-utf8{path.suffix}"
    return DataError(
        "VFL-2092",
        f'"{path}" must be UTF-8 text. Found {found}. Convert it: '
        f"`iconv -f {encoding} -t UTF-8 {path.name} > {copy}`.",
    )


def check_names(columns: Iterable[str], path: Path, separator: str) -> None:
    """Raise DataError if polars had to change a column name: it is not UTF-8, or not unique.

    Under its changed name, a second copy of the label column would become a feature and reveal the label.
    """
    if undecoded := [name for name in columns if _UNDECODED in name]:
        raise not_utf_8(path, f'a column "{undecoded[0]}", whose name is not')
    if any(_DUPLICATE in name for name in columns):
        # The file may really have a name with "_duplicated_" in it, so look at the header itself.
        lines = pl.scan_csv(path, has_header=False, infer_schema=False, separator=separator, glob=False)
        header = pl.Series(lines.head(1).collect().row(0))
        if twice := header.filter(header.is_duplicated()).to_list():
            raise DataError(
                "VFL-2093",
                f'"{path}": column names must be unique. Found "{twice[0]}" more than once. Rename one of '
                "these columns. If the file has no header line, add one.",
            )
