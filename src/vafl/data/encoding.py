"""From a table's columns to the float32 features of a model, by rules fitted on the party's training rows.

An encoder has one of two forms. Both start from the same rules:

| column   | `dense`, for linear and mlp embeddings           | `codes`, for tabular embeddings              |
|----------|--------------------------------------------------|----------------------------------------------|
| number   | scaled, smoothly clipped; a flag if missing      | its place among the edges; -1 if missing     |
| category | a column per frequent category, one for the rest | its rank by frequency; 0 is the rest         |
| date     | as one number and two categories: days, weekday, month; the hour too if there are times         |

`dense` features can be used by any model. `codes` are one number per column, however many categories it has:
models.tabular expands them batch by batch, so a table of 200 columns takes 800 bytes per row.

A category that training never saw counts as a rare one. A record that the party does not have is 0 (dense) or
missing (codes) everywhere, and its last feature is 1.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from vafl.conversion import make
from vafl.data.dataset import Array
from vafl.data.tables import POSITION, Table
from vafl.errors import DataError

Form = Literal["dense", "codes"]
Numbers = npt.NDArray[np.float64]

LARGEST = 1e30  # a number beyond it counts as missing: float32 has no room for it
MISSING = -1.0  # the code of a missing number
_TEXT = (pl.String, pl.Categorical, pl.Enum)
_BEND = 3.0  # robust deviations from the median at which the smooth clip sets in; its limit too
_WEEKDAYS = tuple(str(day) for day in range(1, 8))  # Monday is 1
_MONTHS = tuple(str(month) for month in range(1, 13))


def is_text(kind: pl.DataType) -> bool:
    """Whether a column of that type holds text."""
    return isinstance(kind, _TEXT)


def is_date(kind: pl.DataType) -> bool:
    """Whether a column of that type holds dates, with a time or without."""
    return kind == pl.Date or isinstance(kind, pl.Datetime)


def is_usable(kind: pl.DataType) -> bool:
    """Whether a column of that type can become features."""
    return is_text(kind) or is_date(kind) or kind.is_numeric() or kind == pl.Boolean


def as_numbers(values: pl.Series) -> Numbers:
    """Values as float64; NaN where one is missing or not a number."""
    numbers = values.cast(pl.Float64, strict=False).fill_null(float("nan")).to_numpy().copy()
    numbers[~(np.abs(numbers) <= LARGEST)] = np.nan
    return numbers


def as_names(values: pl.Series) -> pl.Series:
    """Values as names of categories; a whole number has the same name however the file holds it."""
    if values.dtype.is_float():
        whole = values.cast(pl.Int64, strict=False)
        values = pl.select(
            pl.when(whole.cast(pl.Float64) == values)
            .then(whole.cast(pl.String))
            .otherwise(values.cast(pl.String))
        ).to_series()
    return values.cast(pl.String)


def as_times(values: pl.Series) -> pl.Series:
    """Dates, or text in ISO 8601, as moments; null where one is missing or not a date. Zones are ignored."""
    if is_text(values.dtype):
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
    """A number, compared with the training rows of its column.

    Attributes:
        centre, scale: the training rows' median and robust deviation; 0 and 1 leave numbers as they are.
        edges: between which a number has its place, rising; for the `codes` form.
        bends: whether large values are clipped smoothly.
        flags_missing: whether some training rows had no value.
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
                "a column of numbers needs a finite centre, rising edges and a positive scale. Found "
                f'{self.centre}, {list(self.edges)[:5]} and {self.scale} in "{self.name}".',
            )

    def names(self, form: Form) -> list[str]:
        """Return the names of its features."""
        flags = self.flags_missing and form == "dense"
        return [self.name, *([f"{self.name} is missing"] if flags else [])]

    def scaled(self, numbers: Numbers) -> Numbers:
        """Numbers in robust deviations from the median, smoothly clipped at 3."""
        distances = (numbers - self.centre) / self.scale
        return distances / np.sqrt(1 + (distances / _BEND) ** 2) if self.bends else distances

    @property
    def fill(self) -> float:
        """The code of a record without a value."""
        return MISSING if self.flags_missing else self._places(np.array([self.centre])).item()

    def _places(self, numbers: Numbers) -> Numbers:
        return np.interp(numbers, self.edges, np.arange(len(self.edges), dtype=np.float64))

    def write(self, values: pl.Series, into: Array, form: Form) -> int:
        """Encode values [lines] into [lines, width]; return how many are present but not numbers."""
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
    """One of several names.

    Attributes:
        categories: those that have a code, the most frequent first.
        shown: how many of them have a column in the `dense` form; the others share one.
        has_others: whether training had categories beside those.
        flags_missing: whether some training rows had no value.
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
                f'a category must be there once, and `shown` count some of them. "{self.name}" has '
                f"{list(self.categories)[:5]} and {self.shown}.",
            )

    @property
    def levels(self) -> int:
        """How many codes there are: the rest (0), each category, and missing if training had gaps."""
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
        own = pl.Series(self.categories, dtype=pl.String)
        return own, pl.Series(range(1, len(own) + 1), dtype=pl.Int64)

    def write(self, values: pl.Series, into: Array, form: Form) -> int:
        """Encode values [lines] into [lines, width]; any text is a category."""
        codes = as_names(values).replace_strict(*self._codes, default=0, return_dtype=pl.Int64)
        gap = len(self.categories) + 1 if self.flags_missing else 0
        numbers = pl.select(pl.when(values.is_null()).then(gap).otherwise(codes)).to_series().to_numpy()
        if form == "codes":
            into[:, 0] = numbers
            return 0
        places = np.full(self.levels, -1)
        places[1 : self.shown + 1] = np.arange(self.shown)
        if self._has_rest:
            places[[0, *range(self.shown + 1, len(self.categories) + 1)]] = self.shown
        if self.flags_missing:
            places[-1] = self.shown + self._has_rest
        chosen = places[numbers]
        if not self.flags_missing:
            chosen[values.is_null().to_numpy()] = -1
        lines = np.flatnonzero(chosen >= 0)
        into[:] = 0
        into[lines, chosen[lines]] = 1
        return 0

    def absent(self, form: Form) -> list[float]:
        """Return the features of a record that the party does not have."""
        return [0.0] * len(self.names(form))


@dataclass(frozen=True)
class DateColumn:
    """A moment: how long ago, which day of the week, which month, and which hour if there are times.

    Attributes:
        days: the days since 1970, with a fraction for the time.
        has_times: whether training had times of day.
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

    def write(self, values: pl.Series, into: Array, form: Form) -> int:
        """Encode values [lines] into [lines, width]; return how many are present but not dates."""
        times = as_times(values)
        views = (days_of(times), times.dt.weekday(), times.dt.month(), hours_of(times))
        start = 0
        for part, view in zip(self._parts, views, strict=False):
            end = start + len(part.names(form))
            part.write(view, into[:, start:end], form)
            start = end
        return times.null_count() - values.null_count()

    def absent(self, form: Form) -> list[float]:
        """Return the features of a record that the party does not have."""
        return [value for part in self._parts for value in part.absent(form)]


