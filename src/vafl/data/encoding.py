"""Encode a table's columns as float32 features. vafl.data.fitting fits the encoder on the training rows.

An encoder has one of two forms:

| column   | `dense`, for linear and mlp embeddings             | `codes`, for tabular embeddings            |
|----------|----------------------------------------------------|--------------------------------------------|
| number   | scaled and smoothly clipped; a flag if missing     | position among the edges; -1 if missing    |
| category | one feature per frequent category, one for others  | rank by frequency from 1; 0 for others     |
| date     | one number and two categories: days, weekday and month; also the hour, if there are times       |

Any model can use `dense` features. `codes` have one number per column, regardless of its number of
categories. models.tabular expands them batch by batch, so a table of 200 columns takes 800 bytes per row.

A category that did not occur in training is encoded like a rare one. If the party does not have a record,
all its features are 0 (dense) or missing (codes), and the last feature, "(absent)", is 1.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import polars as pl

from vafl.arrays import Doubles, Floats
from vafl.conversion import make
from vafl.data.sources.base import Source
from vafl.data.sources.common import lacking, of_kind
from vafl.data.tables import POSITION, Table
from vafl.errors import DataError

Form = Literal["dense", "codes"]

LARGEST = 1e30  # larger numbers count as missing: after scaling they could overflow float32
MISSING = -1.0  # the code of a missing number
_TEXT = (pl.String, pl.Categorical, pl.Enum)
_BEND = 3.0  # the limit of the smooth clip, in robust deviations from the median; x = 3 becomes 3 / sqrt(2)
_WEEKDAYS = tuple(str(day) for day in range(1, 8))  # Monday is 1
_MONTHS = tuple(str(month) for month in range(1, 13))


def is_text(kind: pl.DataType) -> bool:
    """Return whether columns of this type hold text."""
    return isinstance(kind, _TEXT)


def is_date(kind: pl.DataType) -> bool:
    """Return whether columns of this type hold dates, with or without a time."""
    return kind == pl.Date or isinstance(kind, pl.Datetime)


def is_usable(kind: pl.DataType) -> bool:
    """Return whether columns of this type can be encoded as features."""
    return is_text(kind) or is_date(kind) or kind.is_numeric() or kind == pl.Boolean


def as_numbers(values: pl.Series) -> Doubles:
    """Return the values as float64; NaN where a value is missing, not a number, or above LARGEST."""
    numbers = values.cast(pl.Float64, strict=False).fill_null(float("nan")).to_numpy().copy()
    # Negated, so that NaN is included: no comparison with NaN is true.
    numbers[~(np.abs(numbers) <= LARGEST)] = np.nan
    return numbers


def as_names(values: pl.Series) -> pl.Series:
    """Return the values as category names. An integer gets the same name as a float: 1.0 is "1"."""
    if values.dtype.is_float():
        # pandas writes integers as floats if the column has gaps. A later file may have none.
        integers = values.cast(pl.Int64, strict=False)
        values = pl.select(
            pl.when(integers.cast(pl.Float64) == values)
            .then(integers.cast(pl.String))
            .otherwise(values.cast(pl.String))
        ).to_series()
    return values.cast(pl.String)


def as_times(values: pl.Series) -> pl.Series:
    """Return dates, or text in ISO 8601, as datetimes; null where a value is missing or not a date.

    Time zones and fractions of a second are ignored.
    """
    if is_text(values.dtype):
        # Bring "2024-05-01", "2024-05-01 10:30" and "2024-05-01T10:30:00+02:00" to one format to parse.
        text = values.cast(pl.String).str.slice(0, 19).str.replace(" ", "T", literal=True)
        text = pl.select(
            pl.when(text.str.len_chars() == 10).then(text + "T00:00:00").otherwise(text)
        ).to_series()
        short = pl.select(pl.when(text.str.len_chars() == 16).then(text + ":00").otherwise(text)).to_series()
        return short.str.to_datetime("%Y-%m-%dT%H:%M:%S", strict=False, time_unit="us")
    if isinstance(values.dtype, pl.Datetime):
        return values.dt.replace_time_zone(None).cast(pl.Datetime("us"))
    return values.cast(pl.Datetime("us"))


@dataclass(frozen=True)
class NumberColumn:
    """Encodes a number relative to the training rows of its column.

    Attributes:
        centre: the median of the training rows; 0 if numbers are not scaled.
        scale: the robust deviation of the training rows; 1 if numbers are not scaled.
        edges: ascending values. The code of a number is its position among them, interpolated linearly.
        bends: whether large values are clipped smoothly.
        flags_missing: whether some training rows had no value, so that missing values are encoded as such.
    """

    kind: ClassVar[str] = "number"
    name: str
    centre: float
    scale: float
    edges: tuple[float, ...]
    bends: bool
    flags_missing: bool

    def __post_init__(self) -> None:
        rising = all(before < after for before, after in zip(self.edges, self.edges[1:], strict=False))
        finite = all(map(math.isfinite, (self.centre, *self.edges)))
        if not (finite and rising and self.edges and 0 < self.scale < math.inf):
            raise DataError(
                "VFL-2191",
                "a number column must have a finite centre, ascending edges and a positive scale. Found "
                f'{self.centre}, {list(self.edges)[:5]} and {self.scale} in "{self.name}".',
            )

    def names(self, form: Form) -> list[str]:
        """Return the names of its features."""
        flags = self.flags_missing and form == "dense"
        return [self.name, *([f"{self.name} is missing"] if flags else [])]

    def scaled(self, numbers: Doubles) -> Doubles:
        """Return the numbers in robust deviations from the median, clipped smoothly to -3..3 if `bends`."""
        deviations = (numbers - self.centre) / self.scale
        return deviations / np.sqrt(1 + (deviations / _BEND) ** 2) if self.bends else deviations

    @property
    def fill(self) -> float:
        """The code of a missing value: MISSING, or the median's code if training had no missing values."""
        # A model that never saw the code MISSING in training has learnt nothing about it.
        return MISSING if self.flags_missing else self._places(np.array([self.centre])).item()

    def _places(self, numbers: Doubles) -> Doubles:
        """Return each number's position among the edges, clipped to the first and the last edge."""
        return np.interp(numbers, self.edges, np.arange(len(self.edges), dtype=np.float64))

    def write(self, values: pl.Series, into: Floats, form: Form) -> int:
        """Encode values [lines] into [lines, width]. Return the number of values that are not numbers."""
        numbers = as_numbers(values)
        missing = np.isnan(numbers)
        if form == "codes":
            into[:, 0] = np.where(missing, self.fill, self._places(np.where(missing, self.centre, numbers)))
        else:
            into[:, 0] = self.scaled(np.where(missing, self.centre, numbers))
            if self.flags_missing:
                into[:, 1] = missing
        return int(missing.sum()) - values.null_count()

    def absent(self, form: Form) -> list[float]:
        """Return the features of a record that the party does not have."""
        return [0.0] * len(self.names(form)) if form == "dense" else [self.fill]


