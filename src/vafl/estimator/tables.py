"""X as the parties hold it: who has which columns, and whether the tables fit together.

X is either one table whose columns belong to several parties, or a dictionary with one table for each
party. Fit decides which, and every later X must have the same form.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
from sklearn.utils import check_array

from vafl.data.columns import match_columns
from vafl.errors import ConfigError, DataError

Table = npt.NDArray[np.floating[Any]]
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

    def read(self, table: Any) -> dict[str, Table]:
        """Each party's columns, as numbers."""
        cells = table.iloc if hasattr(table, "iloc") else table
        return {party: _numbers(cells[:, own], party) for party, own in self.positions.items()}


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
            raise DataError("X must hold a table for at least one party. Found an empty dictionary.")
        shapes = {party: np.shape(table)[1:] for party, table in tables.items()}
        columns = {
            party: _named(range(sum(shape[:1])), _column_names(tables[party]))
            for party, shape in shapes.items()
        }
        return cls(columns, shapes)

    @property
    def features(self) -> int:
        """Numbers in a row of all parties together."""
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    def read(self, tables: Mapping[str, Any]) -> dict[str, Table]:
        """The tables as numbers, in the order of fit, if they are such as fit has seen."""
        self._check_parties(tables)
        for party in self.columns:
            self._check_columns(party, tables[party])
        numbers = {party: _numbers(tables[party], party) for party in self.columns}
        _check_rows(numbers)
        _check_order({party: tables[party] for party in self.columns})
        return numbers

    def _check_parties(self, tables: Mapping[str, Any]) -> None:
        for party in self.columns:
            if party not in tables:
                raise DataError(
                    f'X must hold a table for each party of fit. Missing: "{party}". Found {_listed(tables)}.'
                )
        for party in tables:
            if party not in self.columns:
                near = get_close_matches(str(party), self.columns, 1)
                hint = f'Did you mean "{near[0]}"?' if near else "Leave it out."
                raise DataError(f'X must hold the parties of fit and no other. Found "{party}". {hint}')

    def _check_columns(self, party: str, table: Any) -> None:
        found, expected = np.shape(table)[1:], self.shapes[party]
        if found != expected:
            raise DataError(
                f'the table of "{party}" must have {_sized(expected)}, as in fit. Found {_sized(found)}. '
                "Bring the same columns in the same order."
            )
        for known, name in zip(self.columns[party], _column_names(table) or (), strict=False):
            if isinstance(known, str) and name != known:
                raise DataError(
                    f'the table of "{party}" must have the columns of fit in the same order. Found "{name}" '
                    f'in the place of "{known}". Select {_listed(self.columns[party])}.'
                )


def is_dictionary(table: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether X is a table for each party; some sparse matrices are dictionaries too, but have a shape."""
    return isinstance(table, Mapping) and not hasattr(table, "shape")


def check_in_memory(table: Any) -> None:
    """Raises DataError for a table that is still to be read, as polars' lazy ones are."""
    for own in table.values() if is_dictionary(table) else (table,):
        if hasattr(own, "collect") and not hasattr(own, "shape"):
            raise DataError(f"a table must be in memory. Found a {type(own).__name__}. Call its collect().")


def check_form(layout: SharedTable | OwnTables, table: Any) -> None:
    """Raises DataError where fit had one table and this is a dictionary, or the other way round."""
    if isinstance(layout, OwnTables) and not is_dictionary(table):
        raise DataError(
            "X must be a dictionary with one table for each party, as in fit. Found "
            f"{type(table).__name__}. Pass {{party: table}} with the parties {_listed(layout.columns)}."
        )
    if isinstance(layout, SharedTable) and is_dictionary(table):
        raise DataError(
            "X must be one table with the columns of all parties, as in fit. Found a dictionary. "
            "Pass the table, or fit with a dictionary."
        )


def _even_shares(width: int, clients: int) -> dict[str, list[int]]:
    if not isinstance(clients, int | np.integer) or clients < 1:
        raise ConfigError(f"clients must be a whole number, 1 or more. Found {clients!r}.")
    shares = np.array_split(np.arange(width), min(clients, width))
    return {f"client-{number}": own.tolist() for number, own in enumerate(shares, 1)}


def _wishes(width: int, names: Sequence[str] | None, parties: Mapping[str, Any]) -> dict[str, list[int]]:
    """The positions of the columns that each party names, matches by a pattern, or counts."""
    if not isinstance(parties, Mapping) or not parties:
        raise ConfigError(f"parties must be a dictionary {{party: columns}}, or None. Found {parties!r}.")
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
            f"parties.{party}: a column is a name, a pattern, or a position in 0..{len(known) - 1}. "
            f"Found {wish!r}."
        )
    return known[int(wish)]


