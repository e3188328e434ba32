"""Divide X among the parties, and check that each party's columns and rows are as in fit.

X is either one table whose columns belong to several parties, or a dictionary with one table per party. `fit`
accepts both, and every later X must have the same form.
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

from vafl.arrays import Features
from vafl.data.columns import match_columns
from vafl.data.dataset import Standard
from vafl.data.encoding import Encoder, Form, is_usable
from vafl.data.fitting import fit
from vafl.data.source_settings import TableSettings
from vafl.data.tables import POSITION, Table
from vafl.errors import ConfigError, DataError

PartyRows = pl.DataFrame | Features  # one party's data: a table, or an array of sequences or images
Columns = list[str] | list[int]
DTYPES = (np.float64, np.float32)  # float64 stays as it is: columns are scaled before they become float32


@dataclass(frozen=True)
class SharedTable:
    """One table whose columns belong to several parties.

    Attributes:
        columns: party -> its columns, by name if they have names, otherwise by position.
        positions: party -> the positions of its columns.
    """

    columns: dict[str, Columns]
    positions: dict[str, list[int]]

    @classmethod
    def of(
        cls, width: int, names: Sequence[str] | None, parties: Mapping[str, Any] | None, clients: int
    ) -> "SharedTable":
        """Divide `width` columns as `parties` says, or evenly among `clients` if it is None."""
        shares = _even_shares(width, clients) if parties is None else _chosen_shares(width, names, parties)
        return cls({party: _named(positions, names) for party, positions in shares.items()}, shares)

    def read(self, table: Any) -> dict[str, PartyRows]:
        """Return each party's columns."""
        return {
            party: _frame(table, positions, self.columns[party], party)
            for party, positions in self.positions.items()
        }


@dataclass(frozen=True)
class OwnTables:
    """One table per party.

    Attributes:
        columns: party -> the names of its columns, or their positions.
        shapes: party -> the shape of one row; it has more than one axis for sequences and images.
    """

    columns: dict[str, Columns]
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, tables: Mapping[str, Any]) -> "OwnTables":
        """Record the parties and columns of a dictionary X."""
        if not tables:
            raise DataError(
                "VFL-8531",
                "X must have a table for at least one party. Found an empty dictionary. Pass {party: table}.",
            )
        shapes = {party: _row_shape(table) for party, table in tables.items()}
        columns = {
            party: _named(range(sum(shape[:1])), _column_names(tables[party]))
            for party, shape in shapes.items()
        }
        return cls(columns, shapes)

    @property
    def features(self) -> int:
        """The number of values in one row of all parties together."""
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    def read(self, tables: Mapping[str, Any]) -> dict[str, PartyRows]:
        """Return the tables in the order of fit.

        Raises:
            DataError: the parties or columns differ from those of fit, or the tables have different rows.
        """
        self._check_parties(tables)
        for party in self.columns:
            self._check_columns(party, tables[party])
        rows = {party: self._read(party, tables[party]) for party in self.columns}
        _check_rows(rows)
        _check_order({party: tables[party] for party in self.columns})
        return rows

    def _read(self, party: str, table: Any) -> PartyRows:
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
                    f'X must have a table for each party of fit. Missing: "{party}". Found '
                    f"{_listed(tables)}. Add the missing table.",
                )
        for party in tables:
            if party not in self.columns:
                near = get_close_matches(str(party), self.columns, 1)
                hint = f'Did you mean "{near[0]}"?' if near else "Leave it out."
                raise DataError(
                    "VFL-8533", f'X must have the parties of fit and no others. Found "{party}". {hint}'
                )

    def _check_columns(self, party: str, table: Any) -> None:
        found, expected = _row_shape(table), self.shapes[party]
        if found != expected:
            raise DataError(
                "VFL-8534",
                f'the table of "{party}" must have {_sized(expected)}, as in fit. Found {_sized(found)}. '
                "Pass the same columns in the same order.",
            )
        for known, name in zip(self.columns[party], _column_names(table) or (), strict=False):
            if isinstance(known, str) and name != known:
                raise DataError(
                    "VFL-8535",
                    f'the table of "{party}" must have the columns of fit in the same order. Found "{name}" '
                    f'where fit had "{known}". Select {_listed(self.columns[party])}.',
                )


