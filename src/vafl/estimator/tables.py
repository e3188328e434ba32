"""X as the parties hold it: who has which columns, and whether the tables fit together.

X is either one table whose columns belong to several parties, or a dictionary with one table for each
party. Fit decides which, and every later X must have the same form.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeGuard

import numpy as np
import polars as pl
import torch
from sklearn.utils import check_array
from torch import Tensor

from vafl.data.columns import match_columns
from vafl.data.dataset import Features, Standard
from vafl.data.encoding import Encoder, Form, is_usable
from vafl.data.fitting import fit
from vafl.data.settings import TableSettings
from vafl.data.tables import POSITION, Table
from vafl.errors import ConfigError, DataError

Rows = pl.DataFrame | Features  # one party's: a table, or an array of sequences or images
Columns = list[str] | list[int]
DTYPES = (np.float64, np.float32)  # columns are scaled first, and only then rounded to torch's float32


@dataclass(frozen=True)
class SharedTable:
    """One table whose columns belong to several parties.

    Attributes:
        columns: party -> its columns, by name where they have names, else by position.
        positions: party -> the positions of its columns.
    """

    columns: dict[str, Columns]
    positions: dict[str, list[int]]

    @classmethod
    def of(
        cls, width: int, names: Sequence[str] | None, parties: Mapping[str, Any] | None, clients: int
    ) -> "SharedTable":
        """Deals out `width` columns as the user wishes, or evenly."""
        shares = _even_shares(width, clients) if parties is None else _wishes(width, names, parties)
        return cls({party: _named(own, names) for party, own in shares.items()}, shares)

    def read(self, table: Any) -> dict[str, Rows]:
        """Return each party's columns."""
        return {
            party: _frame(table, own, self.columns[party], party) for party, own in self.positions.items()
        }


@dataclass(frozen=True)
class OwnTables:
    """A table for each party.

    Attributes:
        columns: party -> the names of its columns, or their positions.
        shapes: party -> the shape of one row; longer than 1 for sequences and images.
    """

    columns: dict[str, Columns]
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, tables: Mapping[str, Any]) -> "OwnTables":
        if not tables:
            raise DataError(
                "VFL-8531", "X must hold a table for at least one party. Found an empty dictionary."
            )
        shapes = {party: _row_shape(table) for party, table in tables.items()}
        columns = {
            party: _named(range(sum(shape[:1])), _column_names(tables[party]))
            for party, shape in shapes.items()
        }
        return cls(columns, shapes)

    @property
    def features(self) -> int:
        """Numbers in a row of all parties together."""
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    def read(self, tables: Mapping[str, Any]) -> dict[str, Rows]:
        """Return the tables in the order of fit, if they have the columns that fit has seen."""
        self._check_parties(tables)
        for party in self.columns:
            self._check_columns(party, tables[party])
        read = {party: self._read(party, tables[party]) for party in self.columns}
        _check_rows(read)
        _check_order({party: tables[party] for party in self.columns})
        return read

    def _read(self, party: str, table: Any) -> Rows:
        names = self.columns[party]
        if hasattr(table, "columns"):
            return _frame(table, range(len(names)), names, party)
        is_table = len(self.shapes[party]) < 2
        array = check_array(
            table,
            dtype=DTYPES,
            order="C",
            allow_nd=True,
            ensure_all_finite="allow-nan" if is_table else True,
            input_name=f'X of "{party}"',
        )
        return _frame(array, range(len(names)), names, party) if is_table else array

    def _check_parties(self, tables: Mapping[str, Any]) -> None:
        for party in self.columns:
            if party not in tables:
                raise DataError(
                    "VFL-8532",
                    f'X must hold a table for each party of fit. Missing: "{party}". Found '
                    f"{_listed(tables)}.",
                )
        for party in tables:
            if party not in self.columns:
                near = get_close_matches(str(party), self.columns, 1)
                hint = f'Did you mean "{near[0]}"?' if near else "Leave it out."
                raise DataError(
                    "VFL-8533", f'X must hold the parties of fit and no other. Found "{party}". {hint}'
                )

    def _check_columns(self, party: str, table: Any) -> None:
        found, expected = _row_shape(table), self.shapes[party]
        if found != expected:
            raise DataError(
                "VFL-8534",
                f'the table of "{party}" must have {_sized(expected)}, as in fit. Found {_sized(found)}. '
                "Bring the same columns in the same order.",
            )
        for known, name in zip(self.columns[party], _column_names(table) or (), strict=False):
            if isinstance(known, str) and name != known:
                raise DataError(
                    "VFL-8535",
                    f'the table of "{party}" must have the columns of fit in the same order. Found "{name}" '
                    f'in the place of "{known}". Select {_listed(self.columns[party])}.',
                )


