"""The alignment file: which row of the common table each of a party's records is.

`vafl align` writes the file and training reads it. It is private to the party, like the data itself: it
shows which of the party's ids other parties hold too.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import numpy as np
import polars as pl

from vafl.arrays import Integers
from vafl.errors import DataError
from vafl.files import write_atomically

_KEY = "vafl.alignment"
_VERSION = 4
_HELD = "held by "  # prefix of the columns of `holders`; the client's name follows
_TOKEN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, eq=False)
class Alignment:
    """A party's records, with the row numbers that all parties agree on.

    Attributes:
        token: 32 hex digits that identify the alignment. All its parties have the same token.
        rows: the number of rows of the common table.
        classes: the class names of the label. Clients derive the width of their embeddings from their number.
            None for regression.
        ids: the canonical ids of this party's records that are rows.
        numbers: the row number of each id, int64, ascending.
        holders: at the label holder: client -> whether it has each record too, boolean, as long as `ids`.
        label: the name of the label column, which no party may use as a feature; empty without labels.
        with_local: whether the label holder's table has features, so that the run has a `LOCAL_CLIENT`.
    """

    token: str
    rows: int
    classes: tuple[str, ...] | None
    ids: pl.Series
    numbers: Integers
    holders: Mapping[str, pl.Series] = field(default_factory=dict)
    label: str = ""
    with_local: bool = False

    def __post_init__(self) -> None:
        if not _TOKEN.fullmatch(self.token):
            raise DataError(
                "VFL-2051", f"an alignment's token must be 32 hex digits. Found {self.token[:40]!r}."
            )
        if self.classes is not None and len(set(self.classes)) < max(2, len(self.classes)):
            raise DataError(
                "VFL-2052", f"an alignment needs at least two classes, all different. Found {self.classes}."
            )
        if self.ids.dtype != pl.String or self.ids.null_count() or self.ids.n_unique() != len(self.ids):
            raise DataError(
                "VFL-2053", f"an alignment's ids must be text, unique and not missing. Found {self.ids!r}."
            )
        if len(self.ids) != len(self.numbers):
            raise DataError(
                "VFL-2054",
                f"an alignment needs one row number for each id. Found {len(self.ids):,} ids and "
                f"{len(self.numbers):,} numbers.",
            )
        if not _are_rows(self.numbers, self.rows):
            raise DataError(
                "VFL-2055", f"row numbers must be int64, ascending and from 0 to {self.rows - 1:,}."
            )
        for name, held in self.holders.items():
            if held.dtype != pl.Boolean or held.null_count() or len(held) != len(self.ids):
                raise DataError(
                    "VFL-2056",
                    f"an alignment must say for each record whether {name} has it: true or false. Found "
                    f"{held!r}.",
                )

    def write(self, path: Path) -> None:
        """Write one Parquet file that only its owner can read.

        The write is atomic: after a crash, the file is either the old one or the new one.
        """
        metadata = {
            "version": _VERSION,
            "token": self.token,
            "rows": self.rows,
            "label": self.label,
            "with_local": self.with_local,
            "classes": self.classes,
        }
        content = BytesIO()
        holders = {_HELD + name: held for name, held in self.holders.items()}
        table = pl.DataFrame({"id": self.ids, "row": self.numbers, **holders})
        table.write_parquet(content, metadata={_KEY: json.dumps(metadata)})
        write_atomically(path, content.getvalue(), private=True)

    @classmethod
    def read(cls, path: Path) -> "Alignment":
        """Read and check a file that `write` wrote.

        Raises:
            DataError: the file is missing, damaged, of another version, or not an alignment.
        """
        if not path.is_file():
            raise DataError(
                "VFL-2057",
                f'the parties\' records must be aligned before they are used. Found no file "{path}". Run '
                "`vafl align` at every party.",
            )
        try:
            metadata = json.loads(pl.read_parquet_metadata(path)[_KEY])
            keys = ("version", "token", "rows", "label", "with_local", "classes")
            version, token, rows, label, with_local, classes = (metadata[key] for key in keys)
            types = type(token), type(rows), type(label), type(with_local)
            if version != _VERSION or types != (str, int, str, bool):
                raise DataError(
                    "VFL-2058",
                    f"its metadata must have version {_VERSION} with token, rows, label and with_local. "
                    f"Found {metadata}.",
                )
            table = pl.read_parquet(path, glob=False)
            names = None if classes is None else tuple(map(str, classes))
            holders = {
                name.removeprefix(_HELD): table[name] for name in table.columns if name.startswith(_HELD)
            }
            return cls(token, rows, names, table["id"], table["row"].to_numpy(), holders, label, with_local)
        except (pl.exceptions.PolarsError, OSError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                "VFL-2059",
                f'"{path}" must be an alignment that `vafl align` wrote. Found: {error} Run `vafl align` '
                "again.",
            ) from error


def check_writable(path: Path) -> None:
    """Raise DataError if an alignment cannot be written to `path`, or would replace another kind of file.

    Call this before the exchange. If the write failed at its end, the other parties would already have new
    alignments and this party would have none.
    """
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise DataError(
            "VFL-2060",
            f'the folder of an alignment must exist and be writable. Found "{path.parent}", which is not. '
            "Create it or change its permissions, or set another file in parties.NAME.source.alignment.",
        )
    if path.exists() and not _is_alignment(path):
        raise DataError(
            "VFL-2061",
            f'an alignment may replace only an older alignment. Found "{path}", which is another kind of '
            "file. Set another file in parties.NAME.source.alignment, or move this one away.",
        )


def _is_alignment(path: Path) -> bool:
    """Return whether the file has an alignment's metadata, of any version, even if its rows are damaged."""
    try:
        return _KEY in pl.read_parquet_metadata(path)
    except (pl.exceptions.PolarsError, OSError):
        return False


def _are_rows(numbers: Integers, rows: int) -> bool:
    """Return whether `numbers` are row numbers: int64, strictly ascending and in 0..rows-1."""
    if numbers.dtype != np.int64 or numbers.ndim != 1:
        return False
    inside = not len(numbers) or (numbers[0] >= 0 and numbers[-1] < rows)
    return rows > 0 and bool(inside) and bool((np.diff(numbers) > 0).all())
