"""Read series from a long file (a line per record and time) or a wide one (a line per record)."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import polars as pl

from vafl.arrays import Array, Doubles, Integers
from vafl.data.alignment.ids import canonical_ids
from vafl.data.columns import match_columns
from vafl.data.encoding import as_numbers, as_times, is_date, is_text
from vafl.data.source_settings import SeriesSettings, TableSettings
from vafl.data.sources.common import fingerprint_of, section_of
from vafl.data.tables import POSITION, Table
from vafl.errors import DataError


class SeriesFile:
    """The lines of a file that hold series, by record id.

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
        # Reduce each batch first: few of a long file's lines begin a record.
        distinct = [batch[name].unique(maintain_order=True) for batch in self.table.all_batches([name])]
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


class _Times:
    """Turns the times of a file into numbers. All of them must be numbers, or all of them dates."""

    def __init__(self, source: SeriesFile) -> None:
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
