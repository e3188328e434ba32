"""Fit a table's encoder on its training rows, in one pass over the file.

Counts of lines, missing values and categories are exact. Edges, medians and deviations of numbers come from a
sample of at most 50,000 training rows, so memory does not grow with the file.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from vafl.arrays import Doubles, Flags
from vafl.data.encoding import (
    CategoryColumn,
    Column,
    DateColumn,
    Encoder,
    Form,
    NumberColumn,
    as_names,
    as_numbers,
    as_times,
    days_of,
    hours_of,
    is_date,
    is_text,
    is_usable,
)
from vafl.data.settings import LABEL_HOLDER
from vafl.data.tables import POSITION, Table
from vafl.errors import DataError

_SAMPLE = 50_000  # training rows whose numbers are kept to find edges
_EDGES = 128  # most edges of a number column: half from quantiles, half from distinct values
_NORMAL_QUARTILES = 1.349  # interquartile range of a normal distribution with deviation 1
_ARE_NUMBERS = 0.95  # a text column with this share of numbers is a number column; the rest count as missing
_ARE_DATES = 0.95  # the same for dates
_MOST_DISTINCT = 1_000_000  # counting stops at this many distinct names in a column
_MOST_CATEGORIES = 4096  # most categories of a column that get a code
_FEW_ROWS, _RARE = 1000, 5  # from 1,000 rows on, a category with fewer than 5 rows is rare
_LEAST_IDS = 20  # with fewer values, ids cannot be told from measurements
_LIKE_AN_ID = re.compile(
    r"(^|[^a-z])(id|key|index|nr|no|number|uuid)([^a-z]|$)|[a-z](ID|Id|Key|Index|Nr|No)$"
)


@dataclass(frozen=True)
class ColumnReport:
    """How one column is encoded, and what its training rows hold.

    Attributes:
        type: the column's type in a Parquet file. For text, as in a CSV, it is the type of the values:
            `number`, `category` or `date`; `text` if the column was dropped and has none of these; empty if
            unknown.
        use: `number`, `category`, `date` or `dropped`.
        why: the reason if the column was dropped, otherwise a summary of its values.
        missing: the number of training rows without a value.
        features: the number of features that encode the column.
    """

    name: str
    type: str
    use: str
    why: str
    missing: int
    features: int


@dataclass
class Profile:
    """Statistics of one column, collected from the training rows read so far.

    Attributes:
        counted: whether to count names: for text, and for columns that the user declared as categories.
        lines: the number of values, with missing ones.
        missing: the number of missing values.
        numbers, dates: the number of values that are numbers, and that are dates.
        has_times: whether a date has a time of day.
        odd: the first value that is not a number.
        counts: `name` and `count` of each distinct value, if `counted`.
        uncountable: whether there were too many distinct values to count; `counts` is then empty.
        sampled: the numbers of the sampled rows, one array per batch, without missing values.
        sampled_days: the same for dates, in days since 1970.
    """

    name: str
    type: pl.DataType
    counted: bool
    lines: int = 0
    missing: int = 0
    numbers: int = 0
    dates: int = 0
    has_times: bool = False
    odd: str = ""
    counts: pl.DataFrame = field(default_factory=lambda: _counted(pl.Series([], dtype=pl.String)))
    uncountable: bool = False
    sampled: list[Doubles] = field(default_factory=list)
    sampled_days: list[Doubles] = field(default_factory=list)

    def add(self, values: pl.Series, chosen: Flags) -> None:
        """Add the values of a batch. `chosen` marks the lines that are in the sample."""
        self.lines += len(values)
        self.missing += values.null_count()
        if is_date(self.type) or (is_text(self.type) and _may_be_dates(values)):
            self._add_dates(as_times(values), chosen)
        if is_date(self.type):
            return
        numbers = as_numbers(values)
        known = ~np.isnan(numbers)
        self.numbers += int(known.sum())
        self.sampled.append(numbers[chosen & known])
        if not self.odd and (odd := values.filter(~known).drop_nulls()).len():
            self.odd = str(odd[0])
        if self.counted and not self.uncountable:
            parts = pl.concat([self.counts, _counted(as_names(values))])
            merged = parts.group_by("name").agg(pl.col("count").sum())
            self.uncountable = merged.height > _MOST_DISTINCT
            self.counts = merged.clear() if self.uncountable else merged

    def _add_dates(self, times: pl.Series, chosen: Flags) -> None:
        self.dates += len(times) - times.null_count()
        self.has_times |= bool((hours_of(times) > 0).any())
        days = as_numbers(days_of(times))
        self.sampled_days.append(days[chosen & ~np.isnan(days)])

    @property
    def present(self) -> int:
        """The number of values that are not missing."""
        return self.lines - self.missing

    @property
    def is_numeric(self) -> bool:
        """Return whether the column holds numbers: by its type, or as text."""
        return not is_text(self.type) or self.numbers >= _ARE_NUMBERS * self.present

    @property
    def is_dated(self) -> bool:
        """Return whether the column holds dates: by its type, or as text in ISO 8601."""
        return is_date(self.type) or (self.present > 0 and self.dates >= _ARE_DATES * self.present)

    @property
    def distinct(self) -> str:
        """The number of distinct names, as text."""
        return f"more than {_MOST_DISTINCT:,}" if self.uncountable else f"{self.counts.height:,}"

    def sample(self) -> Doubles:
        """Return the numbers of the sampled rows, sorted."""
        return np.sort(np.concatenate(self.sampled)) if self.sampled else np.empty(0)


def _counted(values: pl.Series) -> pl.DataFrame:
    """Return `name` and `count` of each distinct value."""
    counts = values.drop_nulls().alias("name").value_counts(name="count")
    return counts.select(pl.col("name"), pl.col("count").cast(pl.Int64))


def _may_be_dates(values: pl.Series) -> bool:
    """Return whether most of the first 100 values look like dates.

    This saves the time to parse a whole column that has no dates.
    """
    first = values.drop_nulls().head(100).cast(pl.String)
    return int(first.str.contains(r"^\d{4}-\d{2}-\d{2}([T ]|$)").sum()) > len(first) / 2


def fit(
    table: Table,
    wanted: pl.DataFrame,
    *,
    form: Form = "dense",
    scale: bool = True,
    public: bool = False,
    flags_absent: bool = False,
    chosen: bool = False,
) -> tuple[Encoder, list[ColumnReport]]:
    """Fit an encoder on the training rows. Return it with a report on each column.

    Args:
        wanted: `id` and POSITION of each training line.
        form: the form of the features.
        scale: whether to scale numbers.
        public: whether the encoder must not depend on the records, as record-level privacy requires.
        flags_absent: whether there may be records that the party does not have.
        chosen: whether the user chose the columns. Numbers that look like ids or are constant are then kept.

    Raises:
        DataError: no column can be used, or `public` is set and a column does not hold numbers.
    """
    named = set(table.matching(list(table.schema), "categories"))
    usable = [name for name in table.features if is_usable(table.schema[name])]
    profiles = _profiles(table, usable, wanted, named)
    columns: list[Column] = []
    reports: list[ColumnReport] = []
    for name in table.schema:
        decided = _Decision(table, name, profiles.get(name), name in named, form, scale, public, chosen)
        reports.append(decided.report)
        columns += [] if decided.column is None else [decided.column]
    if not columns:
        dropped = [report for report in reports if report.name in table.features] or reports
        reasons = "; ".join(f"{report.name}: {report.why}" for report in dropped[:5])
        remedy = "Use columns of numbers, categories or dates."
        if table.party == LABEL_HOLDER:
            remedy = (
                f'To train without features of the label holder, set {table.section}.ignore = ["*"] and run '
                "`vafl align` again."
            )
        elif table.section == "data" and not chosen:
            remedy = f"Give {table.party} other columns in [partition.groups]."
        raise DataError(
            "VFL-2201",
            f'"{table.path}": {table.party} needs at least one column that can be used. Found none: '
            f"{reasons}. {remedy}",
        )
    return Encoder(tuple(columns), flags_absent, form), reports


def _profiles(
    table: Table, columns: Sequence[str], wanted: pl.DataFrame, named: set[str]
) -> dict[str, Profile]:
    """Return the profile of each column, from one pass over the wanted lines."""
    profiles = {}
    for name in columns:
        kind = table.schema[name]
        profiles[name] = Profile(name, kind, counted=is_text(kind) or name in named)
    # A fixed seed, so that fitting the same rows again gives the same encoder.
    positions = wanted[POSITION].to_numpy()
    chosen = np.zeros(int(positions.max()) + 1 if len(positions) else 0, dtype=bool)
    drawn = np.random.Generator(np.random.Philox(0)).permutation(positions)[:_SAMPLE]
    chosen[drawn] = True
    lines = 0
    for batch in table.batches(columns, wanted):
        values = batch.select(table.values(name, table.schema[name]) for name in columns)
        in_sample = chosen[batch[POSITION].to_numpy()]
        for name, profile in profiles.items():
            profile.add(values[name], in_sample)
        lines += batch.height
    table.check_found(lines, wanted)
    return profiles


class _Decision:
    """Decides how to encode one column.

    Attributes:
        column: the fitted column; None if it is dropped.
        report: the decision and its reason.
    """

    def __init__(
        self,
        table: Table,
        name: str,
        profile: Profile | None,
        named: bool,
        form: Form,
        scale: bool,
        public: bool,
        chosen: bool,
    ) -> None:
        self._table, self._name, self._named = table, name, named
        self._form, self._scale, self._chosen = form, scale, chosen
        self._profile = profile
        self.column: Column | None = None
        if profile is None:
            self.report = self._dropped(_why_unused(table, name), 0)
        elif public:
            self.report = self._publicly(profile)
        else:
            self.report = self._decide(profile)

    def _dropped(self, why: str, missing: int) -> ColumnReport:
        return ColumnReport(self._name, self._type(self._seen()), "dropped", why, missing, 0)

    def _used(self, column: Column, why: str, profile: Profile) -> ColumnReport:
        self.column = column
        features = len(column.names(self._form))
        return ColumnReport(self._name, self._type(column.kind), column.kind, why, profile.missing, features)

    def _type(self, seen: str) -> str:
        """Return the column's type in the file; for text, the type `seen` in its values."""
        kind = self._table.schema[self._name]
        return seen if is_text(kind) else str(kind)

    def _seen(self) -> str:
        """Return the type of a dropped column's values; empty if none were read."""
        profile = self._profile
        if profile is None or not profile.present:
            return ""
        if self._named:
            return "category"
        return "date" if profile.is_dated else "number" if profile.is_numeric else "text"

    def _publicly(self, profile: Profile) -> ColumnReport:
        """Use the numbers unscaled: scales, edges and category lists would reveal the records."""
        if not profile.is_numeric or profile.is_dated or self._named:
            raise DataError(
                "VFL-2202",
                f'"{self._table.path}": record-level privacy needs columns of numbers. Found categories or '
                f'dates in "{self._name}". The list of categories depends on the records, and no noise would '
                "protect it. Encode the column as numbers with a public list, or add it to "
                f"{self._table.section}.ignore.",
            )
        column = NumberColumn(self._name, 0.0, 1.0, (0.0, 1.0), False, False)
        return self._used(column, "as it is, 0 where missing", profile)

    def _decide(self, profile: Profile) -> ColumnReport:
        if profile.is_dated and not self._named:
            return self._date(profile)
        if profile.is_numeric and not self._named:
            return self._number(profile)
        return self._category(profile)

    def _date(self, profile: Profile) -> ColumnReport:
        if not profile.dates:
            return self._dropped("missing in every training row", profile.missing)
        days = np.sort(np.concatenate(profile.sampled_days))
        number = _number(f"{self._name} days", days, profile.dates < profile.lines, scale=self._scale)
        first, last = (np.datetime64(0, "D") + int(day) for day in (days[0], days[-1]))
        return self._used(
            DateColumn(self._name, number, profile.has_times), f"from {first} to {last}", profile
        )

    def _number(self, profile: Profile) -> ColumnReport:
        sample = profile.sample()
        if not len(sample):
            return self._dropped("missing in every training row", profile.missing)
        if why := "" if self._chosen else self._useless(sample, profile):
            return self._dropped(why, profile.missing)
        number = _number(self._name, sample, profile.numbers < profile.lines, scale=self._scale)
        text = f"median {np.median(sample):.4g}, from {sample[0]:g} to {sample[-1]:g}"
        if odd := profile.present - profile.numbers:
            text += f'; {odd:,} are not numbers, such as "{profile.odd[:20]}", and count as missing'
        return self._used(number, text, profile)

    def _useless(self, sample: Doubles, profile: Profile) -> str:
        """Return why a number column is useless: it is constant or an id. Return "" if it is useful."""
        if sample[0] == sample[-1] and profile.numbers == profile.lines:
            return f"always {sample[0]:g} in the training rows"
        complete = profile.numbers == profile.lines and len(sample) >= _LEAST_IDS
        if not complete or (np.diff(sample) <= 0).any() or (sample % 1).any():
            return ""
        # All sampled values are distinct integers. That alone also fits amounts, so look for one more sign of
        # an id: it is the first column, its values are nearly consecutive, or its name looks like an id's.
        first = next(name for name in self._table.schema if name) == self._name
        counts_up = sample[-1] - sample[0] < 1.2 * profile.lines
        if first or counts_up or _LIKE_AN_ID.search(self._name) or _LIKE_AN_ID.search(self._name.lower()):
            return "a different whole number in every row, as ids are"
        return ""

    def _category(self, profile: Profile) -> ColumnReport:
        if not profile.present:
            return self._dropped("missing in every training row", profile.missing)
        counts = profile.counts.sort(["count", "name"], descending=[True, False])
        shown = self._table.settings.most_categories
        if profile.uncountable or (counts.height > shown and counts.height > profile.present / 2):
            why = (
                f"text with {profile.distinct} distinct values in {profile.present:,} rows, such as "
                f'"{profile.odd[:20]}", like a name. If it holds numbers, write them as 1234.5'
            )
            return self._dropped(why, profile.missing)
        if counts.height == 1 and not profile.missing:
            return self._dropped(f'always "{counts["name"][0]}" in the training rows', profile.missing)
        least = _RARE if profile.lines >= _FEW_ROWS else 1
        kept = counts.filter(pl.col("count") >= least)["name"].head(_MOST_CATEGORIES).to_list()
        has_others = counts.height > len(kept)
        column = CategoryColumn(
            self._name, tuple(kept), min(shown, len(kept)), has_others, profile.missing > 0
        )
        examples = ", ".join(kept[:4]) + (", ..." if len(kept) > 4 else "")
        rest = ", rare ones grouped" if column.has_others or column.shown < len(kept) else ""
        return self._used(column, f"{profile.distinct} categories: {examples}{rest}", profile)


