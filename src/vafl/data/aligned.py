"""The parties' tables as one vertical data set: each process reads the file of its own party alone.

Rows are numbered alike at all parties by `vafl align`, in random order, so a permutation by the run's seed
splits them into training, validation and test rows the same way everywhere.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import torch

from vafl.data.alignment.rows import Alignment
from vafl.data.dataset import Labels
from vafl.data.encoding import Encoder, Form
from vafl.data.fitting import ColumnReport, fit
from vafl.data.labels import label_classes, read_labels, read_weights
from vafl.data.one_file import number_lines
from vafl.data.partition import Party, VerticalData
from vafl.data.settings import LABEL_HOLDER, DataSettings, TableSettings
from vafl.data.split import Split
from vafl.data.tables import POSITION, Table, open_table
from vafl.errors import ConfigError, DataError
from vafl.names import LOCAL_CLIENT, table_owner

Alignments = Mapping[str, Alignment]


def load_tables(
    settings: DataSettings,
    tables: Mapping[str, TableSettings],
    seed: int,
    party: str | None = None,
    *,
    form: Form = "dense",
    public: bool = False,
) -> VerticalData:
    """Return what one party knows of the data: its features, and at the label holder the labels.

    The others are names only; the label holder knows their records too. A client has zeros for labels. None
    for `party` reads everything, for a simulation.

    Args:
        form: what features the encoders make.
        public: encoders must not depend on the records, as where each is guaranteed privacy.
    """
    alignments = find_alignments(settings, tables, party)
    own = next(iter(alignments.values()))
    names = client_names(settings, own)
    _check_local(tables, alignments)
    split = Split.of(own.rows, settings, seed)
    parties = [
        load_party(settings, tables, name, alignments[table_owner(name)], split, form=form, public=public)[0]
        if party in (None, table_owner(name))
        else _unseen(name, own, split)
        for name in names
    ]
    labels = _labels(settings, tables, alignments, split)
    together = "|".join((own.token, *names, split.digest()))
    return VerticalData(
        tuple(parties),
        torch.from_numpy(labels),
        split.parts,
        own.classes,
        hashlib.sha256(together.encode()).hexdigest()[:16],
        split.order,
        own.token if settings.name == "csv" else "tables",
        _weights(tables, alignments, split),
    )


def client_names(settings: DataSettings, alignment: Alignment) -> tuple[str, ...]:
    """Return the names of all clients of a run: those that connect, then the label holder's own."""
    return (*settings.parties, LOCAL_CLIENT) if alignment.with_local else settings.parties


def _check_local(tables: Mapping[str, TableSettings], alignments: Alignments) -> None:
    """Check that the label holder's features are in use if, and only if, the other parties were told so.

    Raises:
        DataError: the columns to use have changed since the parties were aligned.
    """
    if LABEL_HOLDER not in alignments:
        return
    features, told = open_table(tables, LABEL_HOLDER).features, alignments[LABEL_HOLDER].with_local
    if bool(features) != told:
        raise DataError(
            "VFL-2001",
            "the parties agree in `vafl align` whether the label holder has features. Found "
            f"{len(features)} feature columns now, and an alignment {'with' if told else 'without'} them. "
            f'Set features and ignore of [tables.{LABEL_HOLDER}] as they were then (ignore = ["*"] uses '
            "none), or align again.",
        )


def positions(split: Split, alignment: Alignment) -> pl.DataFrame:
    """Return `id` and POSITION of a party's records: which row each of them is."""
    rows = np.empty(len(split.order), dtype=np.int64)
    rows[split.order] = np.arange(len(split.order))
    return pl.DataFrame({"id": alignment.ids, POSITION: rows[alignment.numbers]})


def load_party(
    settings: DataSettings,
    tables: Mapping[str, TableSettings],
    name: str,
    alignment: Alignment,
    split: Split,
    *,
    form: Form = "dense",
    public: bool = False,
) -> tuple[Party, list[ColumnReport]]:
    """A client's features of all rows, encoded by its own training rows; and what became of its columns."""
    table = open_table(tables, name)
    check_label_unused(table, alignment)
    wanted = positions(split, alignment)
    training = wanted.filter(pl.col(POSITION) < split.parts.train)
    if not training.height:
        raise DataError(
            "VFL-2002", f'"{table.path}": {name} has none of the {split.parts.train:,} training rows.'
        )
    encoder, report = fit(
        table,
        training,
        form=form,
        scale=settings.scale != "none",
        public=public,
        flags_absent=settings.records == "labelled",
    )
    return _encoded(name, table, encoder, wanted, split), report


