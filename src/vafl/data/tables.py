"""One party's own table, in a file or in memory: opened, checked, and read in batches of bounded size.

In a CSV everything is text until it is encoded: no guess about types can lose the zeros of an id.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import polars as pl

from vafl.data.alignment.ids import canonical_ids
from vafl.data.columns import match_columns, no_column
from vafl.data.csv_files import SEPARATORS, check_names, is_packed, is_parquet, not_utf_8, read_blocks
from vafl.data.settings import LABEL_HOLDER, TableSettings
from vafl.errors import DataError
from vafl.names import table_owner

POSITION = "vafl position"  # beside a batch's columns: where each of its lines belongs
_ID = "vafl id"
_BATCH = 65_536  # lines in memory at once, fewer where there are many columns
_CELLS = 1_000_000


class Table:
    """A party's table: its columns are known, its lines are read when asked for.

    Attributes:
        schema: the columns and their types; all of a CSV's are text.

    Args:
        settings: without an id, a record's id is the number of its line, from 0.
        frame: the table itself, if it is in memory.
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
                f'tables.{party}.path must be a CSV or Parquet file. Found nothing at "{self.path}".',
            )
        with self._reading():
            self.is_parquet = is_parquet(self.path)
            self._lines = self._scan()
            self.schema = dict(self._lines.collect_schema())
            self._is_plain = not self.is_parquet and not is_packed(self.path)
        if not self.is_parquet:
            check_names(self.schema, self.path, settings.separator)
        for name in filter(None, (settings.id, settings.label, settings.weight)):
            self._check_column(name)

    @property
    def section(self) -> str:
        """The section of the configuration that says which columns are used."""
        return f"tables.{self.party}" if self.settings.id else "data"

    def _scan(self) -> pl.LazyFrame:
        if self.is_parquet:
            return pl.scan_parquet(self.path, glob=False)
        return pl.scan_csv(self.path, separator=self.settings.separator, infer_schema=False, glob=False)

    def _check_column(self, name: str) -> None:
        if name in self.schema:
            return
        header = next(iter(self.schema))
        if len(self.schema) == 1 and (other := [mark for mark in SEPARATORS if mark in header]):
            hint = f"Its header looks separated by {other[0]!r}: set {self.section}.separator."
            raise DataError("VFL-2282", f'"{self.path}" has no column "{name}". {hint}')
        raise no_column(self.path, name, self.schema)

    @cached_property
    def features(self) -> list[str]:
        """The columns that the settings ask for; never one without a name, as pandas writes its index."""
        settings = self.settings
        others = ("", settings.id, settings.label, settings.weight)
        kept = [name for name in self.schema if name not in others]
        chosen = self.matching(kept, "features") if settings.features else kept
        ignored = set(self.matching(list(self.schema), "ignore"))
        return [name for name in chosen if name not in ignored]

    def matching(self, columns: Sequence[str], setting: str) -> list[str]:
        """Those of the columns that a setting's names and patterns mean."""
        patterns = getattr(self.settings, setting)
        if not patterns:
            return []
        found = match_columns(columns, {setting: patterns}, self.section)
        return [columns[place] for place in found[setting]]

    def ids(self) -> pl.Series:
        """Everyone's canonical id, in the file's order, checked."""
        with self._reading():
            if not self.settings.id:
                return _line_numbers(0, self._lines.select(pl.len()).collect(engine="streaming").item())
            found = pl.concat(self._batches([self.settings.id])).to_series()
        return canonical_ids(found, str(self.path))

    def batches(self, columns: Sequence[str], wanted: pl.DataFrame) -> Iterator[pl.DataFrame]:
        """These columns of the lines that are wanted, some lines at a time.

        Batch by batch, since a join of the whole may hold the whole.

        Args:
            wanted: `id` and POSITION of each line; a batch has POSITION beside its columns.
        """
        named = self.settings.id
        lines = 0
        with self._reading():
            for batch in self._batches(list(dict.fromkeys([named, *columns] if named else columns))):
                ids = batch[named].cast(pl.String) if named else _line_numbers(lines, batch.height)
                lines += batch.height
                found = batch.with_columns(ids.alias(_ID))
                found = found.join(wanted, left_on=_ID, right_on="id", how="inner")
                yield found.select(*columns, POSITION)

    def all_batches(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """These columns of every line, some lines at a time."""
        with self._reading():
            yield from self._batches(columns)

    def _batches(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        if self._is_plain and columns:
            return read_blocks(self.path, self.schema, columns, self.settings.separator)
        size = max(1024, min(_BATCH, _CELLS // (len(columns) + 1)))
        lines = self._lines.select(columns)
        return lines.collect_batches(chunk_size=size, maintain_order=True, engine="streaming")

    def check_found(self, lines: int, wanted: pl.DataFrame) -> None:
        """Raises DataError unless as many lines were read as are wanted."""
        if lines != wanted.height:
            raise DataError(
                "VFL-2283",
                f'"{self.path}" must be the file that was aligned. It has {lines:,} lines for the '
                f"{wanted.height:,} records to read: it was changed since. Run `vafl align` again.",
            )

    def values(self, column: str, kind: pl.DataType) -> pl.Expr:
        """A column's values as they are meant: no blanks around text, null where one is missing."""
        if kind == pl.String or isinstance(kind, pl.Categorical | pl.Enum):
            text = pl.col(column).cast(pl.String).str.strip_chars()
            return pl.when(~text.is_in(["", *self.settings.missing])).then(text).alias(column)
        return pl.col(column).fill_nan(None) if kind.is_float() else pl.col(column)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Whatever a damaged file makes of the reader is an error that names the file."""
        try:
            yield
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
            if "utf-8" in str(error) and self.path.suffix != ".parquet":
                raise not_utf_8(self.path, "bytes that are not") from error
            kind = "Parquet file" if self.path.suffix == ".parquet" else "CSV (in UTF-8) or Parquet file"
            cause = str(error).strip().partition("\n")[0]
            raise DataError(
                "VFL-2284",
                f'"{self.path}" must be a whole {kind}, with the same fields in every line. {cause}. '
                "Write it again, or get it again.",
            ) from error


def open_table(tables: Mapping[str, TableSettings], name: str) -> Table:
    """Open a party's table. If it is the label holder's file, label and weight are no features of it."""
    name = table_owner(name)
    own, labels = tables[name], tables.get(LABEL_HOLDER)
    if labels is not None and name != LABEL_HOLDER and own.path == labels.path:
        unused = [column for column in (labels.label, labels.weight) if column]
        own = replace(own, ignore=(*own.ignore, *unused))
    return Table(name, own)


def _line_numbers(first: int, count: int) -> pl.Series:
    """The ids of lines that have no others."""
    return pl.int_range(first, first + count, eager=True).cast(pl.String).alias("id")
