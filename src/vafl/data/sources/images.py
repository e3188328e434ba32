"""Images, one per record, from a folder of files or from a column of a Parquet file.

Images are untrusted input: only common formats are decoded, and none that is larger than a limit. Values are
divided by public constants, so an encoder depends on no record except for the shape of the images.
"""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal
from warnings import catch_warnings, simplefilter

import numpy as np
import polars as pl
from PIL import Image, ImageOps

from vafl.arrays import Floats, Integers
from vafl.conversion import make
from vafl.data.alignment.ids import canonical_ids
from vafl.data.encoding import Form
from vafl.data.fitting import ColumnReport
from vafl.data.source_settings import ImageSettings, TableSettings
from vafl.data.sources.base import Source
from vafl.data.sources.common import (
    PART_BYTES,
    as_stored,
    check_shape,
    damaged_encoder,
    fingerprint_of,
    of_kind,
    reshaped,
    section_of,
)
from vafl.data.sources.records import EncodedRecords, check_complete, check_trainable
from vafl.data.tables import POSITION, Table
from vafl.errors import ConfigError, DataError

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # all that Pillow may decode here
_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
MOST_PIXELS = 50_000_000  # of one image; a few kilobytes can decode to gigabytes
_GREY = {"1", "L", "LA", "La"}  # modes of Pillow with one channel of 8 bits, and perhaps transparency
_DEEP = {"I;16", "I;16L", "I;16B", "I;16N"}  # one channel of 16 bits
_DEEPEST = 65_535.0