@dataclass(frozen=True)
class CategoryColumn:
    """Encodes one of several category names.

    Attributes:
        categories: the categories that have a code, the most frequent first.
        shown: the number of categories that have their own feature in the `dense` form. The others share one.
        has_others: whether training had further categories, too rare to have a code.
        flags_missing: whether some training rows had no value, so that missing values are encoded as such.
    """

    kind: ClassVar[str] = "category"
    name: str
    categories: tuple[str, ...]
    shown: int
    has_others: bool
    flags_missing: bool

    def __post_init__(self) -> None:
        if len(set(self.categories)) < len(self.categories) or not 0 <= self.shown <= len(self.categories):
            raise DataError(
                "VFL-2192",
                f"categories must be unique, and `shown` between 0 and their number. Found "
                f'{list(self.categories)[:5]} and {self.shown} in "{self.name}".',
            )

    @property
    def levels(self) -> int:
        """The number of codes: 0 for others, one per category, and one for missing if training had gaps."""
        return 1 + len(self.categories) + self.flags_missing

    def names(self, form: Form) -> list[str]:
        """Return the names of its features."""
        if form == "codes":
            return [self.name]
        named = [f"{self.name} = {category}" for category in self.categories[: self.shown]]
        others = [f"{self.name} is another"] if self._has_rest else []
        return [*named, *others, *([f"{self.name} is missing"] if self.flags_missing else [])]

    @property
    def _has_rest(self) -> bool:
        return self.has_others or self.shown < len(self.categories)

    @cached_property
    def _codes(self) -> tuple[pl.Series, pl.Series]:
        """The categories and their codes, from 1."""
        names = pl.Series(self.categories, dtype=pl.String)
        return names, pl.Series(range(1, len(names) + 1), dtype=pl.Int64)

    def write(self, values: pl.Series, into: Floats, form: Form) -> int:
        """Encode values [lines] into [lines, width]. Return 0: any text is a valid category."""
        known = as_names(values).replace_strict(*self._codes, default=0, return_dtype=pl.Int64)
        missing = len(self.categories) + 1 if self.flags_missing else 0
        codes = pl.select(pl.when(values.is_null()).then(missing).otherwise(known)).to_series().to_numpy()
        if form == "codes":
            into[:, 0] = codes
            return 0
        # feature_of[code] is the feature that is 1 for this code; -1 if all features are 0.
        feature_of = np.full(self.levels, -1)
        feature_of[1 : self.shown + 1] = np.arange(self.shown)
        if self._has_rest:
            feature_of[[0, *range(self.shown + 1, len(self.categories) + 1)]] = self.shown
        if self.flags_missing:
            feature_of[-1] = self.shown + self._has_rest
        features = feature_of[codes]
        if not self.flags_missing:
            # Missing values share code 0 with other categories here, but are not one of them.
            features[values.is_null().to_numpy()] = -1
        lines = np.flatnonzero(features >= 0)
        into[:] = 0
        into[lines, features[lines]] = 1
        return 0

    def absent(self, form: Form) -> list[float]:
        """Return the features of a record that the party does not have."""
        return [0.0] * len(self.names(form))


