"""Public data sets in a folder: what each needs there, and what is said when it is not so."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from vafl.errors import DataError

_HINT = "name the folder above it with --data or VAFL_DATA."


def require(title: str, files: Iterable[Path], source: str) -> None:
    """Raises DataError unless all the files are there; `source` is where people get them."""
    missing = [path for path in files if not path.is_file()]
    if missing:
        raise missing_data(title, missing[0].parent, ", ".join(path.name for path in missing), source)


def plain_or_gzipped(title: str, path: Path, source: str) -> Path:
    """The file, or its gzipped copy beside it; raises DataError where there is neither."""
    gzipped = path.with_name(f"{path.name}.gz")
    found = next((each for each in (path, gzipped) if each.is_file()), None)
    if found is None:
        raise missing_data(title, path.parent, f"{path.name} or {gzipped.name}", source)
    return found


def missing_data(title: str, folder: Path, missing: str, source: str) -> DataError:
    """What to say when a data set is not there."""
    return DataError(
        "VFL-2181", f'{title} must lie in "{folder}". Missing: {missing}. Get it from {source}, and {_HINT}'
    )


def require_count(path: Path, what: str, found: int, expected: int) -> None:
    """Raises DataError unless a file holds as many of something as the published one."""
    if found != expected:
        raise DataError(
            "VFL-2182", f'"{path}" must hold {expected:,} {what}. Found {found:,}. Download it again.'
        )


def require_digest(path: Path, content: bytes, md5: str) -> None:
    """Raises DataError unless the content is the published one, by its md5; without one, takes any."""
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if md5 and found != md5:
        raise DataError(
            "VFL-2183",
            f'"{path}" must be the published file, with md5 {md5}. Found {found}. Download it again.',
        )
