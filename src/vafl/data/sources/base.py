"""What every kind of source and encoder has in common."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import polars as pl

from vafl.arrays import Floats

if TYPE_CHECKING:  # these modules import this one
    from vafl.data.encoding import Form
    from vafl.data.fitting import ColumnReport


class Source(Protocol):
    """The records of one party: which there are, and how to read and encode them.

    Attributes:
        party: the party's name.
    """

    party: str

    @property
    def section(self) -> str:
        """The section of the configuration that describes the source, for messages."""

    @property
    def location(self) -> str:
        """The file, folder or factory that the records come from, for messages."""

    @property
    def features(self) -> Sequence[str]:
        """What the party contributes: names of columns, or a word in parentheses. Empty for nothing."""

    def ids(self) -> pl.Series:
        """Return the canonical id of every record, in the source's order. They are distinct."""

    def fit(
        self, training: pl.DataFrame, *, form: "Form", scale: bool, public: bool, flags_absent: bool
    ) -> "tuple[RecordEncoder, list[ColumnReport]]":
        """Fit an encoder on the training records. Return it with a report on each column.

        Args:
            training: `id` and POSITION of each training record.
            form: the form of a table's features.
            scale: whether to scale numbers.
            public: whether the encoder must not depend on the records, as record-level privacy requires.
            flags_absent: whether there may be records that the party does not have.
        """

    def fingerprint(self) -> str:
        """Return text that changes with the content: path, size and time of change, and the settings."""


class RecordEncoder(Protocol):
    """Turns records of a source into the numbers that models take. It is saved with the party's model.

    Attributes:
        kind: the kind of source that it encodes.
        flags_absent: whether it marks records that the party does not have. A table gets one more feature,
            "(absent)". The features of other kinds are flattened and followed by a 1 for an absent record.
    """

    kind: ClassVar[str]

    @property
    def flags_absent(self) -> bool: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one record's features, as they are stored and given to the model."""

    @property
    def record_shape(self) -> tuple[int, ...]:
        """The shape that the embedding network sees: `shape` without the mark of absent records."""

    @property
    def names(self) -> list[str]:
        """The names of the features or columns; empty if they have none, as pixels do."""

    def absent_row(self) -> Floats:
        """Return the features, of `shape`, of a record that the party does not have."""

    def read(self, source: Source, wanted: pl.DataFrame, rows: int, into: Floats | None = None) -> Floats:
        """Return the features [rows, *shape]. Rows that `wanted` does not mention are absent.

        Args:
            source: a source of this encoder's kind.
            wanted: the `id` of each record to read, and POSITION, its row.
            into: an array to fill, such as a memory-mapped file; None creates one.
        """

    def misfit(self, source: Source) -> str:
        """Return why a changed source needs a new encoder; empty if this one still fits.

        Args:
            source: a source of this encoder's kind.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return the encoder as values that TOML and JSON can represent."""


def encoder_from_dict(values: Mapping[str, Any]) -> RecordEncoder:
    """Make the encoder that `RecordEncoder.to_dict` described. This imports and runs nothing that it names.

    Raises:
        DataError: the values do not describe an encoder.
    """
    from vafl.data.sources.opening import make_encoder  # noqa: PLC0415 - all kinds import this module

    return make_encoder(values)
