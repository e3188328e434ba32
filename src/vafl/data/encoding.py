"""From a table's columns to the float32 features of a model, by what its party's training rows showed.

The rules, for whoever reads a score later:
- a number is standardised; where it is missing, the training rows' mean stands in, and a column of its own
  says so if any was missing in training;
- a category is one column of zeros and ones for each frequent category, one for all rarer ones, and one for
  "missing", if training had such. A category that training never saw is a rarer one; without such a column
  all are zero;
- a record that the party does not have at all is zero everywhere but in the last column, which is one.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import polars as pl

from vafl.data.dataset import Array
from vafl.data.tables import POSITION, Table
from vafl.errors import DataError

LARGEST = 1e30  # a number beyond it counts as missing: float32 has no room for it
_TEXT = (pl.String, pl.Categorical, pl.Enum)

Numbers = npt.NDArray[np.float64]


def is_text(kind: pl.DataType) -> bool:
    """Whether a column of that type holds text."""
    return isinstance(kind, _TEXT)


def is_usable(kind: pl.DataType) -> bool:
    """Whether a column of that type can become features."""
    return is_text(kind) or kind.is_numeric() or kind == pl.Boolean


def as_numbers(values: pl.Series) -> Numbers:
    """Values as float64; NaN where one is missing or no number."""
    numbers = values.cast(pl.Float64, strict=False).fill_null(float("nan")).to_numpy().copy()
    numbers[~(np.abs(numbers) <= LARGEST)] = np.nan
    return numbers


def as_names(values: pl.Series) -> pl.Series:
    """Values as names of categories; a whole number is the same name however the file holds it."""
    if values.dtype.is_float():
        whole = values.cast(pl.Int64, strict=False)
        values = pl.select(
            pl.when(whole.cast(pl.Float64) == values)
            .then(whole.cast(pl.String))
            .otherwise(values.cast(pl.String))
        ).to_series()
    return values.cast(pl.String)


@dataclass(frozen=True)
class NumberColumn:
    """(value - mean) / deviation, `fill` in place of what is missing."""

    kind: ClassVar[str] = "number"
    name: str
    fill: float
    mean: float
    deviation: float
    flags_missing: bool

    @property
    def names(self) -> list[str]:
        """What the encoded columns are called."""
        return [self.name, *([f"{self.name} is missing"] if self.flags_missing else [])]

    def write(self, values: pl.Series, into: Array) -> int:
        """Encodes values [lines] into [lines, width]; gives how many are there but no numbers."""
        numbers = as_numbers(values)
        missing = np.isnan(numbers)
        into[:, 0] = (np.where(missing, self.fill, numbers) - self.mean) / self.deviation
        if self.flags_missing:
            into[:, 1] = missing
        return int(missing.sum()) - values.null_count()


@dataclass(frozen=True)
class CategoryColumn:
    """One column for each category, one for all others if training had more, one for what is missing."""

    kind: ClassVar[str] = "category"
    name: str
    categories: tuple[str, ...]
    has_others: bool
    flags_missing: bool

    @property
    def names(self) -> list[str]:
        """What the encoded columns are called."""
        named = [f"{self.name} = {category}" for category in self.categories]
        others = [f"{self.name} is another"] if self.has_others else []
        return [*named, *others, *([f"{self.name} is missing"] if self.flags_missing else [])]

    def write(self, values: pl.Series, into: Array) -> int:
        """Encodes values [lines] into [lines, width]; any text is a category."""
        nowhere, others = len(self.names), len(self.categories)
        places = as_names(values).replace_strict(
            pl.Series(self.categories, dtype=pl.String),
            pl.Series(range(others), dtype=pl.Int64),
            default=others if self.has_others else nowhere,
            return_dtype=pl.Int64,
        )
        missing = nowhere - 1 if self.flags_missing else nowhere
        numbers = pl.select(pl.when(values.is_null()).then(missing).otherwise(places)).to_series().to_numpy()
        lines = np.flatnonzero(numbers < nowhere)
        into[:] = 0
        into[lines, numbers[lines]] = 1
        return 0


Column = NumberColumn | CategoryColumn
_KINDS: dict[str, type[Column]] = {own.kind: own for own in (NumberColumn, CategoryColumn)}


@dataclass(frozen=True)
class Encoder:
    """How a party's table becomes features. It is saved with the party's model and used for every prediction.

    Attributes:
        columns: in the order of the features.
        flags_absent: whether a last column says that the party does not have the record.
    """

    columns: tuple[Column, ...]
    flags_absent: bool

    @property
    def names(self) -> list[str]:
        """What each feature is called."""
        return [name for own in self.columns for name in own.names] + ["(absent)"] * self.flags_absent

    def absent_row(self) -> Array:
        """[width]: the features of a record that the party does not have."""
        row = np.zeros(len(self.names), dtype=np.float32)
        if self.flags_absent:
            row[-1] = 1
        return row

    def encode(self, table: Table, batch: pl.DataFrame, odd: Counter[str] | None = None) -> Array:
        """The features [lines, width] of a batch of the table's lines.

        Args:
            odd: counts by column the values that are no numbers where the model expects some.
        """
        odd = Counter() if odd is None else odd
        into = np.zeros((batch.height, len(self.names)), dtype=np.float32)
        kinds = batch.schema  # once: polars makes it anew each time, from all columns
        values = batch.select(table.values(own.name, kinds[own.name]) for own in self.columns)
        start = 0
        for own in self.columns:
            end = start + len(own.names)
            odd[own.name] += own.write(values[own.name], into[:, start:end])
            start = end
        return into

    def read(self, table: Table, wanted: pl.DataFrame, rows: int) -> Array:
        """The features [rows, width] of a whole table; rows that no line is wanted for are absent.

        Args:
            wanted: `id` and POSITION, the row, of each line to read.
        """
        if lacking := [own.name for own in self.columns if own.name not in table.schema]:
            raise DataError(
                f'"{table.path}" must have every column the model was trained on. Missing: '
                f"{', '.join(lacking[:5])}."
            )
        features = np.empty((rows, len(self.names)), dtype=np.float32)
        features[:] = self.absent_row()
        found, odd = 0, Counter[str]()
        for batch in table.batches([own.name for own in self.columns], wanted):
            features[batch[POSITION].to_numpy()] = self.encode(table, batch, odd)
            found += batch.height
        table.check_found(found, wanted)
        if changed := [name for name, count in odd.items() if count > found / 2]:
            raise DataError(
                f'"{table.path}" must hold what the model was trained on: numbers in "{changed[0]}". Found '
                f"{odd[changed[0]]:,} of {found:,} values that are none: does it mean the same?"
            )
        return features

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as TOML and JSON have them."""
        columns = [{"kind": own.kind, **_plain(asdict(own))} for own in self.columns]
        return {"flags_absent": self.flags_absent, "columns": columns}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Encoder":
        """The same again.

        Raises:
            DataError: these are no encoder's values.
        """
        try:
            columns = [_column(dict(own)) for own in values["columns"]]
            return cls(tuple(columns), _checked(values["flags_absent"], bool))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"an encoder must be as vafl wrote it. {error!r}.") from error


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def _column(values: dict[str, Any]) -> Column:
    kind = _KINDS[values.pop("kind")]
    if "categories" in values:
        values["categories"] = tuple(_checked(name, str) for name in values["categories"])
    for key in ("fill", "mean", "deviation"):
        if key in values:
            values[key] = float(values[key])
    _checked(values["name"], str)
    _checked(values["flags_missing"], bool)
    return kind(**values)


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} must be {kind.__name__}")
    return value
