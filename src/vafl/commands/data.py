"""`vafl data`: show how a run will use each column of the parties' data, and which it drops and why."""

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from vafl.commands.configured import add_config_options, as_json, overrides
from vafl.config import Config, read_config
from vafl.data import leakage
from vafl.data.aligned import check_label_unused, find_alignments, positions
from vafl.data.alignment.rows import Alignment
from vafl.data.fitting import ColumnReport
from vafl.data.labels import label_classes, read_labels
from vafl.data.settings import LABEL_HOLDER, DataSettings
from vafl.data.source_settings import SourceSettings, TableSettings
from vafl.data.sources.base import RecordEncoder, Source
from vafl.data.sources.opening import open_source
from vafl.data.split import Split
from vafl.data.tables import POSITION, Table, open_table
from vafl.errors import ConfigError
from vafl.run.plan import form_for, load_data, tables_of


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vafl data`."""
    add_config_options(parser)
    parser.add_argument("--party", help="show one party's data (default: all data in the file)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(command=run)


@dataclass(frozen=True)
class Preview:
    """The parts of one party's data that a run will use.

    Attributes:
        party: the party's name.
        path: the file, folder or factory.
        records: the number of records in the source.
        aligned: whether the parties are aligned; if not, all lines count as training rows.
        rows: how many of the records are rows of the run.
        training_rows: how many of those are training rows.
        features: the number of features made from the columns.
        columns: how each column is used; empty for a label holder without features.
        labels: for the label holder: the share of each class, or the mean and range.
    """

    party: str
    path: str
    records: int
    aligned: bool
    rows: int
    training_rows: int
    features: int = 0
    columns: list[ColumnReport] = field(default_factory=list)
    labels: dict[str, float] = field(default_factory=dict)


def run(options: argparse.Namespace, console: Console) -> None:
    """Print how the run will use each column of the parties' data."""
    config = read_config(options.config, overrides(options))
    if not config.data.is_tabular:
        raise ConfigError(
            "VFL-9051", f'`vafl data` needs data.name = "csv" or "parties". Found "{config.data.name}".'
        )
    known = tables_of(config)[1]
    names = [options.party or config.party] if options.party or config.party else list(known)
    if not names or names[0] not in known:
        raise ConfigError(
            "VFL-9052",
            "`vafl data` needs a party with data in this file, as [parties.NAME.source]. Found "
            f"{options.party or 'none'}; the file has {', '.join(known) or 'none'}.",
        )
    previews, suspects = [preview(config, name) for name in names], _suspects(config)
    if options.json:
        document = {"parties": [asdict(party) for party in previews], "suspects": suspects}
        sys.stdout.write(as_json(document))
        return
    for party in previews:
        _print(party, console)
    for sentence in suspects:
        console.print(f"suspicious: {sentence}", style="yellow", highlight=False, markup=False)


def preview(config: Config, name: str) -> Preview:
    """Read one party's source as a run would, and describe it."""
    settings, tables = tables_of(config)
    source, alignment = open_source(tables, name), _alignment(settings, tables, name)
    records = source.ids()
    wanted, trained = _rows_of(config, source, alignment)
    training = wanted.filter(pl.col(POSITION) < trained)
    sizes = (len(records), alignment is not None, wanted.height, training.height)
    labels = {}
    if name == LABEL_HOLDER and (table := open_table(tables, name)).settings.label:
        labels = _labels(config, table, wanted)
    if name == LABEL_HOLDER and not source.features:
        return Preview(name, source.location, *sizes, labels=labels)
    encoder, columns = _fit(config, name, source, training)
    if settings.name == "csv":  # the other columns belong to other parties
        columns = [report for report in columns if report.name in source.features]
    return Preview(name, source.location, *sizes, math.prod(encoder.shape), columns, labels)


def fitted_encoder(config: Config, name: str, alignment: Alignment | None) -> RecordEncoder:
    """Return the encoder of a party's training records; of all its records if it is not aligned yet."""
    source = open_source(tables_of(config)[1], name)
    wanted, trained = _rows_of(config, source, alignment)
    return _fit(config, name, source, wanted.filter(pl.col(POSITION) < trained))[0]


def _rows_of(config: Config, source: Source, alignment: Alignment | None) -> tuple[pl.DataFrame, int]:
    """Return `id` and POSITION of a party's records, and the number of training rows, which come first."""
    if alignment is None:
        records = source.ids()
        return pl.DataFrame({"id": records, POSITION: np.arange(len(records))}), len(records)
    check_label_unused(source, alignment)
    split = Split.of(alignment.rows, config.data, config.seed)
    return positions(split, alignment), split.parts.train


def _fit(
    config: Config, name: str, source: Source, training: pl.DataFrame
) -> tuple[RecordEncoder, list[ColumnReport]]:
    return source.fit(
        training,
        form=form_for(config, name),
        scale=config.data.scale != "none",
        public=config.privacy.protection.guaranteed,
        flags_absent=config.data.records == "labelled",
    )


def _suspects(config: Config) -> list[str]:
    """Return warnings about columns that predict the label alone, if the labels are available here."""
    settings, tables = tables_of(config)
    holder = tables.get(LABEL_HOLDER)
    if (
        not isinstance(holder, TableSettings)
        or not holder.label
        or _alignment(settings, tables, LABEL_HOLDER) is None
    ):
        return []
    complete = set(settings.parties) <= set(tables)
    return leakage.warnings(load_data(config, None if complete else LABEL_HOLDER))


def _alignment(settings: DataSettings, tables: Mapping[str, SourceSettings], name: str) -> Alignment | None:
    """Return the party's alignment if it exists, or if this file names all tables; else None."""
    everyone = {LABEL_HOLDER, *settings.parties}
    if not Path(tables[name].alignment).is_file() and everyone - set(tables):
        return None
    return find_alignments(settings, tables, name)[name]


def _labels(config: Config, table: Table, wanted: pl.DataFrame) -> dict[str, float]:
    classes = label_classes(table, config.data.task)
    labels = read_labels(table, wanted, classes)
    if classes is None:
        return {"mean": float(labels.mean()), "smallest": float(labels.min()), "largest": float(labels.max())}
    shares = np.bincount(labels, minlength=len(classes)) / len(labels)
    return dict(zip(classes, shares.tolist(), strict=True))


def _print(preview: Preview, console: Console) -> None:
    console.print(Text.assemble((preview.party, "bold"), f": {preview.path}, {preview.records:,} records"))
    if preview.aligned:
        console.print(
            f"  {preview.rows:,} of them are rows of the run, {preview.training_rows:,} for training"
        )
    else:
        console.print(
            "  not aligned yet: the numbers below are for all records (`vafl align` finds the common ones)"
        )
    if preview.labels:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in preview.labels.items())
        console.print(f"  labels: {shown}")
    if not preview.columns:
        return
    console.print(f"  {preview.features} features:")
    grid = Grid("column", "type", "use", "features", "missing", "")
    for column in sorted(preview.columns, key=lambda report: report.use == "dropped"):
        sizes = (f"{column.features}", f"{column.missing:,}")
        grid.add_row(column.name, column.type, column.use, *sizes, column.why)
    console.print(grid)