def is_dictionary(table: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether X is a table for each party; some sparse matrices are dictionaries too, but have a shape."""
    return isinstance(table, Mapping) and not hasattr(table, "shape")


def check_in_memory(table: Any) -> None:
    """Raises DataError for a table that is still to be read, as polars' lazy ones are."""
    for own in table.values() if is_dictionary(table) else (table,):
        if hasattr(own, "collect") and not hasattr(own, "shape"):
            raise DataError(
                "VFL-8536", f"a table must be in memory. Found a {type(own).__name__}. Call its collect()."
            )


def check_form(layout: SharedTable | OwnTables, table: Any) -> None:
    """Raises DataError where fit had one table and this is a dictionary, or the other way round."""
    if isinstance(layout, OwnTables) and not is_dictionary(table):
        raise DataError(
            "VFL-8537",
            "X must be a dictionary with one table for each party, as in fit. Found "
            f"{type(table).__name__}. Pass {{party: table}} with the parties {_listed(layout.columns)}.",
        )
    if isinstance(layout, SharedTable) and is_dictionary(table):
        raise DataError(
            "VFL-8538",
            "X must be one table with the columns of all parties, as in fit. Found a dictionary. "
            "Pass the table, or fit with a dictionary.",
        )


def _even_shares(width: int, clients: int) -> dict[str, list[int]]:
    if not isinstance(clients, int | np.integer) or clients < 1:
        raise ConfigError("VFL-8539", f"clients must be a whole number, 1 or more. Found {clients!r}.")
    shares = np.array_split(np.arange(width), min(clients, width))
    return {f"client-{number}": own.tolist() for number, own in enumerate(shares, 1)}


def _wishes(width: int, names: Sequence[str] | None, parties: Mapping[str, Any]) -> dict[str, list[int]]:
    """The positions of the columns that each party names, matches by a pattern, or counts."""
    if not isinstance(parties, Mapping) or not parties:
        raise ConfigError(
            "VFL-8540", f"parties must be a dictionary {{party: columns}}, or None. Found {parties!r}."
        )
    known = list(map(str, range(width))) if names is None else list(names)
    groups = {
        party: tuple(_name(wish, known, party) for wish in _several(own)) for party, own in parties.items()
    }
    return match_columns(known, groups, setting="parties")


def _several(own: Any) -> list[Any]:
    """A party's wishes, of which one alone needs no list around it."""
    try:
        return [own] if isinstance(own, str) else list(own)
    except TypeError:
        return [own]


def _name(wish: Any, known: Sequence[str], party: str) -> str:
    if isinstance(wish, str):
        return wish
    if isinstance(wish, bool) or not isinstance(wish, int | np.integer) or not 0 <= wish < len(known):
        raise DataError(
            "VFL-8541",
            f"parties.{party}: a column is a name, a pattern, or a position in 0..{len(known) - 1}. "
            f"Found {wish!r}.",
        )
    return known[int(wish)]


def _row_shape(table: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = table.shape if hasattr(table, "shape") else np.shape(table)
    return tuple(shape[1:])


def _column_names(table: Any) -> list[str] | None:
    """The names of a data frame's columns; None for an array."""
    return [str(name) for name in table.columns] if hasattr(table, "columns") else None


def _named(positions: Iterable[int], names: Sequence[str] | None) -> Columns:
    return list(positions) if names is None else [str(names[position]) for position in positions]


def _frame(table: Any, positions: Sequence[int], names: Columns, party: str) -> pl.DataFrame:
    """Some columns of a DataFrame or of a checked array [rows, columns], under these names.

    Raises:
        DataError: A column holds what no model can learn from.
    """
    columns = [
        _column(table, position).alias(str(name)) for position, name in zip(positions, names, strict=True)
    ]
    for column in columns:
        if not is_usable(column.dtype):
            raise DataError(
                "VFL-8542",
                f"columns must hold numbers, text, truth values or dates. Found {column.dtype} in "
                f'"{column.name}" of "{party}". Encode it, or leave it out.',
            )
    try:
        return pl.DataFrame(columns)
    except pl.exceptions.DuplicateError as error:
        raise DataError("VFL-8543", f'every column of "{party}" needs a different name. {error}.') from error


def _column(table: Any, position: int) -> pl.Series:
    if isinstance(table, pl.DataFrame):
        column = table.to_series(position)
        return column.cast(pl.Float64) if column.dtype == pl.Null else column
    return _from_pandas(table.iloc[:, position]) if hasattr(table, "iloc") else pl.Series(table[:, position])


def _from_pandas(column: Any) -> pl.Series:
    """A pandas column, with nulls where it has gaps. Time zones are dropped."""
    kind = getattr(column.dtype, "kind", "O")
    if kind in "biuf":
        return pl.Series(column.to_numpy(dtype=np.float64, na_value=np.nan))
    if kind == "M":
        return pl.Series(column.dt.tz_localize(None).to_numpy())
    values = [None if gap else value for value, gap in zip(column, column.isna(), strict=True)]
    try:
        found = pl.Series(values)
    except (TypeError, pl.exceptions.PolarsError):  # of several kinds
        found = pl.Series([None if value is None else str(value) for value in values])
    return found.cast(pl.Float64) if found.dtype == pl.Null else found


def fit_encoder(party: str, rows: Rows, form: Form, *, scale: bool) -> Encoder | Standard | None:
    """Return how a party's features are made, by its training rows; None leaves an array as it is.

    Raises:
        ConfigError, DataError: The embedding takes tables, or no column is left.
    """
    if isinstance(rows, pl.DataFrame):
        table = _in_memory(party, rows)
        every = pl.DataFrame({"id": table.ids(), POSITION: np.arange(rows.height)})
        return fit(table, every, form=form, scale=scale, chosen=True)[0]
    if form == "codes":
        raise ConfigError(
            "VFL-8544",
            f'embedding = "tabular" takes tables, [rows, columns]. Found rows of shape '
            f'{list(rows.shape[1:])} of "{party}". Use "cnn" for images, "lstm" for sequences.',
        )
    return Standard.fit(rows) if scale else None


def encode(party: str, rows: Rows, encoder: Encoder | Standard | None) -> Tensor:
    """Return a party's features [rows, ...] as float32."""
    if isinstance(rows, pl.DataFrame) and isinstance(encoder, Encoder):
        return torch.from_numpy(encoder.encode(_in_memory(party, rows), rows))
    array = np.asarray(rows)
    return torch.tensor(encoder(array) if isinstance(encoder, Standard) else array, dtype=torch.float32)


def _in_memory(party: str, frame: pl.DataFrame) -> Table:
    return Table(party, TableSettings("X", ""), frame)


def _check_rows(tables: Mapping[str, Rows]) -> None:
    counts = {party: len(table) for party, table in tables.items()}
    if len(set(counts.values())) > 1:
        found = ", ".join(f'{count} of "{party}"' for party, count in counts.items())
        raise DataError(
            "VFL-8545",
            f"every party must bring the same rows in the same order. Found {found}. "
            "Match the parties' records first.",
        )


def _check_order(tables: Mapping[str, Any]) -> None:
    """Raises DataError where pandas' indices name the same rows in different orders."""
    indices = {party: table.index for party, table in tables.items() if hasattr(table, "iloc")}
    first, *others = indices or [""]
    for party in others:
        own, known = indices[party], indices[first]
        if not own.equals(known) and own.isin(known).all():
            raise DataError(
                "VFL-8546",
                f'every party must bring the same rows in the same order. Found the index of "{first}" in '
                f'another order in "{party}". Sort both alike, or reset indices that mean nothing.',
            )


def _sized(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} columns" if len(shape) == 1 else f"rows of shape {list(shape)}"


def _listed(names: Iterable[Any]) -> str:
    shown = [f'"{name}"' for name in names]
    return ", ".join(shown[:20]) + (", ..." if len(shown) > 20 else "")