class ImageSource:
    """Images by record id.

    Raises:
        ConfigError: the settings do not fit a folder, or a file.
        DataError: there are no images, or the Parquet file is damaged.
    """

    def __init__(self, party: str, settings: ImageSettings) -> None:
        self.party, self.settings, self.path = party, settings, Path(settings.path)
        self._table: Table | None = None
        if self.path.is_dir():
            if settings.id:
                raise ConfigError(
                    "VFL-2371",
                    f"{self.section}.id and column are for a Parquet file. Found them with the folder "
                    f'"{self.path}", whose files are named by the id. Remove them.',
                )
            if not self._files:
                raise DataError(
                    "VFL-2372",
                    f'"{self.path}" must hold images, each named by the record\'s id. Found none with the '
                    f"endings {', '.join(sorted(_SUFFIXES))}. Check the folder.",
                )
            return
        if not self.path.is_file():
            raise DataError(
                "VFL-2373",
                f'{self.section}.path must be a folder of images or a Parquet file. Found no "{self.path}". '
                "Correct the path.",
            )
        if not settings.id:
            raise ConfigError(
                "VFL-2374",
                f"{self.section} needs id and column, the columns of a Parquet file with the record's id and "
                f'the encoded image. Found neither, and "{self.path}" is a file. Set both, or name a folder.',
            )
        self._table = Table(party, TableSettings(settings.path, settings.id))
        self._table.check_column(settings.column)
        found = self._table.schema[settings.column]
        if found != pl.Binary:
            raise DataError(
                "VFL-2375",
                f'"{self.path}" must have encoded images, such as the bytes of PNG files, in '
                f'"{settings.column}". Found {found}. Write that column as Binary.',
            )

    @property
    def section(self) -> str:
        """The section of the configuration that describes the source."""
        return section_of(self.party)

    @property
    def location(self) -> str:
        """The folder or the Parquet file."""
        return str(self.path)

    @property
    def features(self) -> Sequence[str]:
        """An image has no names of columns."""
        return ("(image)",)

    @cached_property
    def _files(self) -> dict[str, os.stat_result]:
        """The images of the folder, sorted by name: name -> size and time. Other files are ignored."""
        with os.scandir(self.path) as entries:
            found = {
                entry.name: entry.stat()
                for entry in entries
                if Path(entry.name).suffix.lower() in _SUFFIXES and entry.is_file()
            }
        return dict(sorted(found.items()))

    def fingerprint(self) -> str:
        """Return text that changes with the name, size or time of an image, or with the settings."""
        if self._table is not None:
            return fingerprint_of(self.settings, self.path)
        files = [[name, found.st_size, found.st_mtime_ns] for name, found in self._files.items()]
        return fingerprint_of(self.settings, self.path, also=files)

    def ids(self) -> pl.Series:
        """Return the canonical id of every image, in the order of the names or of the lines."""
        return self._all_ids

    @cached_property
    def _all_ids(self) -> pl.Series:
        if self._table is not None:
            return self._table.ids()
        return canonical_ids(pl.Series("name", [Path(name).stem for name in self._files]), str(self.path))

    def fit(
        self, training: pl.DataFrame, *, form: Form, scale: bool, public: bool, flags_absent: bool
    ) -> "tuple[ImageEncoder, list[ColumnReport]]":
        """Return an encoder for images of the configured size, or of the size of the first training image."""
        check_trainable(self.location, training)
        named, content = next(self.contents(training.head(1)))[1:]
        image = _opened(content, named)
        channels = self.settings.channels or (1 if image.mode in _GREY | _DEEP else 3)
        height, width = self.settings.size or (image.height, image.width)
        encoder = ImageEncoder((channels, height, width), flags_absent, bool(self.settings.size))
        why = f"{channels} {'channel' if channels == 1 else 'channels'} of {height} x {width} pixels in 0..1"
        kind = f"{image.format} {image.mode}"
        return encoder, [ColumnReport("(image)", kind, "image", why, 0, channels * height * width)]

    def contents(self, wanted: pl.DataFrame) -> Iterator[tuple[int, str, bytes]]:
        """Yield the row, the name for messages, and the encoded bytes of each wanted image.

        Of a Parquet file, this reads a few images at a time. A file whose row groups are larger than that
        needs the memory of one row group.
        """
        if self._table is None:
            yield from self._from_files(wanted)
            return
        place, count = 0, len(self.ids())
        column, key_column = self.settings.column, self.settings.id
        size = max(1, int(PART_BYTES * count / max(1, self.path.stat().st_size)))
        lines = 0
        while place < count:
            batch = self._table.slice([key_column, column], place, size)
            place += batch.height
            joined = batch.with_columns(pl.col(key_column).cast(pl.String).alias("id")).join(
                wanted, on="id", how="inner"
            )
            for row, key, content in joined.select(POSITION, "id", column).iter_rows():
                lines += 1
                if content is None:
                    raise DataError(
                        "VFL-2376",
                        f'"{self.path}": every record needs an image. Found none for "{key}" in "{column}". '
                        "Drop those lines, and run `vafl align` again.",
                    )
                yield row, f'"{self.path}", record "{key}"', content
            if lines == wanted.height:
                return
        check_complete(self.location, lines, wanted)

    def _from_files(self, wanted: pl.DataFrame) -> Iterator[tuple[int, str, bytes]]:
        named = pl.DataFrame({"id": self.ids(), "name": pl.Series(list(self._files), dtype=pl.String)})
        found = wanted.join(named, on="id", how="inner").sort(POSITION)
        check_complete(self.location, found.height, wanted)
        for row, name in found.select(POSITION, "name").iter_rows():
            path = self.path / name
            try:
                content = path.read_bytes()
            except OSError as error:
                raise DataError(
                    "VFL-2377",
                    f'"{path}" must be a file that can be read. Found: {error.strerror}. Run `vafl align` '
                    "again at every party if it is gone.",
                ) from error
            yield row, f'"{path}"', content