def check_label_unused(table: Table, alignment: Alignment) -> None:
    """Raises DataError if a feature is called as the label: the label holder's client may have its file.

    The name is all that a client can know of the label, so nobody finds it under another.
    """
    if alignment.label and alignment.label in table.features:
        raise DataError(
            "VFL-2003",
            f'"{table.path}": the label must be no feature, and its column "{alignment.label}" is called as '
            f"the label is. Name it in {table.section}.ignore; if it means something else, rename it.",
        )


def _encoded(name: str, table: Table, encoder: Encoder, wanted: pl.DataFrame, split: Split) -> Party:
    features = torch.from_numpy(encoder.read(table, wanted, len(split.order)))
    ids = ids_by_position(wanted, len(split.order))
    return Party(name, features, encoder, ids)


def _unseen(name: str, own: Alignment, split: Split) -> Party:
    """A client as another party knows it: without features; the label holder knows whom it has."""
    rows, held = len(split.order), own.holders.get(name)
    ids = None if held is None else ids_by_position(positions(split, own).filter(held), rows)
    return Party(name, torch.empty(rows, 0), ids=ids)


def ids_by_position(wanted: pl.DataFrame, rows: int) -> pl.Series:
    """[rows], the `id` at each POSITION; null where there is none."""
    every = pl.DataFrame({POSITION: np.arange(rows)})
    return every.join(wanted, on=POSITION, how="left", maintain_order="left")["id"]


def _weights(
    tables: Mapping[str, TableSettings], alignments: Alignments, split: Split
) -> torch.Tensor | None:
    """Return how much each row counts in the training loss; None if all count the same, or at a client."""
    if LABEL_HOLDER not in alignments:
        return None
    table = open_table(tables, LABEL_HOLDER)
    weights = read_weights(table, positions(split, alignments[LABEL_HOLDER]))
    if weights is None:
        return None
    if not weights[: split.parts.train].any():
        raise DataError(
            "VFL-2004",
            f'"{table.path}": some training rows must have a weight above 0. Found only zeros in '
            f'"{table.settings.weight}". Name another column, or none.',
        )
    return torch.from_numpy(weights)


def _labels(
    settings: DataSettings, tables: Mapping[str, TableSettings], alignments: Alignments, split: Split
) -> Labels:
    alignment = alignments.get(LABEL_HOLDER)
    if alignment is None:
        kind = np.float32 if settings.task == "regression" else np.int64
        return np.zeros(len(split.order), dtype=kind)
    table = open_table(tables, LABEL_HOLDER)
    labels = read_labels(table, positions(split, alignment), alignment.classes)
    if alignment.classes is not None and len(np.unique(labels[: split.parts.train])) < 2:
        raise DataError(
            "VFL-2005", f'"{table.path}": training rows must show at least two classes. Found one.'
        )
    return labels


def find_alignments(
    settings: DataSettings, tables: Mapping[str, TableSettings], party: str | None, *, labelled: bool = True
) -> Alignments:
    """The alignment of one party (None: of all): of `vafl align`, or by a plain join of files all at hand.

    Args:
        labelled: whether it must say what the labels are: predictions can do without.

    Raises:
        ConfigError, DataError: a section or a file is missing, or the files are of different alignments.
    """
    everyone = (LABEL_HOLDER, *settings.parties)
    party = party if party is None else table_owner(party)
    if party is not None and party not in everyone:
        raise DataError("VFL-2006", f'"{party}" is no party of this run. Its parties: {", ".join(everyone)}.')
    asked = everyone if party is None else (party,)
    if lacking := [name for name in asked if name not in tables]:
        raise ConfigError(
            "VFL-2007",
            f"a section [tables.{lacking[0]}] is needed: path and id of {lacking[0]}'s table. Found "
            f"{', '.join(f'[tables.{name}]' for name in tables) or 'none'}.",
        )
    if settings.name == "csv":
        lines = number_lines(open_table(tables, LABEL_HOLDER), settings.task, labelled=labelled)
        return dict.fromkeys(asked, lines)
    aligned = any(Path(table.alignment).is_file() for table in tables.values())
    if not aligned and all(name in tables for name in everyone):
        joined = join(settings, tables)
        return {name: joined[name] for name in asked}
    found = {name: Alignment.read(Path(tables[name].alignment)) for name in asked}
    for name, own in found.items():
        _check_token(tables[name].alignment, own, found[asked[0]])
        _check_records(settings, tables[name].alignment, name, own, labelled=labelled)
        if labelled and (own.classes is None) != (settings.task == "regression"):
            raise DataError(
                "VFL-2008",
                f'data.task = "{settings.task}" is not what "{tables[name].alignment}" was made for. Set '
                "data.task and the server's label as they were when the parties were aligned, or align "
                "again.",
            )
    return found


