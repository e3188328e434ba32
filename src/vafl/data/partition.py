"""Splitting a data set by columns: each party gets its own, nobody gets all."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import torch
from torch import Tensor

from vafl.data.columns import match_columns
from vafl.data.dataset import Dataset, Features, Records, standardised
from vafl.data.settings import PartitionSettings
from vafl.errors import ConfigError

if TYPE_CHECKING:
    from vafl.data.encoding import Encoder


@dataclass(frozen=True)
class Party:
    """One party's own features, [rows, ...], of the training rows and of those held out.

    Attributes:
        encoder: how they were made from the party's table, if they were.
        ids: [rows], training rows first: what the records are called in that table, null for those it lacks.
    """

    name: str
    train: Tensor
    test: Tensor
    encoder: "Encoder | None" = None
    ids: pl.Series | None = None


@dataclass(frozen=True)
class VerticalData:
    """A data set as a federation holds it: features with the parties, labels with the server.

    Attributes:
        record_digest: tells sets of records apart; parties compare it before they train together.
        records: [rows], each row's number among all records of the source, training rows first; None if
            they are counted as they come.
        source: which records these are a part of, whatever the split.
        validation: so many of the held-out rows, the first, are to watch the training by; the others are to
            test it.
        weights: [training rows], how much each counts in the loss, by a column of the label holder; None if
            all count the same. Only the server has them.
    """

    parties: tuple[Party, ...]
    train_labels: Tensor
    test_labels: Tensor
    classes: tuple[str, ...] | None = None
    record_digest: str = ""
    records: Records | None = None
    source: str = ""
    validation: int = 0
    weights: Tensor | None = None

    @property
    def record_numbers(self) -> Records:
        """[rows], training rows first."""
        if self.records is not None:
            return self.records
        return np.arange(len(self.train_labels) + len(self.test_labels))

    def ids_of(self, party: Party) -> pl.Series:
        """[rows], training rows first: the party's own ids, or the records' numbers where there are none."""
        return pl.Series(self.record_numbers).cast(pl.String) if party.ids is None else party.ids

    @property
    def rows(self) -> int:
        return len(self.train_labels)

    @property
    def nbytes(self) -> int:
        return sum(party.train.nbytes + party.test.nbytes for party in self.parties)


def partition(dataset: Dataset, settings: PartitionSettings, scale: str = "auto") -> VerticalData:
    """Gives every party its columns, scaled by that party's own training rows."""
    parts = _by_name(dataset, settings) if settings.groups else _equal_shares(dataset, settings)
    scaled = scale == "standard" or (scale == "auto" and dataset.is_table)
    parties = []
    for name, *pair in parts:
        train, test = standardised(*pair) if scaled else pair
        parties.append(Party(name, _tensor(train), _tensor(test)))
    return VerticalData(
        tuple(parties),
        torch.from_numpy(np.ascontiguousarray(dataset.train_labels)),
        torch.from_numpy(np.ascontiguousarray(dataset.test_labels)),
        dataset.classes,
        dataset.record_digest,
        dataset.records,
        dataset.name,
        dataset.validation,
    )


def _by_name(dataset: Dataset, settings: PartitionSettings) -> list[tuple[str, Features, Features]]:
    if not dataset.columns:
        raise ConfigError(
            f"partition.groups needs a table with named columns. Found {dataset.name}, which has none. "
            "Use partition.clients instead."
        )
    matched = match_columns(dataset.columns, settings.groups)
    return [(name, dataset.train[..., chosen], dataset.test[..., chosen]) for name, chosen in matched.items()]


def _equal_shares(dataset: Dataset, settings: PartitionSettings) -> list[tuple[str, Features, Features]]:
    train, test = _laid_out(dataset.train, settings.layout), _laid_out(dataset.test, settings.layout)
    axis = 2 if train.ndim > 2 and settings.layout != "views" else 1
    if settings.clients > train.shape[axis]:
        raise ConfigError(
            f"partition.clients must be at most the {train.shape[axis]} {_shared(settings)} to share out. "
            f"Found {settings.clients}."
        )
    shares = zip(
        np.array_split(train, settings.clients, axis),
        np.array_split(test, settings.clients, axis),
        strict=True,
    )
    return [(f"client-{number}", own, held_out) for number, (own, held_out) in enumerate(shares, 1)]


def _shared(settings: PartitionSettings) -> str:
    return {"views": "views", "bands": "lines"}.get(settings.layout, "columns")


def _laid_out(features: Features, layout: str) -> Features:
    """Flat [rows, columns], bands [rows, channels, height, width], or sequences [rows, steps, features]."""
    if layout == "columns":
        return features.reshape(len(features), -1)
    if layout == "sequence" and features.ndim == 3:
        return features
    if features.ndim != 4:
        raise ConfigError(
            f'partition.layout = "{layout}" needs images. Found a table. Use layout = "columns".'
        )
    if layout in ("bands", "views"):
        return features
    rows, channels, height, width = features.shape
    return features.reshape(rows, channels * height, width)


def _tensor(features: Features) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(features, dtype=np.float32))
