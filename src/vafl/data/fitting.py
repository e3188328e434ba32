"""How a table is to be encoded, found from its training rows in one pass over the file."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from vafl.data.encoding import (
    CategoryColumn,
    Column,
    Encoder,
    NumberColumn,
    as_names,
    as_numbers,
    is_text,
    is_usable,
)
from vafl.data.tables import Table
from vafl.errors import DataError

_ARE_NUMBERS = 0.95  # of a text column's values: then it is one of numbers, and the rest count as missing
_ARE_DATES = 0.95  # likewise
_DATE = r"^\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}.*)?$"
_MOST_DISTINCT = 10_000  # a column with more different names is not counted any further


@dataclass(frozen=True)
class ColumnReport:
    """What became of one column, and what it held in the training rows.

    Attributes:
        use: `number`, `category`, or `dropped`.
        why: the reason if it was dropped, else whatever is worth knowing.
        features: how many features it became.
    """

    name: str
    type: str
    use: str
    why: str
    missing: int
    features: int


@dataclass
class Profile:
    """What the training rows of one column showed so far."""

    name: str
    type: pl.DataType
    lines: int = 0
    missing: int = 0
    numbers: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the mean
    smallest: float = np.inf
    largest: float = -np.inf
    odd: str = ""  # the first value that is no number
    counts: pl.DataFrame = field(default_factory=lambda: _counted(pl.Series([], dtype=pl.String)))
    uncountable: bool = False

    def add(self, values: pl.Series) -> None:
        """Takes some more lines."""
        self.lines += len(values)
        self.missing += values.null_count()
        numbers = as_numbers(values)
        self._add_numbers(numbers[~np.isnan(numbers)])
        if not self.odd and (odd := values.filter(np.isnan(numbers)).drop_nulls()).len():
            self.odd = str(odd[0])
        if not self.uncountable:
            both = pl.concat([self.counts, _counted(as_names(values))])
            merged = both.group_by("name").agg(pl.col("count").sum())
            self.uncountable = merged.height > _MOST_DISTINCT
            self.counts = merged.clear() if self.uncountable else merged

    def _add_numbers(self, own: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        """Mean and squares of two parts from those of each."""
        if not len(own):
            return
        mean, count = float(own.mean()), self.numbers + len(own)
        apart = mean - self.mean
        self.squares += float(np.square(own - mean).sum()) + apart**2 * self.numbers * len(own) / count
        self.mean += apart * len(own) / count
        self.numbers = count
        self.smallest, self.largest = (
            min(self.smallest, float(own.min())),
            max(self.largest, float(own.max())),
        )

    @property
    def present(self) -> int:
        return self.lines - self.missing

    @property
    def is_numeric(self) -> bool:
        return not is_text(self.type) or self.numbers >= _ARE_NUMBERS * self.present

    @property
    def is_dated(self) -> bool:
        """Whether text is ISO 8601's dates, with a time or without, which a Parquet file has a type for."""
        dates = self.counts.filter(pl.col("name").str.contains(_DATE))["count"].sum()
        return not self.uncountable and dates >= _ARE_DATES * self.present

    @property
    def distinct(self) -> str:
        """How many different names, in words."""
        return f"more than {_MOST_DISTINCT:,}" if self.uncountable else f"{self.counts.height:,}"


def _counted(values: pl.Series) -> pl.DataFrame:
    counts = values.drop_nulls().alias("name").value_counts(name="count")
    return counts.select(pl.col("name"), pl.col("count").cast(pl.Int64))


def fit(
    table: Table,
    wanted: pl.DataFrame,
    *,
    scale: bool = True,
    public: bool = False,
    flags_absent: bool = False,
) -> tuple[Encoder, list[ColumnReport]]:
    """An encoder by the training rows alone, and what became of each column.

    Args:
        wanted: `id` and POSITION of each training line.
        scale: whether numbers are standardised.
        public: nothing of the encoder may depend on the records, as where each is guaranteed privacy.
        flags_absent: whether there are records that the party does not have.

    Raises:
        DataError: no column is left, or the encoder cannot be public.
    """
    named = set(table.matching(list(table.schema), "categories"))
    usable = [name for name in table.features if is_usable(table.schema[name])]
    profiles = _profiles(table, usable, wanted)
    columns: list[Column] = []
    reports: list[ColumnReport] = []
    for name in table.schema:
        report, column = _decide(table, name, profiles.get(name), name in named, scale=scale, public=public)
        reports.append(report)
        columns += [] if column is None else [column]
    if not columns:
        reasons = "; ".join(f"{report.name}: {report.why}" for report in reports[:5])
        raise DataError(f'"{table.path}": a client needs at least one column. None is left: {reasons}.')
    return Encoder(tuple(columns), flags_absent), reports