@dataclass(frozen=True)
class DateColumn:
    """Encodes a date as days since 1970, weekday and month, and as the hour if there are times.

    Attributes:
        days: encodes the days since 1970, with a fraction for the time of day.
        has_times: whether training rows had times of day.
    """

    kind: ClassVar[str] = "date"
    name: str
    days: NumberColumn
    has_times: bool

    @cached_property
    def _parts(self) -> tuple[NumberColumn | CategoryColumn, ...]:
        weekday = CategoryColumn(f"{self.name} weekday", _WEEKDAYS, 7, False, False)
        month = CategoryColumn(f"{self.name} month", _MONTHS, 12, False, False)
        hour = NumberColumn(f"{self.name} hour", 12.0, 6.0, tuple(map(float, range(25))), False, False)
        return self.days, weekday, month, *((hour,) if self.has_times else ())

    def names(self, form: Form) -> list[str]:
        """Return the names of its features."""
        return [name for part in self._parts for name in part.names(form)]

    def write(self, values: pl.Series, into: Floats, form: Form) -> int:
        """Encode values [lines] into [lines, width]. Return the number of values that are not dates."""
        times = as_times(values)
        part_values = (days_of(times), times.dt.weekday(), times.dt.month(), hours_of(times))
        start = 0
        # Not strict: without times, _parts has no hour.
        for part, numbers in zip(self._parts, part_values, strict=False):
            end = start + len(part.names(form))
            part.write(numbers, into[:, start:end], form)
            start = end
        return times.null_count() - values.null_count()

    def absent(self, form: Form) -> list[float]:
        """Return the features of a record that the party does not have."""
        return [value for part in self._parts for value in part.absent(form)]


def days_of(times: pl.Series) -> pl.Series:
    """Return days since 1970, with a fraction for the time of day."""
    return times.dt.epoch("ms").cast(pl.Float64) / 86_400_000


def hours_of(times: pl.Series) -> pl.Series:
    """Return hours since midnight, with a fraction for the minutes."""
    return times.dt.hour().cast(pl.Float64) + times.dt.minute().cast(pl.Float64) / 60


Column = NumberColumn | CategoryColumn | DateColumn
_KINDS: dict[str, type[Column]] = {
    column.kind: column for column in (NumberColumn, CategoryColumn, DateColumn)
}


