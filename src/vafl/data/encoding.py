"""From a table's columns to the float32 features of a model, by what its party's training rows showed.

The rules, for whoever reads a score later:
- a number is standardised; where it is missing, the training rows' mean stands in, and a column of its own
  says so if any was missing in training;
- a category is one column of zeros and ones for each frequent category, one for all rarer ones, and one for
  "missing", if training had such. A category that training never saw is a rarer one; without such a column
  all are zero;
- a record that the party does not have at all is zero everywhere but in the last column, which is one.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import polars as pl

from vafl.conversion import make
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

    def __post_init__(self) -> None:
        if not (math.isfinite(self.fill) and math.isfinite(self.mean) and 0 < self.deviation < math.inf):
            raise DataError(
                f'a column of numbers needs a finite fill and mean, and a positive deviation. "{self.name}" '
                f"has {self.fill}, {self.mean} and {self.deviation}."
            )

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

    def __post_init__(self) -> None:
        if len(set(self.categories)) < len(self.categories):
            raise DataError(f'a category must be there once. "{self.name}" has {list(self.categories)}.')

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

    def __post_init__(self) -> None:
        if len({own.name for own in self.columns}) < len(self.columns):
            raise DataError(f"a column must be there once. Found {[own.name for own in self.columns]}.")

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
        """Make the encoder that `to_dict` described.

        Raises:
            DataError: The values do not describe an encoder.
        """
        try:
            written = make(_Written, dict(values))
            return cls(tuple(map(_column, written.columns)), written.flags_absent)
        except ValueError as error:
            raise DataError(f"an encoder must be as vafl wrote it. Found: {error}") from error


@dataclass(frozen=True)
class _Written:
    """What `Encoder.to_dict` gives."""

    columns: list[dict[str, Any]]
    flags_absent: bool


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def _column(values: dict[str, Any]) -> Column:
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"the kind of a column must be one of {', '.join(_KINDS)}. Found {kind!r}.")
    return make(_KINDS[kind], {name: value for name, value in values.items() if name != "kind"}, "columns")
