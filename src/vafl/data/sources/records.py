"""The part that encoders of series, images, arrays and Python code share: shapes, absent records, reading."""

import math
from collections.abc import Callable

import numpy as np
import polars as pl

from vafl.arrays import Floats, Integers
from vafl.data.sources.base import Source
from vafl.data.sources.common import parts_of
from vafl.data.tables import POSITION
from vafl.errors import DataError

_PLACE = "vafl place"  # a record's position in the source


class EncodedRecords:
    """Shapes and absent records of an encoder whose records are arrays of `record_shape`.

    With `flags_absent`, a record is stored flat, with one more number that is 1 if the party does not have
    the record. Otherwise it is stored as it is. The values of an absent record are 0.
    """

    flags_absent: bool
    record_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one record's features, as they are stored and given to the model."""
        return (math.prod(self.record_shape) + 1,) if self.flags_absent else self.record_shape

    def absent_row(self) -> Floats:
        """Return the features of a record that the party does not have."""
        row = np.zeros(self.shape, dtype=np.float32)
        if self.flags_absent:
            row[-1] = 1
        return row

    def start(self, wanted: pl.DataFrame, rows: int, into: Floats | None) -> Floats:
        """Return the array to fill, [rows, *shape]. Rows that `wanted` does not mention are absent in it."""
        features = np.zeros((rows, *self.shape), dtype=np.float32) if into is None else into
        if wanted.height < rows:
            is_absent = np.ones(rows, dtype=bool)
            is_absent[wanted[POSITION].to_numpy()] = False
            features[is_absent] = self.absent_row()
        return features

    def put(self, features: Floats, rows: Integers, records: Floats) -> None:
        """Store records [rows, *record_shape] in these rows of the features."""
        if self.flags_absent:
            features[rows, :-1] = records.reshape(len(records), -1)
            features[rows, -1] = 0
        else:
            features[rows] = records

    def read_each(
        self,
        source: Source,
        wanted: pl.DataFrame,
        rows: int,
        into: Floats | None,
        fetch: Callable[[Integers], Floats],
    ) -> Floats:
        """Return the features [rows, *shape] of a source that can read records in any order.

        Args:
            wanted, rows, into: as for `RecordEncoder.read`.
            fetch: returns the records [places, *record_shape] at these positions in the source.
        """
        features = self.start(wanted, rows, into)
        # In the order of the rows, the features are written from front to back. A file that is mapped into
        # memory is then written once, and not once for every few records of each page.
        targets, places = _places(source, wanted)
        for part in parts_of(len(places), 4 * math.prod(self.record_shape)):
            order = np.argsort(places[part])  # neighbours in the source are often one read
            self.put(features, targets[part][order], fetch(places[part][order]))
        return features


def places_of(source: Source, wanted: pl.DataFrame) -> Integers:
    """Return the position in the source of each wanted record, ascending.

    Raises:
        DataError: the source lacks a record.
    """
    return np.sort(_places(source, wanted)[1])


def _places(source: Source, wanted: pl.DataFrame) -> tuple[Integers, Integers]:
    """Return the row and the position in the source of each wanted record, in the order of the rows."""
    ids = source.ids()
    numbered = pl.DataFrame({"id": ids, _PLACE: np.arange(len(ids))})
    found = wanted.join(numbered, on="id", how="inner").sort(POSITION)
    check_complete(source.location, found.height, wanted)
    return found[POSITION].to_numpy().astype(np.int64), found[_PLACE].to_numpy()


def check_trainable(location: str, training: pl.DataFrame) -> None:
    """Raise DataError if there is no training record to fit an encoder on."""
    if not training.height:
        raise DataError(
            "VFL-2347",
            f'"{location}": an encoder needs at least one training record. Found none. Add records.',
        )


def check_complete(location: str, found: int, wanted: pl.DataFrame) -> None:
    """Raise DataError unless every wanted record was found."""
    if found != wanted.height:
        raise DataError(
            "VFL-2344",
            f'"{location}" must hold the records that were aligned. Found {found:,} of '
            f"{wanted.height:,}, so it has changed since. Run `vafl align` again at every party.",
        )