@dataclass(frozen=True)
class Encoder:
    """Encodes a party's table as features. It is saved with the party's model and used for every prediction.

    Attributes:
        columns: the encoded columns, in the order of their features.
        flags_absent: whether a last feature marks records that the party does not have.
        form: the form of the features.
    """

    kind: ClassVar[str] = "table"
    columns: tuple[Column, ...]
    flags_absent: bool
    form: Form = "dense"

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names):
            raise DataError("VFL-2193", f"an encoder must have each column once. Found {names}.")

    @cached_property
    def names(self) -> list[str]:
        """The names of the features."""
        names = [name for column in self.columns for name in column.names(self.form)]
        return [*names, "(absent)"] if self.flags_absent else names

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one record's features."""
        return (len(self.names),)

    @property
    def record_shape(self) -> tuple[int, ...]:
        """The shape that the embedding network sees: a table's model takes the "(absent)" feature, too."""
        return self.shape

    @property
    def parts(self) -> Sequence[NumberColumn | CategoryColumn]:
        """The column, or the part of a date, that each code comes from; without the "(absent)" feature."""
        return [
            part
            for column in self.columns
            for part in (column._parts if isinstance(column, DateColumn) else (column,))
        ]

    def absent_row(self) -> Floats:
        """Return the features [width] of a record that the party does not have."""
        row = [value for column in self.columns for value in column.absent(self.form)]
        return np.array(row + [1.0] * self.flags_absent, dtype=np.float32)

    def encode(self, table: Table, batch: pl.DataFrame, odd: Counter[str] | None = None) -> Floats:
        """Return the features [lines, width] of a batch of the table's lines.

        Args:
            odd: a counter to add to: column -> its values that are not numbers or dates, though they should
                be.
        """
        odd = Counter() if odd is None else odd
        features = np.zeros((batch.height, len(self.names)), dtype=np.float32)
        schema = batch.schema  # read once: each access makes polars rebuild it from all columns
        values = batch.select(table.values(column.name, schema[column.name]) for column in self.columns)
        start = 0
        for column in self.columns:
            end = start + len(column.names(self.form))
            odd[column.name] += column.write(values[column.name], features[:, start:end], self.form)
            start = end
        return features

    def read(self, source: Source, wanted: pl.DataFrame, rows: int, into: Floats | None = None) -> Floats:
        """Return the features [rows, width] of a whole table.

        Rows that `wanted` does not mention are encoded as absent.

        Args:
            source: the table.
            wanted: the `id` of each line to read, and POSITION, its row.
            into: [rows, width], an array to fill; None creates one.

        Raises:
            DataError: the source is not a table, a column is missing, the table has changed since it was
                aligned, or more than half of the values of a column are not of its type.
        """
        table = of_kind(Table, source, self.kind, source.section)
        if missing := [column.name for column in self.columns if column.name not in table.schema]:
            raise DataError(
                "VFL-2194",
                f'"{table.path}" must have every column that the model was trained on. Missing: '
                f"{', '.join(missing[:5])}. Add the missing columns, or train again without them.",
            )
        features = np.empty((rows, *self.shape), dtype=np.float32) if into is None else into
        if wanted.height < rows:
            is_absent = np.ones(rows, dtype=bool)
            is_absent[wanted[POSITION].to_numpy()] = False
            features[is_absent] = self.absent_row()
        lines, odd = 0, Counter[str]()
        for batch in table.batches([column.name for column in self.columns], wanted):
            features[batch[POSITION].to_numpy()] = self.encode(table, batch, odd)
            lines += batch.height
        table.check_found(lines, wanted)
        # A few odd values count as missing. If most are odd, the column has probably changed its meaning.
        if changed := [name for name, count in odd.items() if count > lines / 2]:
            raise DataError(
                "VFL-2195",
                f'"{table.path}" must have numbers or dates in "{changed[0]}", as in training. Found '
                f"{odd[changed[0]]:,} of {lines:,} values that are neither. Check that the column still has "
                "the same meaning, and correct its values.",
            )
        return features

    def misfit(self, source: Source) -> str:
        """Return why a changed table needs a new encoder: it lacks a column."""
        return lacking(self.columns, source.features)

    def to_dict(self) -> dict[str, Any]:
        """Return the encoder as values that TOML and JSON can represent."""
        columns = [{"kind": column.kind, **_plain(asdict(column))} for column in self.columns]
        return {"kind": self.kind, "form": self.form, "flags_absent": self.flags_absent, "columns": columns}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Encoder":
        """Make the encoder that `to_dict` described.

        Raises:
            DataError: The values do not describe an encoder.
        """
        try:
            written = make(_Written, dict(values))
            return cls(tuple(map(_column, written.columns)), written.flags_absent, written.form)
        except ValueError as error:
            raise DataError(
                "VFL-2196",
                f"a stored encoder must be unchanged since vafl wrote it. Found: {error} Restore the model "
                "folder, or train again.",
            ) from error


@dataclass(frozen=True)
class _Written:
    """The document that `Encoder.to_dict` makes."""

    kind: Literal["table"]
    columns: list[dict[str, Any]]
    flags_absent: bool
    form: Form


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with lists in place of tuples, which TOML and JSON lack."""
    return {
        key: list(value) if isinstance(value, tuple) else _plain(value) if isinstance(value, dict) else value
        for key, value in values.items()
    }


def _column(values: dict[str, Any]) -> Column:
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"the kind of a column must be one of {', '.join(_KINDS)}. Found {kind!r}.")
    return make(_KINDS[kind], {name: value for name, value in values.items() if name != "kind"}, "columns")
