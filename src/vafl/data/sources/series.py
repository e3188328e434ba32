"""Values over time, from a long file (a line per record and time) or a wide one (a line per record).

A record becomes [steps, features]. Its last step is the latest one, and a shorter series is padded with zeros
at its beginning. The features of a step are, in this order:

- one number per column, scaled by the training records and clipped smoothly; 0 if it is missing;
- for each column that had gaps in training, 1 where its value is missing, otherwise 0;
- "(step)", if lengths differ: 1 for a step of the series, 0 for padding.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any, ClassVar, Literal

import numpy as np
import polars as pl

from vafl.arrays import Array, Doubles, Floats, Integers
from vafl.conversion import make
from vafl.data.alignment.ids import canonical_ids
from vafl.data.columns import match_columns
from vafl.data.encoding import Form, as_numbers, as_times, is_date, is_text
from vafl.data.fitting import ColumnReport
from vafl.data.source_settings import SeriesSettings, TableSettings
from vafl.data.sources.base import Source
from vafl.data.sources.common import (
    as_stored,
    damaged_encoder,
    fingerprint_of,
    lacking,
    of_kind,
    reshaped,
    section_of,
)
from vafl.data.sources.records import EncodedRecords, check_complete, check_trainable
from vafl.data.tables import POSITION, Table
from vafl.errors import ConfigError, DataError

MOST_STEPS = 512  # if the settings name no number of steps
_SAMPLE = 50_000  # lines whose numbers are kept to find medians and quartiles
_ARE_NUMBERS = 0.95  # a text column with this share of numbers is a number column; the rest count as missing
_NORMAL_QUARTILES = 1.349  # interquartile range of a normal distribution with deviation 1
_BEND = 3.0  # the limit of the smooth clip, in robust deviations from the median
_BUCKET = 32 << 20  # bytes of features whose lines are sorted at once
_SPOOL = 256 << 10  # bytes of lines of a bucket that stay in memory


class SeriesSource:
    """Series by record id.

    Attributes:
        table: the file, read in batches.
        columns: name of a feature -> its columns: one in a long file, one per step in a wide file.

    Raises:
        DataError: the file is missing or damaged, lacks a column, or wide features differ in length.
    """

    def __init__(self, party: str, settings: SeriesSettings) -> None:
        self.party, self.settings = party, settings
        read = {"missing": settings.missing, "separator": settings.separator}
        read |= {"features": settings.features, "ignore": settings.ignore}
        self.table = Table(party, TableSettings(settings.path, settings.id, **read))  # type: ignore[arg-type]
        if settings.time:
            self.table.check_column(settings.time)
            self.columns = {name: [name] for name in self.table.features if name != settings.time}
        else:
            self.columns = self._wide()
        if not self.columns:
            raise DataError(
                "VFL-2391",
                f'"{settings.path}": a series needs at least one column besides id and time. Found none. '
                f"Check {self.section}.features and ignore.",
            )

    def _wide(self) -> dict[str, list[str]]:
        names = list(self.table.schema)
        # Each feature on its own: two features may share a column, for example one that never changes.
        found = {}
        for name, patterns in self.settings.wide.items():
            places = match_columns(names, {name: patterns}, f"{self.section}.wide")[name]
            found[name] = [names[place] for place in places]
        if len({len(columns) for columns in found.values()}) > 1:
            counts = ", ".join(f"{name} {len(columns)}" for name, columns in found.items())
            raise DataError(
                "VFL-2392",
                f"{self.section}.wide: all features must have the same number of steps. Found {counts}. List "
                "one column for each step.",
            )
        return found

    @property
    def section(self) -> str:
        """The section of the configuration that describes the source."""
        return section_of(self.party)

    @property
    def location(self) -> str:
        """The file."""
        return self.settings.path

    @property
    def features(self) -> Sequence[str]:
        """The columns that hold values."""
        return list(dict.fromkeys(column for columns in self.columns.values() for column in columns))

    @property
    def is_wide(self) -> bool:
        """Whether a record is one line."""
        return bool(self.settings.wide)

    def fingerprint(self) -> str:
        """Return text that changes with the file or the settings."""
        return fingerprint_of(self.settings, Path(self.settings.path))

    def ids(self) -> pl.Series:
        """Return the canonical id of every record, in the order of its first line."""
        return self._all_ids

    @cached_property
    def _all_ids(self) -> pl.Series:
        if self.is_wide:
            return self.table.ids()
        name = self.settings.id
        distinct = [
            batch[name].unique(maintain_order=True) for batch in self.table.all_batches([name])
        ]  # few of a long file's lines begin a record
        if not distinct:
            distinct = [pl.Series(name, [], dtype=pl.String)]
        return canonical_ids(pl.concat(distinct).unique(maintain_order=True), self.location)

    def lines(
        self, names: Sequence[str], wanted: pl.DataFrame
    ) -> Iterator[tuple[Integers, Doubles, Array, list[int]]]:
        """Yield the wanted lines of a long file in batches.

        Yields:
            rows: [lines], the row of each line.
            times: [lines], ascending with time.
            values: [lines, names], NaN where a value is missing or not a number.
            odd: for each name, how many values are not numbers.
        """
        time, order = self.settings.time, _Times(self)
        schema = self.table.schema
        for batch in self.table.batches([time, *names], wanted):
            read = batch.select(self.table.values(name, schema[name]) for name in names)
            values = np.empty((batch.height, len(names)))
            odd = []
            for place, name in enumerate(names):
                values[:, place] = as_numbers(read[name])
                odd.append(int(np.isnan(values[:, place]).sum()) - read[name].null_count())
            moment = batch.select(self.table.values(time, schema[time])).to_series()
            yield batch[POSITION].to_numpy().astype(np.int64), order.of(moment), values, odd

    def records(
        self, columns: Sequence[Sequence[str]], wanted: pl.DataFrame
    ) -> Iterator[tuple[Integers, Array, list[int]]]:
        """Yield the wanted records of a wide file in batches.

        Args:
            columns: for each feature, its columns in the order of the steps.

        Yields:
            rows: [records].
            values: [records, steps, features], NaN where a value is missing or not a number.
            odd: for each feature, how many values are not numbers.
        """
        every = list(dict.fromkeys(column for steps in columns for column in steps))
        schema = self.table.schema
        for batch in self.table.batches(every, wanted):
            read = batch.select(self.table.values(name, schema[name]) for name in every)
            values = np.empty((batch.height, len(columns[0]), len(columns)))
            odd = [0] * len(columns)
            for place, steps in enumerate(columns):
                for step, name in enumerate(steps):
                    values[:, step, place] = as_numbers(read[name])
                    odd[place] += int(np.isnan(values[:, step, place]).sum()) - read[name].null_count()
            yield batch[POSITION].to_numpy().astype(np.int64), values, odd

    def fit(
        self, training: pl.DataFrame, *, form: Form, scale: bool, public: bool, flags_absent: bool
    ) -> "tuple[SeriesEncoder, list[ColumnReport]]":
        """Fit an encoder on the training records, in one pass over the file and in bounded memory.

        Raises:
            ConfigError: `public` is set, and the settings do not say how many steps there are.
            DataError: no column holds numbers.
        """
        check_trainable(self, training)
        settings, names = self.settings, list(self.columns)
        if public and not self.is_wide and not settings.steps:
            raise ConfigError(
                "VFL-2393",
                f"record-level privacy needs {self.section}.steps: the longest series depends on the "
                "records. Found 0. Set the number of steps.",
            )
        profile = self._profile(names, training)
        columns, reports = [], []
        for place, name in enumerate(names):
            column, report = self._decide(profile, place, name, scale=scale, public=public)
            reports.append(report)
            columns += [] if column is None else [column]
        if not columns:
            reasons = "; ".join(f"{report.name}: {report.why}" for report in reports[:5])
            raise DataError(
                "VFL-2394",
                f'"{self.location}": a series needs at least one column of numbers. Found none: {reasons}. '
                "Choose other columns, or write the values as numbers.",
            )
        longest, shortest = (len(self.columns[names[0]]),) * 2 if self.is_wide else profile.lengths()
        steps = settings.steps or min(longest, MOST_STEPS)
        marks_steps = shortest < steps or (public and not self.is_wide)
        return SeriesEncoder(tuple(columns), steps, marks_steps, flags_absent), reports

    def _profile(self, names: list[str], training: pl.DataFrame) -> "_Profile":
        profile = _Profile(len(names), int(training[POSITION].to_numpy().max(initial=-1)) + 1)
        if self.is_wide:
            for rows, values, odd in self.records([self.columns[name] for name in names], training):
                steps = values.shape[1]
                profile.add(np.repeat(rows, steps), values.reshape(-1, len(names)), odd)
        else:
            for rows, _, values, odd in self.lines(names, training):
                profile.add(rows, values, odd)
        check_complete(self, int((profile.counts > 0).sum()), training)
        return profile

    def _decide(
        self, profile: "_Profile", place: int, name: str, *, scale: bool, public: bool
    ) -> "tuple[SeriesColumn | None, ColumnReport]":
        """Return how a column is encoded; None and a reason if it is dropped."""
        missing, odd = int(profile.missing[place]), int(profile.odd[place])
        present = profile.lines - missing + odd
        kind = str(self.table.schema[self.columns[name][0]])

        def dropped(why: str) -> "tuple[None, ColumnReport]":
            return None, ColumnReport(name, kind, "dropped", why, missing - odd, 0)

        if odd > (1 - _ARE_NUMBERS) * present:
            why = f"{odd:,} of {present:,} values are not numbers: write one column of 0 and 1 per category"
            if public or self.settings.features or self.is_wide:
                raise DataError(
                    "VFL-2395",
                    f'"{self.location}": the columns of a series must hold numbers. Found "{name}": {why}. '
                    f"Remove it from {self.section}.",
                )
            return dropped(why)
        if public:
            return SeriesColumn(name, 0.0, 1.0, False, False), ColumnReport(
                name, kind, "number", "as it is, 0 where missing", missing, 1
            )
        sample = profile.sample(place)
        if not len(sample):
            return dropped("missing in every training record")
        if sample.min() == sample.max() and not missing:
            return dropped(f"always {sample[0]:g} in the training records")
        low, middle, high = np.quantile(sample, [0.25, 0.5, 0.75])
        # Quartiles ignore outliers. They coincide if more than half of the values are equal.
        spread = (high - low) / _NORMAL_QUARTILES or float(sample.std()) or 1.0
        centre, deviation = (float(middle), float(spread)) if scale else (0.0, 1.0)
        why = f"median {middle:.4g}, from {sample.min():g} to {sample.max():g}"
        column = SeriesColumn(name, centre, deviation, scale, missing > 0)
        return column, ColumnReport(name, kind, "number", why, missing, 1 + column.flags_missing)


class _Times:
    """Turns the times of a file into numbers. All of them must be numbers, or all of them dates."""

    def __init__(self, source: SeriesSource) -> None:
        self._source = source
        self._are_dates: bool | None = None
        kind = source.table.schema[source.settings.time]
        if not (kind.is_numeric() or is_text(kind) or is_date(kind) or kind in (pl.Time, pl.Duration)):
            raise DataError(
                "VFL-2396",
                f'"{source.location}": times must be numbers or dates. Found {kind} in '
                f'"{source.settings.time}". Choose another column.',
            )

    def of(self, values: pl.Series) -> Doubles:
        """Return numbers that ascend with time, [lines].

        Raises:
            DataError: a time is missing, or not of the kind of the first ones.
        """
        if values.dtype in (pl.Time, pl.Duration):
            values = values.to_physical()
        if self._are_dates is None:
            first = values.drop_nulls().head(1)
            self._are_dates = (
                bool(np.isnan(as_numbers(first)).any()) if is_text(values.dtype) else (is_date(values.dtype))
            )
        numbers = as_numbers(as_times(values).dt.epoch("us") if self._are_dates else values)
        if (wrong := np.flatnonzero(np.isnan(numbers))).size:
            expected = "a date in ISO 8601, such as 2024-05-01 10:30" if self._are_dates else "a number"
            raise DataError(
                "VFL-2397",
                f'"{self._source.location}": every line needs a time, here {expected}. Found '
                f'{values[int(wrong[0])]!r} in "{self._source.settings.time}". Correct or drop those lines.',
            )
        return numbers


@dataclass
class _Profile:
    """Statistics of the training lines read so far.

    Attributes:
        counts: [rows], the number of lines of each record.
        lines: the number of all lines.
        missing, odd: [columns], the numbers of values that are missing or not numbers, and only the latter.
    """

    width: int
    rows: int
    lines: int = 0
    counts: Integers = field(init=False)
    missing: Integers = field(init=False)
    odd: Integers = field(init=False)

    def __post_init__(self) -> None:
        self.counts = np.zeros(self.rows, dtype=np.int64)
        self.missing, self.odd = np.zeros(self.width, dtype=np.int64), np.zeros(self.width, dtype=np.int64)
        # A fixed seed, so that fitting the same records again gives the same encoder.
        self._chance = np.random.Generator(np.random.Philox(0))
        self._kept, self._drawn = np.empty((0, self.width)), np.empty(0)

    def add(self, rows: Integers, values: Array, odd: Sequence[int]) -> None:
        """Add lines: their rows, and their values [lines, columns]."""
        self.lines += len(rows)
        self.counts += np.bincount(rows, minlength=self.rows)
        self.missing += np.isnan(values).sum(0)
        self.odd += np.array(odd, dtype=np.int64)
        # Each line draws a number, and the lines with the smallest ones are the sample: every line has the
        # same chance, though the number of lines is not known in advance.
        drawn = np.concatenate([self._drawn, self._chance.random(len(rows))])
        kept = np.concatenate([self._kept, values])
        if len(drawn) > _SAMPLE:
            chosen = np.sort(np.argpartition(drawn, _SAMPLE)[:_SAMPLE])
            drawn, kept = drawn[chosen], kept[chosen]
        self._drawn, self._kept = drawn, kept

    def sample(self, column: int) -> Doubles:
        """Return the sampled numbers of a column, without missing ones."""
        values = self._kept[:, column]
        return values[~np.isnan(values)]

    def lengths(self) -> tuple[int, int]:
        """Return the most and the fewest lines of a record."""
        counts = self.counts[self.counts > 0]
        return int(counts.max()), int(counts.min())


@dataclass(frozen=True)
class SeriesColumn:
    """Encodes a number relative to the training records.

    Attributes:
        centre: the median of the training records; 0 if numbers are not scaled.
        scale: the robust deviation of the training records; 1 if numbers are not scaled.
        bends: whether large values are clipped smoothly.
        flags_missing: whether a second feature marks missing values.
    """

    name: str
    centre: float
    scale: float
    bends: bool
    flags_missing: bool

    def __post_init__(self) -> None:
        if not (math.isfinite(self.centre) and 0 < self.scale < math.inf):
            raise DataError(
                "VFL-2398",
                f"a column of a series must have a finite centre and a positive scale. Found {self.centre} "
                f'and {self.scale} in "{self.name}".',
            )


@dataclass(frozen=True)
class SeriesEncoder(EncodedRecords):
    """Encodes series as [steps, features].

    Attributes:
        columns: the encoded columns, in the order of their features.
        steps: the number of steps of every record.
        marks_steps: whether the feature "(step)" tells the steps of a series from padding.
        flags_absent: whether the features mark records that the party does not have.
    """

    kind: ClassVar[str] = "series"
    columns: tuple[SeriesColumn, ...]
    steps: int
    marks_steps: bool
    flags_absent: bool

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if not names or len(set(names)) < len(names) or self.steps < 1:
            raise DataError(
                "VFL-2399",
                "an encoder of series must have at least one step, and each column once. Found "
                f"{self.steps} steps and the columns {names[:5]}.",
            )

    @property
    def record_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The shape of a record: steps and features."""
        return self.steps, len(self.names)

    @property
    def names(self) -> list[str]:
        """The names of the features of a step."""
        flags = [f"{column.name} is missing" for column in self.columns if column.flags_missing]
        marks = ["(step)"] if self.marks_steps else []
        return [*(column.name for column in self.columns), *flags, *marks]

    def encode(self, values: Array) -> Floats:
        """Return the features [..., features] of steps with these values [..., columns]; NaN is missing."""
        centres = np.array([column.centre for column in self.columns])
        scales = np.array([column.scale for column in self.columns])
        bends = np.array([column.bends for column in self.columns])
        flags = np.array([column.flags_missing for column in self.columns])
        missing = np.isnan(values)
        scaled = np.where(missing, 0.0, (values - centres) / scales)
        scaled = np.where(bends, scaled / np.sqrt(1 + np.square(scaled / _BEND)), scaled)
        marks = np.ones((*values.shape[:-1], int(self.marks_steps)))
        parts = [scaled, missing[..., flags], marks]
        return np.concatenate(parts, axis=-1, dtype=np.float32, casting="unsafe")

    def read(self, source: Source, wanted: pl.DataFrame, rows: int, into: Floats | None = None) -> Floats:
        """Return the features [rows, *shape] of the wanted records; other rows are absent.

        Raises:
            DataError: a column is missing, a record is missing, or more than half of the values of a column
                are not numbers.
        """
        series = of_kind(SeriesSource, source, self.kind, source.section)
        names = [column.name for column in self.columns]
        if missing := [name for name in names if name not in series.columns]:
            raise DataError(
                "VFL-2400",
                f'"{series.location}" must have every column that the model was trained on. Missing: '
                f"{', '.join(missing[:5])}. Add the missing columns, or train again without them.",
            )
        features = self.start(wanted, rows, into)
        if series.is_wide:
            self._read_wide(series, wanted, features)
        else:
            self._read_long(series, wanted, rows, features)
        return features

    def _read_wide(self, series: SeriesSource, wanted: pl.DataFrame, features: Floats) -> None:
        found, odd, values_read = 0, np.zeros(len(self.columns), dtype=np.int64), 0
        columns = [series.columns[column.name] for column in self.columns]
        for rows, values, wrong in series.records(columns, wanted):
            latest = values[:, -self.steps :]
            records = np.zeros((len(rows), *self.record_shape), dtype=np.float32)
            records[:, self.steps - latest.shape[1] :] = self.encode(latest)
            self.put(features, rows, records)
            found += len(rows)
            odd += np.array(wrong)
            values_read += len(rows) * values.shape[1]
        check_complete(series, found, wanted)
        self._check_odd(series, odd, values_read)

    def _read_long(self, series: SeriesSource, wanted: pl.DataFrame, rows: int, features: Floats) -> None:
        """Read a long file, whose lines may be in any order, in bounded memory.

        The lines are distributed over buckets of rows, in temporary files if they are many. Then the lines of
        one bucket at a time are sorted by record and time.
        """
        names = [column.name for column in self.columns]
        line = np.dtype([("row", "<i8"), ("time", "<f8"), ("values", "<f4", (self.record_shape[1],))])
        size = max(1, _BUCKET // (4 * math.prod(self.shape)))
        buckets = [_Bucket(line, series.settings.cache) for _ in range(0, rows, size)]
        odd, count = np.zeros(len(names), dtype=np.int64), 0
        try:
            for targets, times, values, wrong in series.lines(names, wanted):
                lines: Array = np.empty(len(targets), dtype=line)
                lines["row"], lines["time"], lines["values"] = targets, times, self.encode(values)
                number = targets // size
                for place in np.unique(number):
                    buckets[place].add(lines[number == place])
                odd += np.array(wrong)
                count += len(targets)
            found = sum(self._sort(bucket.lines(), features) for bucket in buckets)
        finally:
            for bucket in buckets:
                bucket.close()
        check_complete(series, found, wanted)
        self._check_odd(series, odd, count)

    def _sort(self, lines: Array, features: Floats) -> int:
        """Store the latest steps of the records that these lines belong to. Return the number of records."""
        if not len(lines):
            return 0
        # Lexsort is stable: lines of the same time keep their order in the file.
        lines = lines[np.lexsort((lines["time"], lines["row"]))]
        rows, first, counts = np.unique(lines["row"], return_index=True, return_counts=True)
        before_end = np.repeat(first + counts, counts) - np.arange(len(lines))  # 1 for the latest line
        kept = before_end <= self.steps
        records = np.zeros((len(rows), *self.record_shape), dtype=np.float32)
        record = np.repeat(np.arange(len(rows)), counts)
        records[record[kept], self.steps - before_end[kept]] = lines["values"][kept]
        self.put(features, rows, records)
        return len(rows)

    def misfit(self, source: Source) -> str:
        """Return why a changed source needs a new encoder: it lacks a column, or names other steps."""
        series = of_kind(SeriesSource, source, self.kind, source.section)
        steps = series.settings.steps or self.steps
        return lacking(self.columns, series.columns) or reshaped(self.record_shape, [steps, len(self.names)])

    def _check_odd(self, series: SeriesSource, odd: Integers, count: int) -> None:
        """Raise DataError if most values of a column are not numbers: it has changed its meaning."""
        for column, wrong in zip(self.columns, odd.tolist(), strict=True):
            if wrong > count / 2:
                raise DataError(
                    "VFL-2401",
                    f'"{series.location}" must have numbers in "{column.name}", as in training. Found '
                    f"{wrong:,} of {count:,} values that are not. Check that the column still has the same "
                    "meaning, and correct its values.",
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the encoder as values that TOML and JSON can represent."""
        return as_stored(self.kind, asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SeriesEncoder":
        """Make the encoder that `to_dict` described; raise DataError if the values describe none."""
        try:
            written = make(_Written, dict(values))
            return cls(tuple(written.columns), written.steps, written.marks_steps, written.flags_absent)
        except ValueError as error:
            raise damaged_encoder(error) from error


@dataclass(frozen=True)
class _Written:
    """The document that `SeriesEncoder.to_dict` makes."""

    kind: Literal["series"]
    columns: list[SeriesColumn]
    steps: int
    marks_steps: bool
    flags_absent: bool


class _Bucket:
    """Lines of some rows: in memory while they are few, otherwise in a temporary file without a name.

    Args:
        folder: where the file is created, because it holds the party's values; "" uses the system's folder
            for temporary files, where only this user can read it.
    """

    def __init__(self, line: np.dtype[Any], folder: str) -> None:
        self._line = line
        inside = folder if folder and Path(folder).is_dir() else None
        self._file = SpooledTemporaryFile(max_size=_SPOOL, dir=inside)  # noqa: SIM115 - see `close`

    def add(self, lines: Array) -> None:
        self._file.write(lines.tobytes())

    def lines(self) -> Array:
        """Return all lines in the order in which they were added."""
        self._file.seek(0)
        return np.frombuffer(self._file.read(), dtype=self._line)

    def close(self) -> None:
        self._file.close()
