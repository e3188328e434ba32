"""Records that the party's own Python code reads.

The code is imported only because the party's own configuration names it. A manifest stores the shape of the
records, never the name of the code, so that nothing from a model folder or a peer is imported.
"""

import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import polars as pl

from vafl.arrays import Floats, Integers
from vafl.conversion import make
from vafl.data.alignment.ids import canonical_ids
from vafl.data.encoding import Form
from vafl.data.fitting import ColumnReport
from vafl.data.source_settings import PythonSettings
from vafl.data.sources.base import Source
from vafl.data.sources.common import (
    as_stored,
    check_shape,
    damaged_encoder,
    fingerprint_of,
    of_kind,
    reshaped,
    section_of,
)
from vafl.data.sources.records import EncodedRecords
from vafl.errors import ConfigError, DataError


class PythonSource:
    """Records that an object of the party's own code reads.

    Attributes:
        record_shape: the shape of one record.

    Raises:
        ConfigError: the factory cannot be imported or called.
        DataError: its object lacks something, or has the wrong shape.
    """

    def __init__(self, party: str, settings: PythonSettings) -> None:
        self.party, self.settings = party, settings
        self._module, self._records = self._made()
        if missing := [name for name in ("ids", "read", "shape") if not hasattr(self._records, name)]:
            raise DataError(
                "VFL-2411",
                f"{self._where} must return an object with ids(), read(positions) and shape. Found an object "
                f"of type {type(self._records).__name__} without {missing[0]}. Add it.",
            )
        self.record_shape = self._shape()

    @property
    def section(self) -> str:
        """The section of the configuration that describes the source."""
        return section_of(self.party)

    @property
    def location(self) -> str:
        """The name of the factory."""
        return self.settings.factory

    @property
    def features(self) -> Sequence[str]:
        """The records have no names of columns."""
        return ("(records)",)

    @property
    def _where(self) -> str:
        return f'{self.section}.factory "{self.settings.factory}"'

    def fingerprint(self) -> str:
        """Return text that changes with the options, with the files that they name, or with the module."""
        named = [Path(value) for value in self.settings.options.values() if isinstance(value, str) and value]
        file = getattr(self._module, "__file__", None)
        paths = [*named, *([Path(file)] if file else [])]
        return fingerprint_of(self.settings, *(path for path in paths if path.exists()))

    def ids(self) -> pl.Series:
        """Return the canonical id of every record, in the order of the object's `ids()`."""
        return self._all_ids

    @cached_property
    def _all_ids(self) -> pl.Series:
        found = self._call("ids()", self._records.ids)
        if isinstance(found, np.ndarray):
            found = found.tolist()  # numpy's own numbers are neither int nor str
        listed = isinstance(found, Iterable) and not isinstance(found, str)
        values = list(found) if listed else []
        kinds = {type(value) for value in values} if listed else {type(found)}
        if not listed or not (kinds <= {str} or kinds <= {int}):
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise DataError(
                "VFL-2412",
                f"{self._where}: ids() must return text or whole numbers, all of one type. Found {names}. "
                "Return a list of str.",
            )
        ids = pl.Series("id", values, dtype=pl.String if kinds <= {str} else None)
        return canonical_ids(ids, self.settings.factory)

    def records(self, places: Integers) -> Floats:
        """Return the records at these positions, [places, *record_shape].

        Raises:
            DataError: the object fails, or returns another shape, or numbers that are not finite.
        """
        found = self._call("read(positions)", self._records.read, places.tolist())
        try:
            with np.errstate(over="ignore"):
                array = np.asarray(found, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise DataError(
                "VFL-2413",
                f"{self._where}: read(positions) must return an array of numbers. Found an object of type "
                f"{type(found).__name__}: {error}. Return a numpy array of float32.",
            ) from error
        expected = (len(places), *self.record_shape)
        if array.shape != expected:
            raise DataError(
                "VFL-2414",
                f"{self._where}: read(positions) must return [positions, *shape], here {list(expected)}. "
                f"Found {list(array.shape)}. Return one record for each position.",
            )
        finite = np.isfinite(array.reshape(len(array), -1)).all(1)
        if not finite.all():
            place = int(places[np.flatnonzero(~finite)[0]])
            raise DataError(
                "VFL-2415",
                f"{self._where}: read(positions) must return finite numbers, below 3.4e38. Found NaN, "
                f'infinity or a larger number in record "{self.ids()[place]}". Replace it.',
            )
        return array

    def fit(
        self, training: pl.DataFrame, *, form: Form, scale: bool, public: bool, flags_absent: bool
    ) -> "tuple[PythonEncoder, list[ColumnReport]]":
        """Return an encoder, which depends on no record: the party's code decides how values are scaled."""
        size, count = " x ".join(map(str, self.record_shape)), math.prod(self.record_shape)
        report = ColumnReport("(records)", "float32", "array", f"{size} numbers, as they are", 0, count)
        return PythonEncoder(self.record_shape, flags_absent), [report]

    def _made(self) -> tuple[Any, Any]:
        """Import the module and call the factory; return the module and the object."""
        name, _, attribute = self.settings.factory.partition(":")
        try:
            module = importlib.import_module(name)
            factory = getattr(module, attribute)
        except Exception as error:  # the module is the party's own code, which may raise anything
            raise ConfigError(
                "VFL-2416",
                f"{self._where} must be importable as package.module:Factory. Found {type(error).__name__}: "
                f"{error}. Install the package, or add its folder to PYTHONPATH.",
            ) from error
        if not callable(factory):
            raise ConfigError(
                "VFL-2417",
                f"{self._where} must be a class or function. Found an object of type "
                f"{type(factory).__name__}. Name what makes the object that reads the records.",
            )
        return module, self._call("the factory", factory, **self.settings.options)

    def _call(self, what: str, function: Any, *arguments: Any, **options: Any) -> Any:
        """Call the party's code; raise DataError with its name if it fails."""
        try:
            return function(*arguments, **options)
        except Exception as error:  # it is the party's own code, which may raise anything
            raise DataError(
                "VFL-2418",
                f"{self._where}: {what} must work. Found {type(error).__name__}: {error}. Correct this code.",
            ) from error

    def _shape(self) -> tuple[int, ...]:
        found = self._records.shape
        sides = list(found) if isinstance(found, Sequence) and not isinstance(found, str) else [found]
        whole = all(isinstance(side, int | np.integer) and not isinstance(side, bool) for side in sides)
        if not sides or not whole or min(sides) < 1:
            raise DataError(
                "VFL-2419",
                f"{self._where}: shape must be the shape of one record, such as (24, 3). Found {found!r}. "
                "Return a tuple of whole numbers of 1 or more.",
            )
        return tuple(map(int, sides))


@dataclass(frozen=True)
class PythonEncoder(EncodedRecords):
    """Passes on the records that the party's code reads.

    Attributes:
        record_shape: the shape of a record.
        flags_absent: whether the features mark records that the party does not have.
    """

    kind: ClassVar[str] = "python"
    record_shape: tuple[int, ...]
    flags_absent: bool

    def __post_init__(self) -> None:
        check_shape(self.record_shape)

    @property
    def names(self) -> list[str]:
        """The records have no names of columns."""
        return []

    def read(self, source: Source, wanted: pl.DataFrame, rows: int, into: Floats | None = None) -> Floats:
        """Return the features [rows, *shape] of the wanted records; other rows are absent.

        Raises:
            DataError: the records have another shape than in training, or are not finite.
        """
        own = of_kind(PythonSource, source, self.kind, source.section)
        if own.record_shape != self.record_shape:
            raise DataError(
                "VFL-2420",
                f'"{own.location}": records must have the shape {list(self.record_shape)}, as in training. '
                f"Found {list(own.record_shape)}. Read the same features as in training.",
            )
        return self.read_each(source, wanted, rows, into, own.records)

    def misfit(self, source: Source) -> str:
        """Return why a changed source needs a new encoder: its records have another shape."""
        own = of_kind(PythonSource, source, self.kind, source.section)
        return reshaped(self.record_shape, own.record_shape)

    def to_dict(self) -> dict[str, Any]:
        """Return the encoder as values that TOML and JSON can represent."""
        return as_stored(self.kind, asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "PythonEncoder":
        """Make the encoder that `to_dict` described; raise DataError if the values describe none."""
        try:
            written = make(_Written, dict(values))
            return cls(tuple(written.record_shape), written.flags_absent)
        except ValueError as error:
            raise damaged_encoder(error) from error


@dataclass(frozen=True)
class _Written:
    """The document that `PythonEncoder.to_dict` makes."""

    kind: Literal["python"]
    record_shape: list[int]
    flags_absent: bool