def _why_unused(table: Table, name: str) -> str:
    """Return why a column that was not read is not a feature."""
    if not name:
        return "it has no name, like an index"
    if name == table.settings.id:
        return "the id"
    if name == table.settings.label:
        return "the label"
    if name == table.settings.weight:
        return "the weight of each record"
    if name not in table.features:
        return "not in features" if table.settings.features else "ignored"
    return f"columns of type {table.schema[name]} cannot be used: write numbers or text"


def _number(name: str, sample: Doubles, gaps: bool, *, scale: bool) -> NumberColumn:
    """Fit a number column on the sorted numbers of the training rows.

    Args:
        gaps: whether some training rows have no number.
    """
    distinct = np.unique(sample)
    edges = distinct
    if len(distinct) > _EDGES:
        # Half of the edges are quantiles. In a column that is mostly zero, nearly all quantiles are 0, so the
        # other half is spread evenly over the distinct values.
        half = _EDGES // 2
        quantiles = np.quantile(sample, np.linspace(0, 1, half), method="nearest")
        places = np.linspace(0, len(distinct) - 1, _EDGES - half + 2).round().astype(int)[1:-1]
        edges = np.unique(np.concatenate([quantiles, distinct[places]]))
    # Quartiles ignore outliers. They coincide if more than half of the values are equal; the standard
    # deviation then replaces them, and 1 replaces that for a constant column.
    low, middle, high = np.quantile(sample, [0.25, 0.5, 0.75])
    spread = (high - low) / _NORMAL_QUARTILES or float(sample.std()) or 1.0
    centre, deviation = (float(middle), float(spread)) if scale else (0.0, 1.0)
    return NumberColumn(name, centre, deviation, tuple(edges.tolist()), scale, gaps)
