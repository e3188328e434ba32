"""Load the parties' own data as one vertical data set. Each process reads only its party's data.

`vafl align` gives every row the same number at all parties, in random order. A permutation drawn from the
run's seed therefore splits the rows into training, validation and test rows in the same way everywhere.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import torch

from vafl.arrays import Labels
from vafl.data.alignment.rows import Alignment
from vafl.data.encoding import Form
from vafl.data.fitting import ColumnReport
from vafl.data.labels import label_classes, read_labels, read_weights
from vafl.data.one_file import number_lines
from vafl.data.partition import Party, VerticalData
from vafl.data.settings import LABEL_HOLDER, DataSettings
from vafl.data.source_settings import SourceSettings
from vafl.data.sources.base import RecordEncoder, Source
from vafl.data.sources.cache import FeatureCache
from vafl.data.sources.common import section_of
from vafl.data.sources.opening import open_source
from vafl.data.split import Split
from vafl.data.tables import POSITION, open_table
from vafl.errors import ConfigError, DataError
from vafl.names import LOCAL_CLIENT, table_owner

Alignments = Mapping[str, Alignment]


def load_tables(
    settings: DataSettings,
    tables: Mapping[str, SourceSettings],
    seed: int,
    party: str | None = None,
    *,
    form: Callable[[str], Form] = lambda name: "dense",
    public: bool = False,
    known: Callable[[str], RecordEncoder | None] = lambda name: None,
) -> VerticalData:
    """Return the part of the data that one party may see.

    A party gets its own features. The label holder also gets the labels, the weights and the ids that each
    client holds. A client gets zeros instead of labels. Other parties' features are empty, [rows, 0].

    Args:
        settings: the [data] section.
        tables: party -> its source.
        seed: the run's seed, which decides the split.
        party: the party to load for; None loads every party's data, for a simulation.
        form: party -> the form of features that its table's encoder produces.
        public: whether encoders must not depend on the records, as record-level privacy requires.
        known: party -> the encoder to use; None fits one on the training rows.
    """
    alignments = find_alignments(settings, tables, party)
    alignment = next(iter(alignments.values()))
    names = client_names(settings, alignment)
    _check_local(tables, alignments)
    split = Split.of(alignment.rows, settings, seed)
    load = partial(load_party, settings, tables, public=public)
    parties = [
        load(name, alignments[table_owner(name)], split, form=form(name), encoder=known(name))[0]
        if party in (None, table_owner(name))
        else _remote_party(name, alignment, split)
        for name in names
    ]
    labels = _labels(settings, tables, alignments, split)
    # Parties compare this digest before they train: it changes with the alignment, the clients and the split.
    agreed = "|".join((alignment.token, *names, split.digest()))
    return VerticalData(
        tuple(parties),
        torch.from_numpy(labels),
        split.parts,
        alignment.classes,
        hashlib.sha256(agreed.encode()).hexdigest()[:16],
        split.order,
        alignment.token if settings.name == "csv" else "parties",
        _weights(tables, alignments, split),
    )


def client_names(settings: DataSettings, alignment: Alignment) -> tuple[str, ...]:
    """Return the names of all clients: those that connect, then LOCAL_CLIENT if the label holder has one."""
    return (*settings.parties, LOCAL_CLIENT) if alignment.with_local else settings.parties


def _check_local(tables: Mapping[str, SourceSettings], alignments: Alignments) -> None:
    """Check that the label holder still has features if it had some during alignment, and none otherwise.

    The other parties count clients by the alignment, so a change would make them disagree about the model.

    Raises:
        DataError: the label holder's feature columns appeared or disappeared after the alignment.
    """
    if LABEL_HOLDER not in alignments:
        return
    features = open_table(tables, LABEL_HOLDER).features
    with_local = alignments[LABEL_HOLDER].with_local
    if bool(features) != with_local:
        raise DataError(
            "VFL-2001",
            "`vafl align` records whether the label holder has features, and that must not change. Found "
            f"{len(features)} feature columns now, and an alignment {'with' if with_local else 'without'} "
            f"them. Restore features and ignore in [{section_of(LABEL_HOLDER)}] as they were then "
            '(ignore = ["*"] uses no column), or run `vafl align` again.',
        )


def positions(split: Split, alignment: Alignment) -> pl.DataFrame:
    """Return `id` and POSITION, the row in the split's order, of each of a party's records."""
    rows = np.empty(len(split.order), dtype=np.int64)
    rows[split.order] = np.arange(len(split.order))
    return pl.DataFrame({"id": alignment.ids, POSITION: rows[alignment.numbers]})


def load_party(
    settings: DataSettings,
    tables: Mapping[str, SourceSettings],
    name: str,
    alignment: Alignment,
    split: Split,
    *,
    form: Form = "dense",
    public: bool = False,
    encoder: RecordEncoder | None = None,
) -> tuple[Party, list[ColumnReport]]:
    """Return a client with its features of all rows, and a report on each of its columns.

    The encoder is fitted on the client's training rows only, unless it is given. There is no report then.

    Raises:
        DataError: the client has no training row, or a feature has the label's name.
    """
    source = open_source(tables, name)
    check_label_unused(source, alignment)
    wanted = positions(split, alignment)
    training = wanted.filter(pl.col(POSITION) < split.parts.train)
    if not training.height:
        raise DataError(
            "VFL-2002",
            f'"{source.location}": {name} must have at least one training row. Found none of the '
            f"{split.parts.train:,}. Add records to its source, and run `vafl align` again.",
        )
    report: list[ColumnReport] = []
    if encoder is None:
        encoder, report = source.fit(
            training,
            form=form,
            scale=settings.scale != "none",
            public=public,
            flags_absent=settings.records == "labelled",
        )
    rows = len(split.order)
    features = FeatureCache.at(tables[table_owner(name)].cache).features(source, encoder, wanted, rows)
    return Party(name, features, encoder, ids_by_position(wanted, rows)), report


def check_label_unused(source: Source, alignment: Alignment) -> None:
    """Raise DataError if a feature column has the label's name.

    A client may have been given a copy of the label holder's file. It knows only the label column's name, so
    this check cannot detect a label under another name.
    """
    if alignment.label and alignment.label in source.features:
        raise DataError(
            "VFL-2003",
            f'"{source.location}": the label must not be a feature. Found a feature column '
            f'"{alignment.label}", which is the label\'s name. Add it to {source.section}.ignore. If it '
            "holds something else, rename it.",
        )


def _remote_party(name: str, alignment: Alignment, split: Split) -> Party:
    """Return a client as another party sees it: no features, and ids only at the label holder."""
    rows, held = len(split.order), alignment.holders.get(name)
    ids = None if held is None else ids_by_position(positions(split, alignment).filter(held), rows)
    return Party(name, torch.empty(rows, 0), ids=ids)


def ids_by_position(wanted: pl.DataFrame, rows: int) -> pl.Series:
    """Return the `id` at each POSITION, [rows]; null where `wanted` has none."""
    every = pl.DataFrame({POSITION: np.arange(rows)})
    return every.join(wanted, on=POSITION, how="left", maintain_order="left")["id"]


def _weights(
    tables: Mapping[str, SourceSettings], alignments: Alignments, split: Split
) -> torch.Tensor | None:
    """Return the weight of each row in the training loss; None if all weigh the same, or at a client."""
    if LABEL_HOLDER not in alignments:
        return None
    table = open_table(tables, LABEL_HOLDER)
    weights = read_weights(table, positions(split, alignments[LABEL_HOLDER]))
    if weights is None:
        return None
    if not weights[: split.parts.train].any():
        raise DataError(
            "VFL-2004",
            f'"{table.path}": at least one training row must have a weight above 0. Found only zeros in '
            f'"{table.settings.weight}". Choose another weight column, or leave it out.',
        )
    return torch.from_numpy(weights)


def _labels(
    settings: DataSettings, tables: Mapping[str, SourceSettings], alignments: Alignments, split: Split
) -> Labels:
    """Return the labels, [rows]; zeros at a client, which must not see them."""
    alignment = alignments.get(LABEL_HOLDER)
    if alignment is None:
        kind = np.float32 if settings.task == "regression" else np.int64
        return np.zeros(len(split.order), dtype=kind)
    table = open_table(tables, LABEL_HOLDER)
    labels = read_labels(table, positions(split, alignment), alignment.classes)
    if alignment.classes is not None and len(np.unique(labels[: split.parts.train])) < 2:
        raise DataError(
            "VFL-2005",
            f'"{table.path}": the training rows must contain at least two classes. Found one in '
            f'"{table.settings.label}". Choose another label column, or add records.',
        )
    return labels


def find_alignments(
    settings: DataSettings, tables: Mapping[str, SourceSettings], party: str | None, *, labelled: bool = True
) -> Alignments:
    """Return the alignment of one party, or of every party if `party` is None.

    A `csv` file needs no alignment: its lines are the rows. For `parties`, this reads the files that
    `vafl align` wrote. If there are none and all data are on this machine, it joins them by id instead.

    Args:
        labelled: whether the alignment must describe the labels; predictions do not need them.

    Raises:
        ConfigError: a party has no source.
        DataError: the party is unknown, a file is missing, or the alignments do not belong together.
    """
    everyone = (LABEL_HOLDER, *settings.parties)
    party = party if party is None else table_owner(party)
    if party is not None and party not in everyone:
        raise DataError(
            "VFL-2006",
            f'the party must be one of {", ".join(everyone)}. Found "{party}". Use one of these names, or '
            "add it to data.parties.",
        )
    names = everyone if party is None else (party,)
    if missing := [name for name in names if name not in tables]:
        raise ConfigError(
            "VFL-2007",
            f"every party to load needs a source. Missing: [{section_of(missing[0])}]. Found "
            f"{', '.join(f'[{section_of(name)}]' for name in tables) or 'none'}. Add the section, with path "
            "and id.",
        )
    if settings.name == "csv":
        lines = number_lines(open_table(tables, LABEL_HOLDER), settings.task, labelled=labelled)
        return dict.fromkeys(names, lines)
    # Join in the clear only if no party has been aligned. A single alignment file shows that the parties use
    # `vafl align`, so a missing one is an error and must not be replaced silently.
    aligned = any(Path(table.alignment).is_file() for table in tables.values())
    if not aligned and all(name in tables for name in everyone):
        joined = join(settings, tables)
        return {name: joined[name] for name in names}
    alignments = {name: Alignment.read(Path(tables[name].alignment)) for name in names}
    token = alignments[names[0]].token
    for name, alignment in alignments.items():
        path = tables[name].alignment
        if alignment.token != token:
            raise DataError(
                "VFL-2009",
                f'all alignments must come from the same run of `vafl align`. Found "{path}" from another '
                "run. Run `vafl align` again at every party.",
            )
        _check_records(settings, path, name, alignment, labelled=labelled)
        if labelled and (alignment.classes is None) != (settings.task == "regression"):
            raise DataError(
                "VFL-2008",
                f'data.task must be the same as during alignment. Found data.task = "{settings.task}", but '
                f'"{path}" was made for another task. Restore data.task and the server\'s label, or run '
                "`vafl align` again.",
            )
    return alignments


def _check_records(
    settings: DataSettings, path: str, name: str, alignment: Alignment, *, labelled: bool
) -> None:
    """Check that the label holder has every row and, if data.records = "common", that every client does.

    The label holder's alignment says which rows each client has, so the server fails before it listens.

    Args:
        path: the alignment file.
        name: the party that the file belongs to.
        labelled: whether a model is being trained. Otherwise a trained model is used, and its training
            decided data.records.

    Raises:
        DataError: a party lacks rows.
    """
    if name == LABEL_HOLDER and len(alignment.ids) < alignment.rows:
        raise DataError(
            "VFL-2010",
            f'the label holder must have every row. "{path}" says that it has {len(alignment.ids):,} of '
            f"{alignment.rows:,}. Run `vafl align` again at every party.",
        )
    if settings.records == "labelled":
        return
    counts = {name: len(alignment.ids)}
    counts |= {client: int(held.sum()) for client, held in alignment.holders.items()}
    gaps = [
        f"{party} has {count:,} of {alignment.rows:,}"
        for party, count in counts.items()
        if count < alignment.rows
    ]
    if not gaps:
        return
    found = f'"{path}" says: {"; ".join(gaps)}.'
    if labelled:
        raise DataError(
            "VFL-2011",
            f'data.records = "common" needs every party to have every row. {found} Set data.records = '
            '"labelled" at every party, or run `vafl align` again.',
        )
    raise DataError(
        "VFL-2012",
        f'this model was trained with data.records = "common", so it scores only records that every party '
        f'has. {found} Set data.records = "common" at every party and run `vafl align` again. To score every '
        'record of the label holder, train a model with data.records = "labelled".',
    )


def join(settings: DataSettings, tables: Mapping[str, SourceSettings]) -> Alignments:
    """Align sources that are all on this machine by comparing their ids in the clear.

    The result depends only on the ids, so separate processes that join the same files agree on every row.

    Raises:
        DataError: no id is in every source.
    """
    holder = open_table(tables, LABEL_HOLDER)
    ids = {LABEL_HOLDER: holder.ids()}
    ids |= {name: open_source(tables, name).ids() for name in settings.parties}
    rows = ids[LABEL_HOLDER].sort()
    if settings.records == "common":
        for name in settings.parties:
            rows = rows.filter(rows.is_in(ids[name].implode()))
    if not len(rows):
        examples = "; ".join(f'{name} "{party_ids[0]}"' for name, party_ids in ids.items())
        raise DataError(
            "VFL-2013",
            "the parties must have records in common. Found no id that all of them have. The first id of "
            f"each party: {examples}. Check that all parties write ids in the same format.",
        )
    label, with_local = holder.settings.label, bool(holder.features)
    classes = label_classes(holder, settings.task) if label else None
    # Token and row order are functions of the sorted ids, not random: another process gets the same ones.
    token = hashlib.sha256("\n".join(rows).encode()).hexdigest()[:32]
    order = np.random.Generator(np.random.Philox(int(token, 16))).permutation(len(rows))
    numbered = pl.DataFrame({"id": rows, "row": order})
    aligned = {}
    for name, party_ids in ids.items():
        records = numbered.filter(pl.col("id").is_in(party_ids.implode())).sort("row")
        aligned[name] = Alignment(
            token,
            numbered.height,
            classes,
            records["id"],
            records["row"].to_numpy(),
            label=label,
            with_local=with_local,
        )
    labelled = aligned[LABEL_HOLDER]
    holders = {name: pl.Series(np.isin(labelled.numbers, aligned[name].numbers)) for name in settings.parties}
    return aligned | {LABEL_HOLDER: replace(labelled, holders=holders)}