@dataclass(frozen=True)
class ImageEncoder(EncodedRecords):
    """Decodes images to numbers in 0..1.

    Attributes:
        record_shape: channels, height and width.
        flags_absent: whether the features mark records that the party does not have.
        resizes: whether to resize images of another size. Otherwise they are refused.
    """

    kind: ClassVar[str] = "images"
    record_shape: tuple[int, ...]
    flags_absent: bool
    resizes: bool

    def __post_init__(self) -> None:
        check_shape(self.record_shape)
        if len(self.record_shape) != 3 or self.record_shape[0] not in (1, 3):
            raise DataError(
                "VFL-2378",
                "an encoder of images must have a shape [channels, height, width] with 1 or 3 channels. "
                f"Found {list(self.record_shape)}.",
            )

    @property
    def names(self) -> list[str]:
        """Pixels have no names."""
        return []

    def read(self, source: Source, wanted: pl.DataFrame, rows: int, into: Floats | None = None) -> Floats:
        """Return the features [rows, *shape] of the wanted records; other rows are absent.

        Raises:
            DataError: an image is missing, damaged, too large, or of another size than in training.
        """
        images = of_kind(ImageSource, source, self.kind, source.section)
        features = self.start(wanted, rows, into)
        for row, named, content in images.contents(wanted):
            place: Integers = np.array([row])
            self.put(features, place, self.decode(content, named)[None])
        return features

    def decode(self, content: bytes, named: str) -> Floats:
        """Return the pixels [channels, height, width] of an encoded image, in 0..1.

        Args:
            named: the file or record, for messages.
        """
        channels, height, width = self.record_shape
        image = _opened(content, named)
        try:
            with catch_warnings():
                simplefilter("ignore")  # Pillow warns about harmless flaws in metadata
                image = ImageOps.exif_transpose(image)
                size, limit = (image.height, image.width), 255.0
                if image.mode in _DEEP:
                    image, limit = image.convert("F"), _DEEPEST
                else:
                    image = image.convert("L" if channels == 1 else "RGB")
                if size != (height, width) and self.resizes:
                    image = image.resize((width, height), Image.Resampling.BILINEAR)
                pixels = np.asarray(image, dtype=np.float32) / np.float32(limit)
        except Exception as error:  # Pillow raises many kinds of errors for damaged images
            raise _damaged(named, error) from error
        if size != (height, width) and not self.resizes:
            raise DataError(
                "VFL-2379",
                f"{named}: all images must have {height} x {width} pixels, as the first one in training. "
                f"Found {size[0]} x {size[1]}. Set size = [height, width] to resize all images.",
            )
        if pixels.ndim == 2:
            return np.broadcast_to(pixels, (channels, height, width))
        return pixels.transpose(2, 0, 1)

    def misfit(self, source: Source) -> str:
        """Return why a changed source needs a new encoder: it asks for another size or other channels."""
        settings = of_kind(ImageSource, source, self.kind, source.section).settings
        channels, *size = self.record_shape
        return reshaped(self.record_shape, [settings.channels or channels, *(settings.size or size)])

    def to_dict(self) -> dict[str, Any]:
        """Return the encoder as values that TOML and JSON can represent."""
        return as_stored(self.kind, asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ImageEncoder":
        """Make the encoder that `to_dict` described; raise DataError if the values describe none."""
        try:
            written = make(_Written, dict(values))
            return cls(tuple(written.record_shape), written.flags_absent, written.resizes)
        except ValueError as error:
            raise damaged_encoder(error) from error


@dataclass(frozen=True)
class _Written:
    """The document that `ImageEncoder.to_dict` makes."""

    kind: Literal["images"]
    record_shape: list[int]
    flags_absent: bool
    resizes: bool


def _opened(content: bytes, named: str) -> Image.Image:
    """Return an image whose header was read and whose pixels were not.

    Raises:
        DataError: it has another format, is damaged or has too many pixels.
    """
    try:
        with catch_warnings():
            simplefilter("ignore")
            image = Image.open(io.BytesIO(content), formats=FORMATS)
    except Exception as error:  # Pillow raises many kinds of errors for damaged images
        raise _damaged(named, error) from error
    if image.width * image.height > MOST_PIXELS:
        raise DataError(
            "VFL-2380",
            f"{named}: an image must have at most {MOST_PIXELS:,} pixels. Found {image.width:,} x "
            f"{image.height:,}. Make it smaller.",
        )
    if image.mode in ("I", "F"):
        raise DataError(
            "VFL-2381",
            f'{named}: an image must have 8 or 16 bits per channel. Found the mode "{image.mode}" of 32 '
            "bits, whose range is unknown. Convert it, or use a source of arrays.",
        )
    return image


def _damaged(named: str, error: Exception) -> DataError:
    cause = str(error).partition("\n")[0].partition(" <")[0] or type(error).__name__
    return DataError(
        "VFL-2382",
        f"{named} must be a complete image, in one of the formats {', '.join(FORMATS)}. Found: {cause}. "
        "Write it again, or remove it and run `vafl align` again at every party.",
    )