def _column_names(table: Any) -> list[str] | None:
    """The names of a data frame's columns; None for an array."""
    return [str(name) for name in table.columns] if hasattr(table, "columns") else None


def _named(positions: Iterable[int], names: Sequence[str] | None) -> Columns:
    return list(positions) if names is None else [str(names[position]) for position in positions]


def _numbers(table: Any, party: str) -> Table:
    """Finite numbers [rows, ...], in the precision they came with, and laid out alike whatever held them."""
    try:
        _refuse_dates(table)
        return _checked(table, f'X of "{party}"')
    except (TypeError, ValueError) as error:
        if not hasattr(table, "columns"):
            raise
        raise DataError(
            f'every column of "{party}" must hold finite numbers. Found {_culprit(table)}. Encode text and '
            "dates as numbers, and fill what is missing."
        ) from error


def _checked(table: Any, name: str) -> Table:
    checked: Table = check_array(table, dtype=DTYPES, order="C", allow_nd=True, input_name=name)
    return checked


def _refuse_dates(table: Any) -> None:
    """Raises TypeError for dates of a data frame, which may pass for nanoseconds since 1970."""
    for kind in getattr(table, "dtypes", ()):
        if getattr(kind, "kind", "") in ("m", "M") or getattr(kind, "is_temporal", bool)():
            raise TypeError(f"{kind} is no number")


def _culprit(table: Any) -> str:
    """The first column of a data frame that holds something else than finite numbers, and what is wrong."""
    cells = table.iloc if hasattr(table, "iloc") else table
    for place, name in enumerate(table.columns):
        own = cells[:, [place]]
        try:
            _refuse_dates(own)
            _checked(own, "X")
        except (TypeError, ValueError) as error:
            first_line = str(error).partition("\n")[0]
            return f'in "{name}": {first_line.rstrip(".")}'
    return "columns of kinds that do not go together"


def _check_rows(tables: Mapping[str, Table]) -> None:
    counts = {party: len(table) for party, table in tables.items()}
    if len(set(counts.values())) > 1:
        found = ", ".join(f'{count} of "{party}"' for party, count in counts.items())
        raise DataError(
            f"every party must bring the same rows in the same order. Found {found}. "
            "Match the parties' records first."
        )


def _check_order(tables: Mapping[str, Any]) -> None:
    """Raises DataError where pandas' indices name the same rows in different orders."""
    indices = {party: table.index for party, table in tables.items() if hasattr(table, "iloc")}
    first, *others = indices or [""]
    for party in others:
        own, known = indices[party], indices[first]
        if not own.equals(known) and own.isin(known).all():
            raise DataError(
                f'every party must bring the same rows in the same order. Found the index of "{first}" in '
                f'another order in "{party}". Sort both alike, or reset indices that mean nothing.'
            )


def _sized(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} columns" if len(shape) == 1 else f"rows of shape {list(shape)}"


def _listed(names: Iterable[Any]) -> str:
    shown = [f'"{name}"' for name in names]
    return ", ".join(shown[:20]) + (", ..." if len(shown) > 20 else "")