def is_dictionary(table: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether X is {party: table}."""
    # Some sparse matrices are mappings too, but they have a shape.
    return isinstance(table, Mapping) and not hasattr(table, "shape")


def check_in_memory(table: Any) -> None:
    """Raise DataError if a table is lazy, such as a polars LazyFrame."""
    for item in table.values() if is_dictionary(table) else (table,):
        if hasattr(item, "collect") and not hasattr(item, "shape"):
            raise DataError(
                "VFL-8536", f"a table must be in memory. Found a {type(item).__name__}. Call its collect()."
            )


def check_form(layout: SharedTable | OwnTables, table: Any) -> None:
    """Raise DataError if fit had one table and X is now a dictionary, or the reverse."""
    if isinstance(layout, OwnTables) and not is_dictionary(table):
        raise DataError(
            "VFL-8537",
            "X must be a dictionary with one table per party, as in fit. Found "
            f"{type(table).__name__}. Pass {{party: table}} with the parties {_listed(layout.columns)}.",
        )
    if isinstance(layout, SharedTable) and is_dictionary(table):
        raise DataError(
            "VFL-8538",
            "X must be one table with the columns of all parties, as in fit. Found a dictionary. "
            "Pass the table, or fit with a dictionary.",
        )


def _even_shares(width: int, clients: int) -> dict[str, list[int]]:
    """Return the positions of each client's columns, divided evenly."""
    if not isinstance(clients, int | np.integer) or clients < 1:
        raise ConfigError("VFL-8539", f"clients must be an integer, 1 or more. Found {clients!r}.")
    shares = np.array_split(np.arange(width), min(clients, width))
    return {f"client-{number}": positions.tolist() for number, positions in enumerate(shares, 1)}


def _chosen_shares(
    width: int, names: Sequence[str] | None, parties: Mapping[str, Any]
) -> dict[str, list[int]]:
    """Return the positions of the columns that `parties` chooses by name, pattern or position."""
    if not isinstance(parties, Mapping) or not parties:
        raise ConfigError(
            "VFL-8540", f"parties must be a dictionary {{party: columns}}, or None. Found {parties!r}."
        )
    known = list(map(str, range(width))) if names is None else list(names)
    groups = {
        party: tuple(_name(column, known, party) for column in _as_list(columns))
        for party, columns in parties.items()
    }
    return match_columns(known, groups, setting="parties")


def _as_list(columns: Any) -> list[Any]:
    """Return a party's columns as a list. A single column needs no list around it."""
    try:
        return [columns] if isinstance(columns, str) else list(columns)
    except TypeError:
        return [columns]


def _name(column: Any, known: Sequence[str], party: str) -> str:
    """Return the name of a column that was given by position; names and patterns are returned unchanged."""
    if isinstance(column, str):
        return column
    if isinstance(column, bool) or not isinstance(column, int | np.integer) or not 0 <= column < len(known):
        raise DataError(
            "VFL-8541",
            f"parties.{party}: a column must be a name, a pattern, or a position in 0..{len(known) - 1}. "
            f"Found {column!r}.",
        )
    return known[int(column)]


def _row_shape(table: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = table.shape if hasattr(table, "shape") else np.shape(table)
    return tuple(shape[1:])


def _column_names(table: Any) -> list[str] | None:
    """Return the column names of a DataFrame; None for an array."""
    return [str(name) for name in table.columns] if hasattr(table, "columns") else None


def _named(positions: Iterable[int], names: Sequence[str] | None) -> Columns:
    return list(positions) if names is None else [str(names[position]) for position in positions]


def _frame(table: Any, positions: Sequence[int], names: Columns, party: str) -> pl.DataFrame:
    """Return some columns of a DataFrame, or of a checked array [rows, columns], under these names.

    Raises:
        DataError: a column has a type that cannot be encoded, or two columns have the same name.
    """
    columns = [
        _column(table, position).alias(str(name)) for position, name in zip(positions, names, strict=True)
    ]
    for column in columns:
        if not is_usable(column.dtype):
            raise DataError(
                "VFL-8542",
                f"columns must hold numbers, text, booleans or dates. Found {column.dtype} in "
                f'"{column.name}" of "{party}". Convert the column, or drop it.',
            )
    try:
        return pl.DataFrame(columns)
    except pl.exceptions.DuplicateError as error:
        raise DataError(
            "VFL-8543",
            f'the column names of "{party}" must be unique. Found: {error}. Rename the duplicate column.',
        ) from error


def _column(table: Any, position: int) -> pl.Series:
    if isinstance(table, pl.DataFrame):
        column = table.to_series(position)
        return column.cast(pl.Float64) if column.dtype == pl.Null else column
    return _from_pandas(table.iloc[:, position]) if hasattr(table, "iloc") else pl.Series(table[:, position])


def _from_pandas(column: Any) -> pl.Series:
    """Return a pandas column as a polars series, null where a value is missing. Time zones are dropped."""
    kind = getattr(column.dtype, "kind", "O")
    if kind in "biuf":
        return pl.Series(column.to_numpy(dtype=np.float64, na_value=np.nan))
    if kind == "M":
        return pl.Series(column.dt.tz_localize(None).to_numpy())
    values = [None if gap else value for value, gap in zip(column, column.isna(), strict=True)]
    try:
        series = pl.Series(values)
    except (TypeError, pl.exceptions.PolarsError):  # a column of mixed types becomes text
        series = pl.Series([None if value is None else str(value) for value in values])
    return series.cast(pl.Float64) if series.dtype == pl.Null else series


def fit_encoder(party: str, rows: PartyRows, form: Form, *, scale: bool) -> Encoder | Standard | None:
    """Fit the encoder of a table, or the scale of an array, on a party's training rows.

    Returns:
        The encoder or scale; None leaves an array unchanged.

    Raises:
        ConfigError: the embedding takes tables, and the party has an array of sequences or images.
        DataError: no column of the table can be used.
    """
    if isinstance(rows, pl.DataFrame):
        table = _in_memory(party, rows)
        all_rows = pl.DataFrame({"id": table.ids(), POSITION: np.arange(rows.height)})
        return fit(table, all_rows, form=form, scale=scale, chosen=True)[0]
    if form == "codes":
        raise ConfigError(
            "VFL-8544",
            f'embedding = "tabular" needs tables, [rows, columns]. Found rows of shape '
            f'{list(rows.shape[1:])} in "{party}". Use "cnn" for images, "lstm" for sequences.',
        )
    return Standard.fit(rows) if scale else None


def encode(party: str, rows: PartyRows, encoder: Encoder | Standard | None) -> Tensor:
    """Return a party's features [rows, ...] as float32."""
    if isinstance(rows, pl.DataFrame) and isinstance(encoder, Encoder):
        return torch.from_numpy(encoder.encode(_in_memory(party, rows), rows))
    array = np.asarray(rows)
    return torch.tensor(encoder(array) if isinstance(encoder, Standard) else array, dtype=torch.float32)


def _in_memory(party: str, frame: pl.DataFrame) -> Table:
    return Table(party, TableSettings("X", ""), frame)


def _check_rows(tables: Mapping[str, PartyRows]) -> None:
    counts = {party: len(table) for party, table in tables.items()}
    if len(set(counts.values())) > 1:
        found = ", ".join(f'{count} of "{party}"' for party, count in counts.items())
        raise DataError(
            "VFL-8545",
            f"all parties must have the same rows in the same order. Found rows: {found}. "
            "Align the parties' records first.",
        )


def _check_order(tables: Mapping[str, Any]) -> None:
    """Raise DataError if pandas indices show that two tables have the same rows in different orders."""
    indices = {party: table.index for party, table in tables.items() if hasattr(table, "iloc")}
    first, *others = indices or [""]
    for party in others:
        index, expected = indices[party], indices[first]
        # Indices with other values may be meaningless, such as row numbers of different files.
        if not index.equals(expected) and index.isin(expected).all():
            raise DataError(
                "VFL-8546",
                f'all parties must have the same rows in the same order. Found the index of "{first}" in '
                f'another order in "{party}". Sort both in the same way, or reset meaningless indices.',
            )


def _sized(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} columns" if len(shape) == 1 else f"rows of shape {list(shape)}"


def _listed(names: Iterable[Any]) -> str:
    shown = [f'"{name}"' for name in names]
    return ", ".join(shown[:20]) + (", ..." if len(shown) > 20 else "")
