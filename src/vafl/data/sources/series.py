"""Values over time, from a long file (a line per record and time) or a wide one (a line per record).

A record becomes [steps, features]. Its last step is the latest one, and a shorter series is padded with zeros
at its beginning. The features of a step are, in this order:

- one number per column, scaled by the training records and clipped smoothly; 0 if it is missing;
- for each column that had gaps in training, 1 where its value is missing, otherwise 0;
- "(step)", if lengths differ: 1 for a step of the series, 0 for padding.

series_file.py reads the files, and series_encoder.py applies the encoding. This module fits the encoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from vafl.arrays import Array, Doubles, Integers
from vafl.data.encoding import Form
from vafl.data.fitting import ColumnReport
from vafl.data.sources.records import check_complete, check_trainable
from vafl.data.sources.series_encoder import SeriesColumn, SeriesEncoder
from vafl.data.sources.series_file import SeriesFile
from vafl.data.tables import POSITION
from vafl.errors import ConfigError, DataError

MOST_STEPS = 512  # if the settings name no number of steps
_SAMPLE = 50_000  # lines whose numbers are kept to find medians and quartiles
_ARE_NUMBERS = 0.95  # a text column with this share of numbers is a number column; the rest count as missing
_NORMAL_QUARTILES = 1.349  # interquartile range of a normal distribution with deviation 1


class SeriesSource(SeriesFile):
    """A source of series, with the attributes of `SeriesFile`."""

    def fit(
        self, training: pl.DataFrame, *, form: Form, scale: bool, public: bool, flags_absent: bool
    ) -> tuple[SeriesEncoder, list[ColumnReport]]:
        """Fit an encoder on the training records, in one pass over the file and in bounded memory.

        Raises:
            ConfigError: `public` is set, and the settings do not say how many steps there are.
            DataError: no column holds numbers.
        """
        check_trainable(self.location, training)
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
        check_complete(self.location, int((profile.counts > 0).sum()), training)
        return profile

    def _decide(
        self, profile: "_Profile", place: int, name: str, *, scale: bool, public: bool
    ) -> tuple[SeriesColumn | None, ColumnReport]:
        """Return how a column is encoded; None and a reason if it is dropped."""
        missing, odd = int(profile.missing[place]), int(profile.odd[place])
        present = profile.lines - missing + odd
        kind = str(self.table.schema[self.columns[name][0]])

        def dropped(why: str) -> tuple[None, ColumnReport]:
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
