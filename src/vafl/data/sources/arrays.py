"""Arrays from .npy and .safetensors files, which stay on disk and are read part by part."""

import json
import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import polars as pl
from safetensors import SafetensorError, safe_open

from vafl.arrays import Array, Doubles, Floats, Integers
from vafl.conversion import make
from vafl.data.alignment.ids import canonical_ids
from vafl.data.encoding import Form
from vafl.data.fitting import ColumnReport
from vafl.data.source_settings import ArraySettings, TableSettings
from vafl.data.sources.base import Source
from vafl.data.sources.common import (
    as_stored,
    check_shape,
    damaged_encoder,
    fingerprint_of,
    of_kind,
    parts_of,
    reshaped,
    section_of,
)
from vafl.data.sources.records import EncodedRecords, check_trainable, places_of
from vafl.data.tables import Table
from vafl.errors import ConfigError, DataError

_SAMPLE = 50_000  # most training records that means and deviations are computed from
_BYTE = 255.0
# The numbers of a .safetensors file that numpy has, too.
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"}
_TYPES |= {"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?"}


class ArraySource:
    """An array whose first axis is the record.

    Attributes:
        array: [records, ...], mapped into memory. Only the records that are used are read.

    Raises:
        DataError: a file is missing or damaged, or does not hold records of numbers.
    """

    def __init__(self, party: str, settings: ArraySettings) -> None:
        self.party, self.settings = party, settings
        self.path, self._ids_path = Path(settings.path), Path(settings.ids)
        for setting, path in (("path", self.path), ("ids", self._ids_path)):
            if not path.is_file():
                raise DataError(
                    "VFL-2351",
                    f'{self.section}.{setting} must be a file. Found no file "{path}". Correct the path.',
                )
        self.array = self._open()
        if self.array.dtype.kind not in "biuf" or not self.array.ndim or not all(self.array.shape):
            raise DataError(
                "VFL-2352",
                f'"{self.path}" must hold numbers, with the records on the first axis. Found '
                f"{list(self.array.shape)} of {self.array.dtype}. Save an array of numbers.",
            )
        if self.array.ndim > 1 and not self.array.flags.c_contiguous:
            raise DataError(
                "VFL-2353",
                f'"{self.path}" must hold one record after the other (C order). Found Fortran order. Save '
                "numpy.ascontiguousarray(array).",
            )
        offset = self.array.offset if isinstance(self.array, np.memmap) else 0
        with self.path.open("rb") as file:
            self._content = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        # Records are read in random order. Reading ahead would read most of the file for every few records.
        self._content.madvise(mmap.MADV_RANDOM)
        mapped = np.frombuffer(self._content, self.array.dtype, self.array.size, offset)
        self.array, self._offset = mapped.reshape(self.array.shape), offset

    def _will_need(self, places: Integers) -> None:
        """Let the kernel read these records at the same time: one after the other takes far longer."""
        size = self.array.nbytes // len(self.array)
        starts = self._offset + size * places
        pages = starts // mmap.PAGESIZE * mmap.PAGESIZE
        for start, length in zip(pages.tolist(), (starts + size - pages).tolist(), strict=True):
            self._content.madvise(mmap.MADV_WILLNEED, start, length)

    @property
    def section(self) -> str:
        """The section of the configuration that describes the source."""
        return section_of(self.party)

    @property
    def location(self) -> str:
        """The file of the array."""
        return str(self.path)

    @property
    def features(self) -> Sequence[str]:
        """An array has no names of columns."""
        return ("(array)",)

    @property
    def record_shape(self) -> tuple[int, ...]:
        """The shape of one record. A record of one number is a vector."""
        return self.array.shape[1:] or (1,)

    def fingerprint(self) -> str:
        """Return text that changes with the files or the settings."""
        return fingerprint_of(self.settings, self.path, self._ids_path)

    def ids(self) -> pl.Series:
        """Return the canonical id of every record, in the order of the array."""
        return self._all_ids

    @cached_property
    def _all_ids(self) -> pl.Series:
        path, settings = self._ids_path, self.settings
        if settings.id:
            ids = Table(self.party, TableSettings(str(path), settings.id)).ids()
        elif path.suffix in (".csv", ".parquet"):
            raise ConfigError(
                "VFL-2354",
                f'{self.section}.id must name the column with the ids, because "{path}" is a table. Found '
                "none. Set id.",
            )
        else:
            try:
                lines = path.read_text(encoding="utf-8-sig").split("\n")
            except ValueError as error:
                raise DataError(
                    "VFL-2355", f'"{path}" must be UTF-8 text with one id per line. Found: {error}.'
                ) from error
            lines = [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]
            ids = canonical_ids(pl.Series("id", lines, dtype=pl.String), str(path))
        if len(ids) != len(self.array):
            raise DataError(
                "VFL-2356",
                f'"{path}" must have one id for each record of "{self.path}". Found {len(ids):,} ids for '
                f"{len(self.array):,} records. Write both files again from the same data.",
            )
        return ids

    def records(self, places: Integers) -> Floats:
        """Return the records at these positions as float32, [places, *record_shape].

        Raises:
            DataError: a value is NaN or infinite, or too large for float32.
        """
        self._will_need(places)
        with np.errstate(over="ignore"):
            found = np.asarray(self.array[places], dtype=np.float32)
        found = found.reshape(len(places), *self.record_shape)
        finite = np.isfinite(found.reshape(len(places), -1)).all(1)
        if not finite.all():
            place = int(places[np.flatnonzero(~finite)[0]])
            raise DataError(
                "VFL-2357",
                f'"{self.path}" must hold finite numbers, below 3.4e38. Found NaN, infinity or a larger '
                f'number in record "{self.ids()[place]}" (number {place:,}). Replace it.',
            )
        return found

    def fit(
        self, training: pl.DataFrame, *, form: Form, scale: bool, public: bool, flags_absent: bool
    ) -> "tuple[ArrayEncoder, list[ColumnReport]]":
        """Fit an encoder on the training records: only scaling depends on them.

        Raises:
            ConfigError: `public` is set, but the settings ask for scaling.
        """
        check_trainable(self.location, training)
        wanted = self.settings.scale
        if wanted == "standard" and public:
            raise ConfigError(
                "VFL-2358",
                f'{self.section}.scale = "standard" scales by statistics of all records, which record-level '
                'privacy does not allow. Scale the array by public constants, and set scale = "none".',
            )
        few_axes = len(self.record_shape) < 3
        scales = wanted == "standard" or (wanted == "auto" and few_axes and scale and not public)
        divisor = _BYTE if wanted == "auto" and not few_axes and self.array.dtype == np.uint8 else 1.0
        means, deviations = self._statistics(training) if scales else ((), ())
        encoder = ArrayEncoder(self.record_shape, flags_absent, means, deviations, divisor)
        size = " x ".join(map(str, self.record_shape))
        how = "scaled to mean 0 and deviation 1" if scales else "as they are"
        how = "divided by 255" if divisor > 1 else how
        count = math.prod(self.record_shape)
        report = ColumnReport("(array)", str(self.array.dtype), "array", f"{size} numbers, {how}", 0, count)
        return encoder, [report]

    def _statistics(self, training: pl.DataFrame) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and deviation of each column in a sample of the training records, in two passes."""
        places = places_of(self, training)
        if len(places) > _SAMPLE:
            # A fixed seed, so that fitting the same records again gives the same encoder.
            places = np.sort(np.random.Generator(np.random.Philox(0)).permutation(places)[:_SAMPLE])
        width, count = self.record_shape[-1], len(places) * math.prod(self.record_shape[:-1])
        parts = list(parts_of(len(places), 8 * math.prod(self.record_shape)))
        means: Doubles = np.zeros(width)
        for part in parts:
            means += self.records(places[part]).reshape(-1, width).sum(0, dtype=np.float64)
        means /= count
        squares: Doubles = np.zeros(width)
        for part in parts:
            squares += np.square(self.records(places[part]).reshape(-1, width) - means).sum(0)
        deviations = np.sqrt(squares / count)
        # A constant column may have a tiny deviation from rounding, which would blow up other values.
        deviations[deviations <= 1e-7 * np.abs(means)] = 1.0
        return tuple(means.tolist()), tuple(deviations.tolist())

    def _open(self) -> Array:
        try:
            if self.path.suffix == ".npy":
                found: Array = np.load(self.path, mmap_mode="r", allow_pickle=False)
                return found
            return self._open_safetensors()
        except (ValueError, OSError, EOFError, KeyError, struct.error, SafetensorError) as error:
            cause = str(error).partition("\n")[0]
            raise DataError(
                "VFL-2359",
                f'"{self.path}" must be a complete {self.path.suffix} file of numbers. Found: {cause}. Write '
                "the file again, or copy it again from its source.",
            ) from error

    def _open_safetensors(self) -> Array:
        """Map a tensor into memory: the library would read all of it to give some of its rows."""
        with safe_open(self.path, framework="np") as file:  # checks the header and the length of the file
            names = list(file.keys())
        name = self.settings.tensor or (names[0] if len(names) == 1 else "")
        if name not in names:
            raise DataError(
                "VFL-2360",
                f'{self.section}.tensor must name a tensor of "{self.path}". Found "{name}", and the tensors '
                f"{', '.join(names[:10]) or 'none'}. Set tensor to one of these.",
            )
        with self.path.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            described = json.loads(opened.read(length))[name]
        kind, shape = described["dtype"], tuple(described["shape"])
        if kind not in _TYPES:
            raise DataError(
                "VFL-2361",
                f'"{self.path}": "{name}" must hold integers or floats that numpy has. Found {kind}. Save it '
                "as float16 or float32.",
            )
        offset = 8 + length + described["data_offsets"][0]
        return np.memmap(self.path, _TYPES[kind], "r", offset, shape) if all(shape) else np.empty(shape)


@dataclass(frozen=True)
class ArrayEncoder(EncodedRecords):
    """Encodes the records of an array as they are, or scaled per column.

    Attributes:
        record_shape: the shape of a record.
        flags_absent: whether the features mark records that the party does not have.
        means, deviations: of each column (the last axis) in the training records; empty if it does not scale.
        divisor: what all values are divided by: 255 for images of bytes, otherwise 1.
    """

    kind: ClassVar[str] = "arrays"
    record_shape: tuple[int, ...]
    flags_absent: bool
    means: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()
    divisor: float = 1.0

    def __post_init__(self) -> None:
        check_shape(self.record_shape)
        widths = {len(self.means), len(self.deviations)}
        finite = all(map(math.isfinite, (*self.means, *self.deviations, self.divisor)))
        positive = all(value > 0 for value in (*self.deviations, self.divisor))
        if not (finite and positive and widths in ({0}, {self.record_shape[-1]})):
            raise DataError(
                "VFL-2362",
                "an encoder of arrays must have a finite mean and a positive deviation for each column, or "
                f"for none. Found {len(self.means)} means and {len(self.deviations)} deviations for records "
                f"of shape {list(self.record_shape)}.",
            )

    @property
    def names(self) -> list[str]:
        """An array has no names of columns."""
        return []

    def read(self, source: Source, wanted: pl.DataFrame, rows: int, into: Floats | None = None) -> Floats:
        """Return the features [rows, *shape] of the wanted records; other rows are absent.

        Raises:
            DataError: the records have another shape than in training, or are not finite.
        """
        array = of_kind(ArraySource, source, self.kind, source.section)
        if array.record_shape != self.record_shape:
            raise DataError(
                "VFL-2363",
                f'"{array.path}": records must have the shape {list(self.record_shape)}, as in training. '
                f"Found {list(array.record_shape)}. Save the same features as in training.",
            )

        def fetch(places: Integers) -> Floats:
            return self._scaled(array.records(places))

        return self.read_each(source, wanted, rows, into, fetch)

    def _scaled(self, records: Floats) -> Floats:
        if self.divisor != 1:
            records = records / np.float32(self.divisor)
        if self.means:
            means, deviations = np.array(self.means, np.float32), np.array(self.deviations, np.float32)
            records = (records - means) / deviations
        return records

    def misfit(self, source: Source) -> str:
        """Return why a changed source needs a new encoder: its records have another shape."""
        own = of_kind(ArraySource, source, self.kind, source.section)
        return reshaped(self.record_shape, own.record_shape)

    def to_dict(self) -> dict[str, Any]:
        """Return the encoder as values that TOML and JSON can represent."""
        return as_stored(self.kind, asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ArrayEncoder":
        """Make the encoder that `to_dict` described; raise DataError if the values describe none."""
        try:
            written = make(_Written, dict(values))
            means, deviations = tuple(written.means), tuple(written.deviations)
            return cls(tuple(written.record_shape), written.flags_absent, means, deviations, written.divisor)
        except ValueError as error:
            raise damaged_encoder(error) from error


@dataclass(frozen=True)
class _Written:
    """The document that `ArrayEncoder.to_dict` makes."""

    kind: Literal["arrays"]
    record_shape: list[int]
    flags_absent: bool
    means: list[float]
    deviations: list[float]
    divisor: float