def days_of(times: pl.Series) -> pl.Series:
    """Days since 1970, with a fraction for the time."""
    return times.dt.epoch("ms").cast(pl.Float64) / 86_400_000


def hours_of(times: pl.Series) -> pl.Series:
    """Hours since midnight, with a fraction."""
    return times.dt.hour().cast(pl.Float64) + times.dt.minute().cast(pl.Float64) / 60


Column = NumberColumn | CategoryColumn | DateColumn
_KINDS: dict[str, type[Column]] = {own.kind: own for own in (NumberColumn, CategoryColumn, DateColumn)}


@dataclass(frozen=True)
class Encoder:
    """How a party's table becomes features. It is saved with the party's model and used for every prediction.

    Attributes:
        columns: in the order of the features.
        flags_absent: whether a last feature says that the party does not have the record.
        form: which features it makes of them.
    """

    columns: tuple[Column, ...]
    flags_absent: bool
    form: Form = "dense"

    def __post_init__(self) -> None:
        if len({own.name for own in self.columns}) < len(self.columns):
            raise DataError(
                "VFL-2193", f"a column must be there once. Found {[own.name for own in self.columns]}."
            )

    @cached_property
    def names(self) -> list[str]:
        """The names of the features."""
        return [name for own in self.columns for name in own.names(self.form)] + [
            "(absent)"
        ] * self.flags_absent

    @property
    def parts(self) -> Sequence[NumberColumn | CategoryColumn]:
        """What each feature of the `codes` form is a code of; without the last that flags absent records."""
        return [
            part for own in self.columns for part in (own._parts if isinstance(own, DateColumn) else (own,))
        ]

    def absent_row(self) -> Array:
        """[width]: the features of a record that the party does not have."""
        row = [value for own in self.columns for value in own.absent(self.form)]
        return np.array(row + [1.0] * self.flags_absent, dtype=np.float32)

    def encode(self, table: Table, batch: pl.DataFrame, odd: Counter[str] | None = None) -> Array:
        """The features [lines, width] of a batch of the table's lines.

        Args:
            odd: counts by column the values that are not what the column should hold.
        """
        odd = Counter() if odd is None else odd
        into = np.zeros((batch.height, len(self.names)), dtype=np.float32)
        kinds = batch.schema  # once: polars makes it again each time, from all columns
        values = batch.select(table.values(own.name, kinds[own.name]) for own in self.columns)
        start = 0
        for own in self.columns:
            end = start + len(own.names(self.form))
            odd[own.name] += own.write(values[own.name], into[:, start:end], self.form)
            start = end
        return into

    def read(self, table: Table, wanted: pl.DataFrame, rows: int) -> Array:
        """The features [rows, width] of a whole table; rows that no line is wanted for are absent.

        Args:
            wanted: `id` and POSITION, the row, of each line to read.
        """
        if lacking := [own.name for own in self.columns if own.name not in table.schema]:
            raise DataError(
                "VFL-2194",
                f'"{table.path}" must have every column the model was trained on. Missing: '
                f"{', '.join(lacking[:5])}.",
            )
        features = np.empty((rows, len(self.names)), dtype=np.float32)
        if wanted.height < rows:
            features[:] = self.absent_row()
        found, odd = 0, Counter[str]()
        for batch in table.batches([own.name for own in self.columns], wanted):
            features[batch[POSITION].to_numpy()] = self.encode(table, batch, odd)
            found += batch.height
        table.check_found(found, wanted)
        if changed := [name for name, count in odd.items() if count > found / 2]:
            raise DataError(
                "VFL-2195",
                f'"{table.path}" must hold what the model was trained on: numbers or dates in "{changed[0]}".'
                f" Found {odd[changed[0]]:,} of {found:,} values that are none. Does it mean the same?",
            )
        return features

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as TOML and JSON have them."""
        columns = [{"kind": own.kind, **_plain(asdict(own))} for own in self.columns]
        return {"form": self.form, "flags_absent": self.flags_absent, "columns": columns}

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
            raise DataError("VFL-2196", f"an encoder must be as vafl wrote it. Found: {error}") from error


@dataclass(frozen=True)
class _Written:
    """The document that `Encoder.to_dict` makes."""

    columns: list[dict[str, Any]]
    flags_absent: bool
    form: Form


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: list(value) if isinstance(value, tuple) else _plain(value) if isinstance(value, dict) else value
        for key, value in values.items()
    }


def _column(values: dict[str, Any]) -> Column:
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"the kind of a column must be one of {', '.join(_KINDS)}. Found {kind!r}.")
    return make(_KINDS[kind], {name: value for name, value in values.items() if name != "kind"}, "columns")
