"""Check that the files of a public data set are present and have the published content."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from vafl.errors import DataError

_HINT = "set its parent folder with --data or VAFL_DATA."


def require(title: str, files: Iterable[Path], source: str) -> None:
    """Raise DataError unless all files exist. `source` tells the user where to download them."""
    missing = [path for path in files if not path.is_file()]
    if missing:
        raise missing_data(title, missing[0].parent, ", ".join(path.name for path in missing), source)


def plain_or_gzipped(title: str, path: Path, source: str) -> Path:
    """Return the file, or its gzipped copy in the same folder. Raise DataError if neither exists."""
    gzipped = path.with_name(f"{path.name}.gz")
    existing = next((each for each in (path, gzipped) if each.is_file()), None)
    if existing is None:
        raise missing_data(title, path.parent, f"{path.name} or {gzipped.name}", source)
    return existing


def missing_data(title: str, folder: Path, missing: str, source: str) -> DataError:
    """Return the error for a data set that is missing."""
    return DataError(
        "VFL-2181",
        f'{title} must be in "{folder}". Missing: {missing}. Download it from {source}, and {_HINT}',
    )


def require_count(path: Path, what: str, found: int, expected: int) -> None:
    """Raise DataError unless the file has the expected number of `what`, such as "records"."""
    if found != expected:
        raise DataError(
            "VFL-2182", f'"{path}" must have {expected:,} {what}. Found {found:,}. Download it again.'
        )


def require_digest(path: Path, content: bytes, md5: str) -> None:
    """Raise DataError unless the content has this MD5. An empty `md5` accepts any content."""
    actual = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if md5 and actual != md5:
        raise DataError(
            "VFL-2183",
            f'"{path}" must be the published file, with md5 {md5}. Found {actual}. Download it again.',
        )