def _check_token(path: str, own: Alignment, first: Alignment) -> None:
    if own.token != first.token:
        raise DataError(
            "VFL-2009",
            f'the parties\' alignments must be of one run of `vafl align`. "{path}" is of another. Run it '
            "again at every party.",
        )


def _check_records(settings: DataSettings, path: str, name: str, own: Alignment, *, labelled: bool) -> None:
    """Check that the label holder has every row, and so has every client if data.records = "common".

    The label holder's alignment tells which rows each client has, so the server fails before it listens.

    Args:
        labelled: whether a model is trained; else one is used, and its training decided data.records.

    Raises:
        DataError: a party lacks rows.
    """
    if name == LABEL_HOLDER and len(own.ids) < own.rows:
        raise DataError(
            "VFL-2010",
            f'the label holder must have every row. By "{path}", it has {len(own.ids):,} of {own.rows:,}. '
            "Run `vafl align` again at every party.",
        )
    if settings.records == "labelled":
        return
    counts = {name: len(own.ids)} | {client: int(held.sum()) for client, held in own.holders.items()}
    lacking = [
        f"{party} has {count:,} of {own.rows:,}" for party, count in counts.items() if count < own.rows
    ]
    if not lacking:
        return
    found = f'By "{path}", {"; ".join(lacking)}.'
    if labelled:
        raise DataError(
            "VFL-2011",
            f'data.records = "common" needs rows that every party has. {found} Set data.records = "labelled" '
            "at every party, or align again.",
        )
    raise DataError(
        "VFL-2012",
        f'this model was trained with data.records = "common": it scores only records that every party has. '
        f'{found} Set data.records = "common" at every party and run `vafl align` again. To score everyone '
        'the label holder has, train a model with data.records = "labelled".',
    )


def join(settings: DataSettings, tables: Mapping[str, TableSettings]) -> Alignments:
    """Aligns files that are all on this machine by comparing ids in the clear.

    The same files always give the same rows: processes that each do it agree.
    """
    opened = {name: open_table(tables, name) for name in (LABEL_HOLDER, *settings.parties)}
    ids = {name: table.ids() for name, table in opened.items()}
    rows = ids[LABEL_HOLDER].sort()
    if settings.records == "common":
        for name in settings.parties:
            rows = rows.filter(rows.is_in(ids[name].implode()))
    if not len(rows):
        raise DataError("VFL-2013", _nothing_common(ids))
    classes = label_classes(opened[LABEL_HOLDER], settings.task) if tables[LABEL_HOLDER].label else None
    token = hashlib.sha256("\n".join(rows).encode()).hexdigest()[:32]
    order = np.random.Generator(np.random.Philox(int(token, 16))).permutation(len(rows))
    numbered = pl.DataFrame({"id": rows, "row": order})
    holder = opened[LABEL_HOLDER]
    label, with_local = holder.settings.label, bool(holder.features)
    aligned = {
        name: replace(_numbered(own, numbered, token, classes), label=label, with_local=with_local)
        for name, own in ids.items()
    }
    whole = aligned[LABEL_HOLDER]
    holders = {name: pl.Series(np.isin(whole.numbers, aligned[name].numbers)) for name in settings.parties}
    return aligned | {LABEL_HOLDER: replace(whole, holders=holders)}


def _numbered(
    ids: pl.Series, numbered: pl.DataFrame, token: str, classes: tuple[str, ...] | None
) -> Alignment:
    own = numbered.filter(pl.col("id").is_in(ids.implode())).sort("row")
    return Alignment(token, numbered.height, classes, own["id"], own["row"].to_numpy())


def _nothing_common(ids: Mapping[str, pl.Series]) -> str:
    examples = "; ".join(f'{name} "{own[0]}"' for name, own in ids.items())
    return (
        "the parties must have records in common. No id is in every table. The first of each: "
        f"{examples}. Are they written alike?"
    )
