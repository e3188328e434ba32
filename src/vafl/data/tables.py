"""Open and check one party's table, from a file or in memory, and read it in batches of bounded size.

CSV columns stay text until they are encoded. Guessing their types would lose the leading zeros of an id.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from vafl.data.alignment.ids import canonical_ids
from vafl.data.columns import match_columns, no_column
from vafl.data.csv_files import SEPARATORS, check_names, is_packed, is_parquet, not_utf_8, read_blocks
from vafl.data.settings import LABEL_HOLDER
from vafl.data.source_settings import SourceSettings, TableSettings
from vafl.data.sources.common import fingerprint_of, section_of
from vafl.errors import ConfigError, DataError
from vafl.names import table_owner

if TYPE_CHECKING:  # these modules import this one
    from vafl.data.encoding import Encoder, Form
    from vafl.data.fitting import ColumnReport

POSITION = "vafl position"  # an extra column of a batch: the row that each line becomes
_ID = "vafl id"
_BATCH = 65_536  # most lines in memory at once
_CELLS = 1_000_000  # most cells in memory at once, which means fewer lines of a wide table


class Table:
    """A party's table, which is a source of records. The schema is read at once, lines are read on demand.

    Attributes:
        schema: column -> type. All columns of a CSV are text.

    Args:
        party: the party's name.
        settings: the party's source. Without an id column, a record's id is its line number, from 0.
        frame: the table, if it is in memory.

    Raises:
        DataError: the file is missing or damaged, or lacks the id, label or weight column.
    """

    def __init__(self, party: str, settings: TableSettings, frame: pl.DataFrame | None = None) -> None:
        self.party, self.settings, self.path = party, settings, Path(settings.path)
        if frame is not None:
            self._lines, self.schema = frame.lazy(), dict(frame.schema)
            self._is_plain = False
            return
        if not self.path.is_file():
            raise DataError(
                "VFL-2281",
                f'{section_of(party)}.path must be a CSV or Parquet file. Found no file "{self.path}". '
                "Correct the path.",
            )
        with self._reading():
            self.is_parquet = is_parquet(self.path)
            self._lines = self._scan()
            self.schema = dict(self._lines.collect_schema())
            self._is_plain = not self.is_parquet and not is_packed(self.path)
        if not self.is_parquet:
            check_names(self.schema, self.path, settings.separator)
        for name in filter(None, (settings.id, settings.label, settings.weight)):
            self.check_column(name)

    @property
    def section(self) -> str:
        """The section of the configuration that chooses the columns."""
        return section_of(self.party) if self.settings.id else "data"

    @property
    def location(self) -> str:
        """The table's file."""
        return str(self.path)

    def fingerprint(self) -> str:
        """Return text that changes with the file or the settings."""
        return fingerprint_of(self.settings, self.path)

    def fit(
        self, training: pl.DataFrame, *, form: "Form", scale: bool, public: bool, flags_absent: bool
    ) -> "tuple[Encoder, list[ColumnReport]]":
        """Fit an encoder on the training lines, as `vafl.data.fitting.fit` does."""
        from vafl.data.fitting import fit  # noqa: PLC0415 - it imports this module

        return fit(self, training, form=form, scale=scale, public=public, flags_absent=flags_absent)

    def _scan(self) -> pl.LazyFrame:
        if self.is_parquet:
            return pl.scan_parquet(self.path, glob=False)
        return pl.scan_csv(self.path, separator=self.settings.separator, infer_schema=False, glob=False)

    def check_column(self, name: str) -> None:
        """Raise DataError if there is no such column."""
        if name in self.schema:
            return
        header = next(iter(self.schema))
        if len(self.schema) == 1 and (separators := [mark for mark in SEPARATORS if mark in header]):
            raise DataError(
                "VFL-2282",
                f'"{self.path}" has no column "{name}". Its header seems to be separated by '
                f"{separators[0]!r}. Set {self.section}.separator.",
            )
        raise no_column(self.path, name, self.schema)

    @cached_property
    def features(self) -> list[str]:
        """The feature columns that the settings choose.

        A column without a name is never a feature: pandas writes its index like that.
        """
        settings = self.settings
        others = ("", settings.id, settings.label, settings.weight)
        kept = [name for name in self.schema if name not in others]
        chosen = self.matching(kept, "features") if settings.features else kept
        ignored = set(self.matching(list(self.schema), "ignore"))
        return [name for name in chosen if name not in ignored]

    def matching(self, columns: Sequence[str], setting: str) -> list[str]:
        """Return the columns that match the names and patterns of a setting, such as "features"."""
        patterns = getattr(self.settings, setting)
        if not patterns:
            return []
        places = match_columns(columns, {setting: patterns}, self.section)[setting]
        return [columns[place] for place in places]

    def ids(self) -> pl.Series:
        """Return the canonical id of every record, in the file's order.

        Raises:
            DataError: an id is missing or duplicated, or has the wrong type.
        """
        with self._reading():
            if not self.settings.id:
                return _line_numbers(0, self._lines.select(pl.len()).collect(engine="streaming").item())
            column = pl.concat(self._batches([self.settings.id])).to_series()
        return canonical_ids(column, str(self.path))

    def batches(self, columns: Sequence[str], wanted: pl.DataFrame) -> Iterator[pl.DataFrame]:
        """Yield these columns of the wanted lines in batches, each with an extra column POSITION.

        Args:
            wanted: `id` and POSITION of each line.
        """
        id_column = self.settings.id
        lines = 0
        with self._reading():
            # Join batch by batch: a lazy join of the whole table may load all of it.
            for batch in self._batches(list(dict.fromkeys([id_column, *columns] if id_column else columns))):
                ids = batch[id_column].cast(pl.String) if id_column else _line_numbers(lines, batch.height)
                lines += batch.height
                joined = batch.with_columns(ids.alias(_ID)).join(
                    wanted, left_on=_ID, right_on="id", how="inner"
                )
                yield joined.select(*columns, POSITION)

    def all_batches(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """Yield these columns of every line in batches."""
        with self._reading():
            yield from self._batches(columns)

    def slice(self, columns: Sequence[str], start: int, count: int) -> pl.DataFrame:
        """Return these columns of `count` lines, fewer at the end. Fast for Parquet files only."""
        with self._reading():
            return self._lines.select(columns).slice(start, count).collect()

    def _batches(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        if self._is_plain and columns:
            return read_blocks(self.path, self.schema, columns, self.settings.separator)
        size = max(1024, min(_BATCH, _CELLS // (len(columns) + 1)))
        lines = self._lines.select(columns)
        return lines.collect_batches(chunk_size=size, maintain_order=True, engine="streaming")

    def check_found(self, lines: int, wanted: pl.DataFrame) -> None:
        """Raise DataError unless the number of lines that were read is the number that is wanted."""
        if lines != wanted.height:
            raise DataError(
                "VFL-2283",
                f'"{self.path}" must be the file that was aligned. Found {lines:,} lines for '
                f"{wanted.height:,} records, so the file has changed since. Run `vafl align` again at every "
                "party.",
            )

    def values(self, column: str, kind: pl.DataType) -> pl.Expr:
        """Return an expression for a column's values: text stripped of whitespace, null where missing."""
        if kind == pl.String or isinstance(kind, pl.Categorical | pl.Enum):
            text = pl.col(column).cast(pl.String).str.strip_chars()
            return pl.when(~text.is_in(["", *self.settings.missing])).then(text).alias(column)
        return pl.col(column).fill_nan(None) if kind.is_float() else pl.col(column)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn any exception that polars raises for a damaged file into a DataError that names the file."""
        try:
            yield
        # Polars panics on some damaged Parquet files: on 7 of 4,000 with random bytes changed (polars 2.1).
        # PanicException is not an Exception, so `except Exception` would not catch it.
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
            if "utf-8" in str(error) and self.path.suffix != ".parquet":
                raise not_utf_8(self.path, "bytes that are not") from error
            kind = "Parquet file" if self.path.suffix == ".parquet" else "CSV (in UTF-8) or Parquet file"
            cause = str(error).strip().partition("\n")[0]
            raise DataError(
                "VFL-2284",
                f'"{self.path}" must be a complete {kind}, with the same fields in every line. Found: '
                f"{cause}. Write the file again, or copy it again from its source.",
            ) from error


def open_table(sources: Mapping[str, SourceSettings], name: str) -> Table:
    """Open a party's table.

    If a client shares the label holder's file, its label and weight columns are ignored.

    Raises:
        ConfigError: the party's source is not a table.
    """
    name = table_owner(name)
    settings, holder = sources[name], sources.get(LABEL_HOLDER)
    if not isinstance(settings, TableSettings):
        raise ConfigError(
            "VFL-2254",
            f"{section_of(name)} must be a table: labels and weights are columns of a table. Found the kind "
            f'"{settings.kind}". Set kind = "table" for the label holder, and let a client hold the '
            f"{settings.kind}.",
        )
    if isinstance(holder, TableSettings) and name != LABEL_HOLDER and settings.path == holder.path:
        secret = [column for column in (holder.label, holder.weight) if column]
        settings = replace(settings, ignore=(*settings.ignore, *secret))
    return Table(name, settings)


def _line_numbers(first: int, count: int) -> pl.Series:
    """Return `count` line numbers from `first` on, as ids."""
    return pl.int_range(first, first + count, eager=True).cast(pl.String).alias("id")
