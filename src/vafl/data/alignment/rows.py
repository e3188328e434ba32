"""What a party knows after alignment: which of its records are which rows of the common table.

`vafl align` writes this file and training reads it. It is the party's own: ids that others hold too are in
it, so it stays where the party's table lies.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from vafl.errors import DataError
from vafl.files import write_atomically

_KEY = "vafl.alignment"
_VERSION = 4
_HELD = "held by "  # before a client's name: a column
_TOKEN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, eq=False)
class Alignment:
    """A party's records among the rows that all parties number alike.

    Attributes:
        token: 32 random hex digits, the same at all parties of one alignment and at no others.
        rows: how many rows there are in all.
        classes: the names of the label's classes, which clients need for their width; None for regression.
        ids: this party's records that are rows, canonical text.
        numbers: int64, their row numbers, ascending.
        holders: at the label holder, client -> [ids], which of these records it has too.
        label: the name of the label column, which is no feature of anybody's; empty without labels.
        with_local: whether the label holder's table has features too, so that the run has a `LOCAL_CLIENT`.
    """

    token: str
    rows: int
    classes: tuple[str, ...] | None
    ids: pl.Series
    numbers: npt.NDArray[np.int64]
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
                "VFL-2052", f"an alignment needs two classes or more, each once. Found {self.classes}."
            )
        if self.ids.dtype != pl.String or self.ids.null_count() or self.ids.n_unique() != len(self.ids):
            raise DataError(
                "VFL-2053", f"an alignment's ids must be text, unique and none missing. Found {self.ids!r}."
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
                    "VFL-2056", f"whether {name} has a record must be true or false for each. Found {held!r}."
                )

    def write(self, path: Path) -> None:
        """As one Parquet file, for its owner's eyes only: the old one or the new one is there, whatever
        happens."""
        facts = {
            "version": _VERSION,
            "token": self.token,
            "rows": self.rows,
            "label": self.label,
            "with_local": self.with_local,
            "classes": self.classes,
        }
        content = BytesIO()
        held = {_HELD + name: own for name, own in self.holders.items()}
        table = pl.DataFrame({"id": self.ids, "row": self.numbers, **held})
        table.write_parquet(content, metadata={_KEY: json.dumps(facts)})
        write_atomically(path, content.getvalue(), private=True)

    @classmethod
    def read(cls, path: Path) -> "Alignment":
        """What `write` wrote.

        Raises:
            DataError: there is no file, or it is damaged or no alignment.
        """
        if not path.is_file():
            raise DataError(
                "VFL-2057",
                f'the parties\' records must be aligned first. Found no "{path}". Run `vafl align` at '
                "every party.",
            )
        try:
            facts = json.loads(pl.read_parquet_metadata(path)[_KEY])
            named = ("version", "token", "rows", "label", "with_local", "classes")
            version, token, rows, label, with_local, classes = (facts[name] for name in named)
            kinds = type(token), type(rows), type(label), type(with_local)
            if version != _VERSION or kinds != (str, int, str, bool):
                raise DataError(
                    "VFL-2058",
                    f"version {_VERSION} with token, rows, label and with_local is needed. Found {facts}.",
                )
            table = pl.read_parquet(path, glob=False)
            names = None if classes is None else tuple(map(str, classes))
            held = {name.removeprefix(_HELD): table[name] for name in table.columns if name.startswith(_HELD)}
            return cls(token, rows, names, table["id"], table["row"].to_numpy(), held, label, with_local)
        except (pl.exceptions.PolarsError, OSError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                "VFL-2059",
                f'"{path}" must be an alignment that `vafl align` wrote. {error} Run `vafl align` again.',
            ) from error


def check_writable(path: Path) -> None:
    """Raises DataError if no alignment can be written there, or in the place of another file only: a party's
    table, say. Found out in the end, the others' alignments would be new, and this party's lost."""
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise DataError(
            "VFL-2060",
            f'an alignment is written into a folder that is there and may be written. Found "{path.parent}", '
            "which is not. Make it, or name another file in tables.NAME.alignment.",
        )
    if path.exists() and not _is_alignment(path):
        raise DataError(
            "VFL-2061",
            f'an alignment is written in the place of no other file. Found "{path}", which is none. Name '
            "another file in tables.NAME.alignment, or move this one away.",
        )


def _is_alignment(path: Path) -> bool:
    """Of whatever version, whole or not."""
    try:
        return _KEY in pl.read_parquet_metadata(path)
    except (pl.exceptions.PolarsError, OSError):
        return False


def _are_rows(numbers: npt.NDArray[np.int64], rows: int) -> bool:
    if numbers.dtype != np.int64 or numbers.ndim != 1:
        return False
    inside = not len(numbers) or (numbers[0] >= 0 and numbers[-1] < rows)
    return rows > 0 and bool(inside) and bool((np.diff(numbers) > 0).all())
