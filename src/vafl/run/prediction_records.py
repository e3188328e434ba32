"""The records that a trained model is asked about, as one party sees them."""

from dataclasses import dataclass

import numpy as np
import polars as pl
import torch
from torch import Tensor

from vafl.config import Config
from vafl.data.aligned import find_alignments, ids_by_position
from vafl.data.dataset import Records
from vafl.data.tables import POSITION, open_table
from vafl.errors import RunFolderError
from vafl.models.store import StoredModel
from vafl.names import SERVER, table_owner
from vafl.run.plan import encoder_of, load_data, tables_of


@dataclass(frozen=True)
class PredictionRecords:
    """Records, numbered alike at all parties.

    Attributes:
        digest: tells sets of records apart; parties compare it before anything is asked.
        source: what these records are a part of.
        chosen: the rows that a batch is about, ascending: all, or those held out of training.
        ids: [rows], what each record is called at this party; null where it has none.
        features: [rows, ...], the party's own; the server has none.
        unscored: lines of the server's table that are no rows of the alignment; 0 at clients.
    """

    digest: str
    source: str
    chosen: Records
    ids: pl.Series
    features: Tensor
    unscored: int = 0

    @property
    def rows(self) -> int:
        return len(self.ids)


def load_subjects(config: Config, party: str, model: StoredModel) -> PredictionRecords:
    """Read a party's table, and encode it as in training. All its records are scored.

    Other data sets have record numbers for ids, and their test rows are scored.

    Raises:
        ConfigError, DataError: a file or a column is missing.
        RunFolderError: the features, or records that must be, are not those of the model.
    """
    if config.data.is_tabular:
        return _from_tables(config, party, model)
    data = load_data(config)
    if data.record_digest != model.manifest.records:
        raise RunFolderError(
            "VFL-7181",
            f'a model of data.name = "{config.data.name}" scores the rows that were held out of the data '
            "it was trained on: others would be scaled by themselves. Found other data. For new records, "
            'train on data.name = "csv" or "tables", whose models know how to encode them.',
        )
    features = torch.empty(data.parts.total, 0)
    for own in data.parties:
        if own.name == party:
            features = own.features
            model.require({"features": list(features.shape[1:])})
    chosen = np.arange(data.test.start, data.test.stop)
    ids = pl.Series(data.record_numbers).cast(pl.String)
    return PredictionRecords(data.record_digest, data.source, chosen, ids, features)


def held_out(config: Config, model: StoredModel) -> tuple[Records, Tensor]:
    """Return the rows that a model can be measured on, as the server knows them, and their labels.

    These are the test rows of the training. Other tables than those of the training have none: then all their
    rows are used.

    Raises:
        ConfigError, DataError: a file or the label is missing.
        RunFolderError: the labels are of other classes than the model's.
    """
    data = load_data(config, SERVER)
    model.require({"classes": list(data.classes or ())})
    is_known = data.record_digest == model.manifest.records
    tested = data.test if is_known else slice(0, data.parts.total)
    rows = data.record_numbers if config.data.is_tabular else np.arange(data.parts.total)
    order = np.argsort(rows[tested])
    return rows[tested][order], data.labels[tested][torch.from_numpy(order)]


def _from_tables(config: Config, party: str, model: StoredModel) -> PredictionRecords:
    settings, tables = tables_of(config, labelled=False)
    owner = table_owner(party)
    alignment = find_alignments(settings, tables, owner, labelled=False)[owner]
    wanted = pl.DataFrame({"id": alignment.ids, POSITION: alignment.numbers})
    features, unscored = torch.empty(alignment.rows, 0), 0
    if party == SERVER:
        unscored = int((~open_table(tables, party).ids().is_in(alignment.ids.implode())).sum())
    else:
        encoder = encoder_of(model)
        if encoder is None:
            raise RunFolderError(
                "VFL-7182",
                f'the model in "{model.path}" must say how columns become features, as models of tables do. '
                "Found no schema. Train on the tables.",
            )
        features = torch.from_numpy(encoder.read(open_table(tables, party), wanted, alignment.rows))
    ids = ids_by_position(wanted, alignment.rows)
    source = alignment.token if settings.name == "csv" else "tables"
    return PredictionRecords(alignment.token, source, np.arange(alignment.rows), ids, features, unscored)
