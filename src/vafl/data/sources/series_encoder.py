"""Encode series as [steps, features]. The layout of the features is in series.py."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any, ClassVar, Literal

import numpy as np
import polars as pl

from vafl.arrays import Array, Floats, Integers
from vafl.conversion import make
from vafl.data.sources.base import Source
from vafl.data.sources.common import as_stored, damaged_encoder, lacking, of_kind, reshaped
from vafl.data.sources.records import EncodedRecords, check_complete
from vafl.data.sources.series_file import SeriesFile
from vafl.errors import DataError

_BEND = 3.0  # the limit of the smooth clip, in robust deviations from the median
_BUCKET = 32 << 20  # bytes of features whose lines are sorted at once
_SPOOL = 256 << 10  # bytes of lines of a bucket that stay in memory


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
        series = of_kind(SeriesFile, source, self.kind, source.section)
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

    def _read_wide(self, series: SeriesFile, wanted: pl.DataFrame, features: Floats) -> None:
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
        check_complete(series.location, found, wanted)
        self._check_odd(series, odd, values_read)

    def _read_long(self, series: SeriesFile, wanted: pl.DataFrame, rows: int, features: Floats) -> None:
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
        check_complete(series.location, found, wanted)
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

    def _check_odd(self, series: SeriesFile, odd: Integers, count: int) -> None:
        """Raise DataError if most values of a column are not numbers: it has changed its meaning."""
        for column, wrong in zip(self.columns, odd.tolist(), strict=True):
            if wrong > count / 2:
                raise DataError(
                    "VFL-2401",
                    f'"{series.location}" must have numbers in "{column.name}", as in training. Found '
                    f"{wrong:,} of {count:,} values that are not. Check that the column still has the same "
                    "meaning, and correct its values.",
                )

    def misfit(self, source: Source) -> str:
        """Return why a changed source needs a new encoder: it lacks a column, or names other steps."""
        series = of_kind(SeriesFile, source, self.kind, source.section)
        steps = series.settings.steps or self.steps
        return lacking(self.columns, series.columns) or reshaped(self.record_shape, [steps, len(self.names)])

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
