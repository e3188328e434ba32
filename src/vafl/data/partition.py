"""Vertically partitioned data: each party holds some features, the label holder holds the labels."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import torch
from torch import Tensor

from vafl.arrays import Features, RowIds
from vafl.data.columns import match_columns
from vafl.data.dataset import Dataset, Standard
from vafl.data.settings import PartitionSettings
from vafl.data.split import Parts, Split
from vafl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from vafl.data.sources.base import RecordEncoder


@dataclass(frozen=True)
class Party:
    """One party's features.

    Attributes:
        features: [rows, ...]: training rows, then validation rows, then test rows.
        encoder: the encoder that made the features from the party's source; None without a source.
        ids: [rows], the records' ids in that source; null for records that the party does not have.
    """

    name: str
    features: Tensor
    encoder: "RecordEncoder | None" = None
    ids: pl.Series | None = None


@dataclass(frozen=True)
class VerticalData:
    """A data set divided among parties: features at the clients, labels at the server.

    `party.features[data.train]` and `data.labels[data.train]` are views of the training rows.

    Attributes:
        labels: [rows], in the order of the features.
        parts: the number of training, validation and test rows.
        classes: the class names, which labels index; None for regression.
        record_digest: identifies the records and their split. Parties compare it before they train together.
        records: [rows], the number of each row's record in the source; None if row n is record n.
        source: identifies the records of which these rows are a part, independent of the split.
        weights: [rows], the weight of each training row in the loss, from a column of the label holder; None
            if all rows weigh the same. Only the label holder's process has them.
    """

    parties: tuple[Party, ...]
    labels: Tensor
    parts: Parts
    classes: tuple[str, ...] | None = None
    record_digest: str = ""
    records: RowIds | None = None
    source: str = ""
    weights: Tensor | None = None

    @cached_property
    def train(self) -> slice:
        """The training rows."""
        return self.parts.slices["train"]

    @cached_property
    def validation(self) -> slice:
        """The validation rows; the slice may be empty."""
        return self.parts.slices["validation"]

    @cached_property
    def test(self) -> slice:
        """The test rows."""
        return self.parts.slices["test"]

    @cached_property
    def held_out(self) -> slice:
        """The rows that evaluations during training use."""
        return self.parts.slices[self.parts.watched]

    @property
    def record_numbers(self) -> RowIds:
        """The number of each row's record in the source, [rows]."""
        return np.arange(self.parts.total) if self.records is None else self.records

    def ids_of(self, party: Party) -> pl.Series:
        """Return the party's record ids, [rows], or the record numbers as text if it has no ids."""
        return pl.Series(self.record_numbers).cast(pl.String) if party.ids is None else party.ids

    @property
    def rows(self) -> int:
        """The number of training rows."""
        return self.parts.train

    @property
    def nbytes(self) -> int:
        """The size of all features in bytes."""
        return sum(party.features.nbytes for party in self.parties)


def partition(
    dataset: Dataset, split: Split, settings: PartitionSettings, scale: str = "auto"
) -> VerticalData:
    """Give every party its columns, in the split's order and scaled by the training rows."""
    labels, trained = dataset.labels[split.order], split.parts.slices["train"]
    if dataset.classes is not None and len(np.unique(labels[trained])) < 2:
        raise DataError(
            "VFL-2231",
            f"{dataset.name}: training labels must contain at least two classes. Found only "
            f'"{dataset.classes[int(labels[0])]}". Check that data.label is the right column.',
        )
    is_scaled = scale == "standard" or (scale == "auto" and dataset.is_table)
    parties = []
    for name, share in _shares(dataset, settings):
        features = share[split.order]
        scaled = Standard.fit(features[trained])(features) if is_scaled else features
        parties.append(Party(name, torch.from_numpy(np.ascontiguousarray(scaled, dtype=np.float32))))
    identity = "|".join((dataset.digest, split.digest()))
    return VerticalData(
        tuple(parties),
        torch.from_numpy(np.ascontiguousarray(labels)),
        split.parts,
        dataset.classes,
        hashlib.sha256(identity.encode()).hexdigest()[:16],
        split.order,
        dataset.name,
    )


def _shares(dataset: Dataset, settings: PartitionSettings) -> list[tuple[str, Features]]:
    """Return each party's columns of all records, by [partition.groups] or divided evenly."""
    if settings.groups:
        return _by_name(dataset, settings)
    features = _laid_out(dataset.features, settings.layout)
    axis = 2 if features.ndim > 2 and settings.layout != "views" else 1
    if settings.clients > features.shape[axis]:
        raise ConfigError(
            "VFL-2232",
            f"partition.clients must be at most {features.shape[axis]}, the number of {_unit(settings)} to "
            f"divide. Found {settings.clients}. Use fewer clients.",
        )
    shares = np.array_split(features, settings.clients, axis)
    return [(f"client-{number}", share) for number, share in enumerate(shares, 1)]


def _by_name(dataset: Dataset, settings: PartitionSettings) -> list[tuple[str, Features]]:
    if not dataset.columns:
        raise ConfigError(
            "VFL-2233",
            f"partition.groups needs a table with named columns. Found {dataset.name}, which has none. "
            "Use partition.clients instead.",
        )
    matched = match_columns(dataset.columns, settings.groups)
    return [(name, dataset.features[..., chosen]) for name, chosen in matched.items()]


def _unit(settings: PartitionSettings) -> str:
    """Return what the layout divides, for error messages."""
    return {"views": "views", "bands": "lines"}.get(settings.layout, "columns")


def _laid_out(features: Features, layout: str) -> Features:
    """Return the features in the shape that the layout divides.

    `columns` gives [rows, columns], `bands` and `views` [rows, channels, height, width], and `sequence`
    [rows, steps, features].
    """
    if layout == "columns":
        return features.reshape(len(features), -1)
    if layout == "sequence" and features.ndim == 3:
        return features
    if features.ndim != 4:
        raise ConfigError(
            "VFL-2234", f'partition.layout = "{layout}" needs images. Found a table. Use layout = "columns".'
        )
    if layout in ("bands", "views"):
        return features
    rows, channels, height, width = features.shape
    return features.reshape(rows, channels * height, width)