def _profiles(table: Table, columns: Sequence[str], wanted: pl.DataFrame) -> dict[str, Profile]:
    found = {name: Profile(name, table.schema[name]) for name in columns}
    lines = 0
    for batch in table.batches(columns, wanted):
        values = batch.select(table.values(name, table.schema[name]) for name in columns)
        for name, profile in found.items():
            profile.add(values[name])
        lines += batch.height
    table.check_found(lines, wanted)
    return found


def _decide(
    table: Table, name: str, profile: Profile | None, named: bool, *, scale: bool, public: bool
) -> tuple[ColumnReport, Column | None]:
    kind = table.schema[name]

    def report(use: str, why: str, features: int = 0) -> ColumnReport:
        missing = 0 if profile is None else profile.missing
        return ColumnReport(name, "text" if is_text(kind) else str(kind), use, why, missing, features)

    if profile is None:
        return report("dropped", _not_asked_for(table, name)), None
    numeric = profile.is_numeric and not named
    if public:
        if not numeric:
            raise DataError(
                f'"{table.path}": "{name}" holds categories, and which there are depends on the records: '
                "that would pass by the noise. Encode it as numbers by a public list, or name "
                f"it in tables.{table.party}.ignore."
            )
        return report("number", "as it is, 0 where missing", 1), NumberColumn(name, 0.0, 0.0, 1.0, False)
    if not named and not numeric and profile.present and profile.is_dated:
        return report("dropped", "dates: write numbers, or name it in categories"), None
    if why := _useless(profile, numeric, table.settings.most_categories):
        return report("dropped", why), None
    if numeric:
        number = _number(profile, scale=scale)
        return report("number", _about_number(profile), len(number.names)), number
    category = _category(profile, table.settings.most_categories)
    return report("category", _about_category(profile, category), len(category.names)), category


def _not_asked_for(table: Table, name: str) -> str:
    if name == table.settings.id:
        return "the id"
    if not name:
        return "it has no name: an index?"
    if name == table.settings.label:
        return "the label"
    if name not in table.features:
        return "not asked for" if table.settings.features else "ignored"
    return f"{table.schema[name]} is no type to learn from: write numbers or text"


def _useless(profile: Profile, numeric: bool, most: int) -> str:
    if not (profile.numbers if numeric else profile.present):
        return "missing in every training row"
    if numeric:
        only = profile.smallest == profile.largest and profile.numbers == profile.lines
        return f"always {profile.smallest:g} in the training rows" if only else ""
    counts = profile.counts
    if profile.uncountable or (counts.height > most and counts.height > profile.present / 2):
        return (
            f"text with {profile.distinct} different values in {profile.present:,} rows, such as "
            f'"{profile.odd[:20]}": a name? Numbers are to be written as 1234.5'
        )
    if counts.height == 1 and not profile.missing:
        return f'always "{counts["name"][0]}" in the training rows'
    return ""


def _number(profile: Profile, *, scale: bool) -> NumberColumn:
    """Nine digits of the statistics: more depend on how the file happened to be cut into batches. Of a mean
    far from 0, as many as a millionth of the deviation needs."""
    spread = (profile.squares / profile.numbers) ** 0.5 if profile.smallest < profile.largest else 1.0
    deviation = float(f"{spread or 1.0:.9g}")
    digits = max(9, 6 + math.ceil(math.log10(abs(profile.mean) / deviation or 1.0)))
    fill = float(f"{profile.mean:.{digits}g}")
    flags = profile.numbers < profile.lines
    return NumberColumn(profile.name, fill, *((fill, deviation) if scale else (0.0, 1.0)), flags)


def _category(profile: Profile, most: int) -> CategoryColumn:
    ranked = profile.counts.sort(["count", "name"], descending=[True, False])["name"].to_list()
    return CategoryColumn(profile.name, tuple(sorted(ranked[:most])), len(ranked) > most, profile.missing > 0)


def _about_number(profile: Profile) -> str:
    text = f"mean {profile.mean:.4g}, from {profile.smallest:g} to {profile.largest:g}"
    if odd := profile.present - profile.numbers:
        text += f'; {odd:,} are no number, such as "{profile.odd[:20]}", and count as missing'
    return text


def _about_category(profile: Profile, column: CategoryColumn) -> str:
    shown = ", ".join(column.categories[:4]) + (", ..." if len(column.categories) > 4 else "")
    return f"{profile.distinct} categories: {shown}" + (
        ", the rarer ones as one" if column.has_others else ""
    )
