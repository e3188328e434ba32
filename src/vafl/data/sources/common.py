"""Small functions that several kinds of sources share."""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from vafl.data.source_settings import SourceSettings
from vafl.errors import DataError

PART_BYTES = 16 << 20  # most bytes of features that are read and encoded at once
_OUTSIDE = ("alignment", "cache", "label", "weight", "groups")  # settings that do not affect the features

Kind = TypeVar("Kind")


def section_of(party: str) -> str:
    """Return the section of the configuration that describes a party's source."""
    return f"parties.{party}.source"


def of_kind(kind: type[Kind], source: object, expected: str, section: str) -> Kind:
    """Return the source if it is of the kind that an encoder was fitted on.

    Raises:
        DataError: the encoder belongs to another kind of source.
    """
    if isinstance(source, kind):
        return source
    raise DataError(
        "VFL-2341",
        f'the model was trained on a source of the kind "{expected}". Found that {section} is of another '
        "kind. Use the same kind of source as in training, or train again.",
    )


def fingerprint_of(settings: SourceSettings, *paths: Path, also: Sequence[Any] = ()) -> str:
    """Return a digest of the settings that affect the features, and of each file's path, size and time.

    It reads no content: a digest of 20 GB takes as long as encoding them.

    Args:
        also: further facts to include.
    """
    facts: list[Any] = [{key: value for key, value in asdict(settings).items() if key not in _OUTSIDE}]
    facts += also
    for path in paths:
        found = path.stat()
        facts.append([str(path.resolve()), found.st_size, found.st_mtime_ns])
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def parts_of(count: int, record_bytes: int) -> Iterator[slice]:
    """Yield slices of `count` records that have at most PART_BYTES each, but at least one record."""
    size = max(1, PART_BYTES // max(1, record_bytes))
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def lacking(columns: Iterable[Any], source_columns: Collection[str]) -> str:
    """Return that a source has lost some of an encoder's columns; empty if it has all of them."""
    missing = [column.name for column in columns if column.name not in source_columns]
    return f"its source no longer has the columns {', '.join(missing[:5])}" if missing else ""


def reshaped(before: Sequence[int], now: Sequence[int]) -> str:
    """Return that the records' shape has changed; empty if it has not."""
    same = tuple(before) == tuple(now)
    return "" if same else f"its records had the shape {list(before)} and have {list(now)}"


def check_shape(shape: Sequence[int]) -> None:
    """Raise DataError unless these are the sides of one record."""
    if not shape or min(shape) < 1:
        raise DataError(
            "VFL-2345",
            f"a record must have at least one number on every axis. Found the shape {list(shape)}.",
        )


def damaged_encoder(error: Exception) -> DataError:
    """Return the error for stored values that do not describe an encoder."""
    return DataError(
        "VFL-2346",
        f"a stored encoder must be unchanged since vafl wrote it. Found: {error} Restore the model "
        "folder, or train again.",
    )


def as_stored(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an encoder's values with its kind, and with lists in place of tuples, which TOML lacks."""
    return {"kind": kind, **{name: _plain(value) for name, value in values.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value
