"""The records to score with a trained model, as one party sees them."""

from dataclasses import dataclass

import numpy as np
import polars as pl
import torch
from torch import Tensor

from vafl.arrays import RowIds
from vafl.config import Config
from vafl.data.aligned import find_alignments, ids_by_position
from vafl.data.sources.cache import FeatureCache
from vafl.data.sources.opening import open_source
from vafl.data.tables import POSITION, open_table
from vafl.errors import RunFolderError
from vafl.models.store import StoredModel
from vafl.names import SERVER, table_owner
from vafl.run.plan import encoder_of, load_data, tables_of


@dataclass(frozen=True)
class PredictionRecords:
    """Records with the same row numbers at all parties.

    Attributes:
        digest: identifies the set of records; parties compare it before the first request.
        source: identifies the data set that the records belong to.
        chosen: the rows that a batch scores, ascending: all rows, or the test rows.
        ids: [rows], the id of each record at this party; null if the party does not have the record.
        features: [rows, ...], this party's features; empty at the server.
        unscored: rows of the server's table that are not in the alignment; 0 at clients.
    """

    digest: str
    source: str
    chosen: RowIds
    ids: pl.Series
    features: Tensor
    unscored: int = 0

    @property
    def rows(self) -> int:
        return len(self.ids)


def load_records(config: Config, party: str, model: StoredModel) -> PredictionRecords:
    """Load the records to score.

    The parties' own data are encoded as in training, and all their records are scored. In other data sets the
    ids are record numbers, and only the test rows are scored.

    Raises:
        ConfigError, DataError: a file or a column is missing.
        RunFolderError: the features do not match the model, or the data set is not the one it was trained on.
    """
    if config.data.is_tabular:
        return _from_tables(config, party, model)
    data = load_data(config)
    if data.record_digest != model.manifest.records:
        raise RunFolderError(
            "VFL-7181",
            f'a model of data.name = "{config.data.name}" can score only the test rows of the data it was '
            "trained on, because it does not store how to scale new records. Found other data. To score new "
            'records, train on data.name = "csv" or "parties".',
        )
    features = torch.empty(data.parts.total, 0)
    for each in data.parties:
        if each.name == party:
            features = each.features
            model.require({"features": list(features.shape[1:])})
    chosen = np.arange(data.test.start, data.test.stop)
    ids = pl.Series(data.record_numbers).cast(pl.String)
    return PredictionRecords(data.record_digest, data.source, chosen, ids, features)


def held_out(config: Config, model: StoredModel) -> tuple[RowIds, Tensor]:
    """Return the rows to measure a model on, as the server numbers them, and their labels.

    These are the test rows of the training. If the data are not those of the training, they are all rows.

    Raises:
        ConfigError, DataError: a file or the label is missing.
        RunFolderError: the classes of the labels are not those of the model.
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
                f'the model in "{model.path}" needs an encoder to read new records. Found none. Train '
                'again with data.name = "parties" or "csv".',
            )
        cache = FeatureCache.at(tables[owner].cache)
        features = cache.features(open_source(tables, party), encoder, wanted, alignment.rows)
    ids = ids_by_position(wanted, alignment.rows)
    source = alignment.token if settings.name == "csv" else "parties"
    return PredictionRecords(alignment.token, source, np.arange(alignment.rows), ids, features, unscored)
