"""The settings of a party's source of records, one class for each kind.

A source answers four questions: which records there are, what shape a record has, what a given record holds,
and how to encode a record that was not there in training. vafl.data.sources has the code of each kind.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from vafl.errors import ConfigError
from vafl.scope import declared, setting

_MISSING = ("NA", "N/A", "NaN", "nan", "null", "NULL", "?")
_LARGEST_SIDE = 16_384  # pixels; larger images are refused when they are decoded, too
_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class TableSettings:
    """A table with one line per record, as a CSV or Parquet file.

    Attributes:
        path: the CSV or Parquet file. A relative path starts at the config file's folder.
        id: the column that identifies the record: text or integers, without duplicates.
        label: the column to predict, in the server's table only. Predictions do not need it.
        weight: the column with the weight of each record in the training loss, numbers of 0 or more, in the
            server's table only. It is never a feature. Metrics and baselines are not weighted. By default,
            all records have the same weight.
        features: the columns to use, by name or pattern (`pay_*`). The default is all columns except id,
            label and weight. The server's features are used too, by a client inside its process.
        ignore: columns not to use, by name or pattern. `["*"]` uses no column of the server's table.
        categories: number columns whose values are categories, by name or pattern.
        most_categories: the number of categories of a column that get a feature each. Rarer ones share one
            feature.
        missing: texts that mean a missing value, in addition to an empty field.
        separator: the character between the fields of a CSV.
        groups: name -> columns, by name or pattern, whose importance the server may measure together. The
            server learns the names of the groups; prediction.importance says what else it learns.
        alignment: the file that `vafl align` writes. The default is NAME.alignment.parquet beside the config
            file.
        cache: the folder for encoded features that are too large to stay in memory. Only its owner can read
            it. The default is NAME.cache beside the config file.
    """

    path: str = field(metadata=declared(is_path=True))
    id: str
    label: str = ""
    weight: str = ""
    features: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    most_categories: int = 32
    missing: tuple[str, ...] = _MISSING
    separator: str = ","
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    alignment: str = setting("", is_path=True)
    cache: str = setting("", is_path=True)
    kind: Literal["table"] = "table"

    def __post_init__(self) -> None:
        _check_separator(self.separator)
        if self.most_categories < 1:
            raise ConfigError("VFL-2251", f"most_categories must be 1 or more. Found {self.most_categories}.")
        if self.label and self.label == self.id:
            raise ConfigError(
                "VFL-2252",
                f'the label and the id must be different columns. Found "{self.label}" for both.',
            )
        if self.weight and self.weight in (self.id, self.label):
            raise ConfigError(
                "VFL-2253",
                f'the weight must not be the id or the label column. Found "{self.weight}" for both.',
            )


@dataclass(frozen=True)
class SeriesSettings:
    """Values over time, as a CSV or Parquet file. A record becomes numbers [steps, features].

    The file is long, with one line per record and time, or wide, with one line per record and a column for
    each step (`hr_1` to `hr_24`). Columns hold numbers.

    Attributes:
        path: the CSV or Parquet file. A relative path starts at the config file's folder.
        id: the column that identifies the record: text or integers. A long file may have lines of a record
            anywhere.
        time: for a long file: the column that orders the lines of a record, numbers or dates in ISO 8601.
        wide: for a wide file: name of a feature -> its columns in the order of the steps, by name or pattern.
            All features need the same number of steps. `"hr_*"` takes the columns in the order of the file.
        features: for a long file: the columns to use, by name or pattern. The default is all other columns.
        ignore: for a long file: columns not to use, by name or pattern.
        missing: texts that mean a missing value, in addition to an empty field.
        separator: the character between the fields of a CSV.
        steps: the number of steps. A longer series keeps its latest steps, and a shorter one is padded at
            its beginning. 0 takes the longest series of the training rows, but at most 512 steps.
        alignment: the file that `vafl align` writes. The default is NAME.alignment.parquet beside the config
            file.
        cache: the folder for encoded features that are too large to stay in memory. Only its owner can read
            it. The default is NAME.cache beside the config file.
    """

    path: str = field(metadata=declared(is_path=True))
    id: str
    time: str = ""
    wide: dict[str, tuple[str, ...]] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    missing: tuple[str, ...] = _MISSING
    separator: str = ","
    steps: int = 0
    alignment: str = setting("", is_path=True)
    cache: str = setting("", is_path=True)
    kind: Literal["series"] = "series"

    def __post_init__(self) -> None:
        _check_separator(self.separator)
        if bool(self.time) == bool(self.wide):
            raise ConfigError(
                "VFL-2301",
                "a series needs either time, the column that orders the lines of a record, or wide, which "
                f'names the columns of each feature\'s steps. Found time "{self.time}" and {len(self.wide)} '
                "wide features. Set time for a file with one line per record and time, and wide for a file "
                "with one line per record.",
            )
        if not self.id or self.id == self.time:
            raise ConfigError(
                "VFL-2302",
                f'a series needs an id column that is not the time column. Found id "{self.id}" and time '
                f'"{self.time}". Set id to the column that identifies the record.',
            )
        if self.steps < 0:
            raise ConfigError(
                "VFL-2303",
                f"steps must be 0 or more (0: the longest series of the training rows). Found {self.steps}.",
            )
        if self.wide and (self.features or self.ignore):
            raise ConfigError(
                "VFL-2304",
                "features and ignore choose columns of a long file, and wide names the columns itself. Found "
                f"both: {list(self.features + self.ignore)[:5]}. Remove features and ignore.",
            )
        if empty := [name for name, columns in self.wide.items() if not columns]:
            raise ConfigError(
                "VFL-2305",
                f'wide needs at least one column for each feature. Found none for "{empty[0]}". List its '
                "columns in the order of the steps.",
            )


@dataclass(frozen=True)
class ImageSettings:
    """Images, one per record. A record becomes numbers in 0..1, [channels, height, width].

    The formats are PNG, JPEG, BMP, GIF (its first frame), TIFF, WEBP, PPM and PGM.

    Attributes:
        path: a folder of image files, each named by the record's id (`P0017.png`), or a Parquet file with an
            id column and a column of encoded images. A relative path starts at the config file's folder.
        id: for a Parquet file: the column that identifies the record.
        column: for a Parquet file: the column with the bytes of each image.
        size: height and width that every image is resized to. Without it, all images must have one size.
        channels: 1 for grey, 3 for red, green and blue; 0 takes those of the first image.
        alignment: the file that `vafl align` writes. The default is NAME.alignment.parquet beside the config
            file.
        cache: the folder for decoded images that are too large to stay in memory. Only its owner can read
            it. The default is NAME.cache beside the config file.
    """

    path: str = field(metadata=declared(is_path=True))
    id: str = ""
    column: str = ""
    size: tuple[int, ...] = ()
    channels: int = 0
    alignment: str = setting("", is_path=True)
    cache: str = setting("", is_path=True)
    kind: Literal["images"] = "images"

    def __post_init__(self) -> None:
        if bool(self.id) != bool(self.column) or (self.id and self.id == self.column):
            raise ConfigError(
                "VFL-2311",
                "images in a Parquet file need id and column, two different columns; a folder of files needs "
                f'neither. Found id "{self.id}" and column "{self.column}".',
            )
        if len(self.size) not in (0, 2) or not all(0 < side <= _LARGEST_SIDE for side in self.size):
            raise ConfigError(
                "VFL-2312",
                f"size must be [height, width], each in 1..{_LARGEST_SIDE}. Found {list(self.size)}.",
            )
        if self.channels not in (0, 1, 3):
            raise ConfigError(
                "VFL-2313",
                f"channels must be 1 (grey), 3 (colour) or 0 (as the first image). Found {self.channels}.",
            )


@dataclass(frozen=True)
class ArraySettings:
    """An array of numbers whose first axis is the record, such as embeddings computed elsewhere.

    Attributes:
        path: a .npy or .safetensors file. A relative path starts at the config file's folder.
        ids: the file with the id of each record, in the order of the array: a text file with one id per
            line, or a CSV or Parquet file with an id column.
        id: the id column, if `ids` is a CSV or Parquet file.
        tensor: the name of the tensor, if a .safetensors file has several.
        scale: `standard` scales each column to zero mean and unit deviation in the training rows. `auto` does
            so if a record is a vector or [steps, features], and data.scale allows it. `none` does not scale.
        alignment: the file that `vafl align` writes. The default is NAME.alignment.parquet beside the config
            file.
        cache: the folder for encoded features that are too large to stay in memory. Only its owner can read
            it. The default is NAME.cache beside the config file.
    """

    path: str = field(metadata=declared(is_path=True))
    ids: str = field(metadata=declared(is_path=True))
    id: str = ""
    tensor: str = ""
    scale: Literal["auto", "standard", "none"] = "auto"
    alignment: str = setting("", is_path=True)
    cache: str = setting("", is_path=True)
    kind: Literal["arrays"] = "arrays"

    def __post_init__(self) -> None:
        if not self.path.endswith((".npy", ".safetensors")):
            raise ConfigError(
                "VFL-2321",
                f'path must name a .npy or .safetensors file. Found "{self.path}". Save the array with '
                "numpy.save.",
            )
        if not self.ids:
            raise ConfigError(
                "VFL-2322",
                "ids must name the file with the id of each record, in the order of the array. Found none. "
                "Write a text file with one id per line.",
            )
        if self.tensor and not self.path.endswith(".safetensors"):
            raise ConfigError(
                "VFL-2323",
                f'tensor names a tensor of a .safetensors file. Found "{self.tensor}" with "{self.path}", '
                "which holds one array. Remove tensor.",
            )


@dataclass(frozen=True)
class PythonSettings:
    """Records that Python code of the party reads.

    Attributes:
        factory: `package.module:Factory`. vafl imports it only if this party's own configuration names it.
            The object that it returns has `ids()`, a sequence of text or whole numbers; `shape`, the shape of
            one record; and `read(positions)`, which returns an array [positions, *shape] of finite numbers
            for a list of positions in `ids()`. Let `options` name its files, so that new content is noticed.
        options: keyword arguments for the factory.
        alignment: the file that `vafl align` writes. The default is NAME.alignment.parquet beside the config
            file.
        cache: the folder for features that are too large to stay in memory. Only its owner can read it. The
            default is NAME.cache beside the config file.
    """

    factory: str
    options: dict[str, Any] = field(default_factory=dict)
    alignment: str = setting("", is_path=True)
    cache: str = setting("", is_path=True)
    kind: Literal["python"] = "python"

    def __post_init__(self) -> None:
        if not _FACTORY.fullmatch(self.factory):
            raise ConfigError(
                "VFL-2331",
                f'factory must have the form package.module:Factory. Found "{self.factory}". Name a class or '
                "function in a module that Python can import.",
            )


SourceSettings = TableSettings | SeriesSettings | ImageSettings | ArraySettings | PythonSettings
SOURCES: dict[str, type[SourceSettings]] = {
    "table": TableSettings,
    "series": SeriesSettings,
    "images": ImageSettings,
    "arrays": ArraySettings,
    "python": PythonSettings,
}


def _check_separator(separator: str) -> None:
    if len(separator.encode()) != 1:
        raise ConfigError("VFL-2250", f'separator must be one character, such as ";". Found "{separator}".')
