"""Encoded features in a memory-mapped file, so that they need not fit into memory.

The kernel reads the pages that a batch needs and drops them again when memory is short. The file is built
once, from the source, and used again as long as source, encoder and records are the same.
"""

import errno
import fcntl
import hashlib
import json
import math
import mmap
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from warnings import catch_warnings, filterwarnings

import numpy as np
import polars as pl
import torch
from torch import Tensor

from vafl.arrays import Floats
from vafl.data.sources.base import RecordEncoder, Source
from vafl.data.tables import POSITION
from vafl.errors import DataError
from vafl.files import reserve, sync_folder

IN_MEMORY = 256 << 20  # bytes; smaller features stay in memory, where a gather is fastest
_ENDING = ".features"
_PRIVATE, _PRIVATE_FOLDER, _WRITABLE_BY_OTHERS = 0o600, 0o700, 0o022
_FLOAT = 4  # bytes
_READ_AHEAD = 64 << 10  # bytes; larger records profit from the kernel's reading ahead
_IDS = 65_536  # ids hashed at once


class FeatureCache:
    """The features of a party, in memory or in a file of a private folder.

    Args:
        folder: the folder for the files. It is created so that only its owner can read it. None keeps all
            features in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def at(cls, folder: str) -> "FeatureCache":
        """Return the cache in the folder that settings name; "" keeps all features in memory."""
        return cls(Path(folder) if folder else None)

    def features(self, source: Source, encoder: RecordEncoder, wanted: pl.DataFrame, rows: int) -> Tensor:
        """Return the features [rows, *shape] of the wanted records. They must not be written to.

        If the features are in a file, other files of the same party are deleted: they belong to another
        version of the source, another encoder or other records.

        Raises:
            DataError: the file cannot be written, or the source cannot be read.
        """
        size = _FLOAT * rows * math.prod(encoder.shape)
        if self._folder is None or size <= IN_MEMORY:
            return torch.from_numpy(encoder.read(source, wanted, rows))
        path = self._folder / f"{source.party}.{_key(source, encoder, wanted, rows)}{_ENDING}"
        try:
            _make_private(self._folder)
            number = _existing(path, size)
            if number is None:
                number = _write(path, size, source, encoder, wanted, rows)
            try:
                _remove_others(source.party, path)
                return _mapped(number, (rows, *encoder.shape))
            finally:
                os.close(number)  # the mapping keeps the file open
        except OSError as error:
            raise self._failed(error, size) from error

    def _failed(self, error: OSError, size: int) -> DataError:
        """Return the error for a file that cannot be written or mapped."""
        needed = f"{size / 1e9:.3g} GB"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return DataError(
                "VFL-2431",
                f'"{self._folder}" must have room for {needed} of encoded features. Found: {error.strerror}. '
                "Free some space, raise the limit on the size of files, or set cache to a folder on another "
                "disk.",
            )
        if error.errno == errno.ENOMEM:
            return DataError(
                "VFL-2432",
                f"the process must be able to map {needed} of encoded features, which stay on disk. Found: "
                f"{error.strerror}. Raise the limit on its address space (ulimit -v).",
            )
        return DataError(
            "VFL-2433",
            f'cache must be a folder that this process may write to. Found "{self._folder}": '
            f"{error.strerror or error}. Choose another folder.",
        )


def _make_private(folder: Path) -> None:
    """Create a folder that only its owner may read. An existing one keeps its mode.

    Raises:
        DataError: others may write to the folder, and so could replace the features.
    """
    folder.mkdir(_PRIVATE_FOLDER, parents=True, exist_ok=True)
    mode = folder.stat().st_mode
    if mode & _WRITABLE_BY_OTHERS:
        raise DataError(
            "VFL-2434",
            f'cache must be a folder that only its owner may write to. Found "{folder}" with mode '
            f"{mode & 0o777:o}. Name a folder that does not exist yet, or change the mode (chmod 700).",
        )


def _existing(path: Path, size: int) -> int | None:
    """Open the file; None if there is none, or none of this size."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    if os.fstat(number).st_size == size:
        return number
    os.close(number)
    return None


def _write(
    path: Path, size: int, source: Source, encoder: RecordEncoder, wanted: pl.DataFrame, rows: int
) -> int:
    """Encode the source into a file, part by part. Return the open file.

    The file gets its name only when it is complete and on disk, so a crash leaves no half file that could
    be used. Another process of this party removes the draft that a crash leaves.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    number = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, _PRIVATE)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)  # shows other processes that the draft is in use
        reserve(draft, size)
        with _shared(number, (rows, *encoder.shape)) as features:
            encoder.read(source, wanted, rows, features)
        os.fsync(number)
        draft.replace(path)
        sync_folder(path.parent)
        fcntl.flock(number, fcntl.LOCK_UN)
    except BaseException:
        os.close(number)
        draft.unlink(missing_ok=True)
        raise
    return number


def _remove_others(party: str, current: Path) -> None:
    """Delete the party's other files and the drafts that crashes left.

    A process that has mapped one of these files keeps its content until it ends.
    """
    # Names of parties may have dots, so "bank.*" would also be a file of "bank.north".
    pattern = re.compile(rf"{re.escape(party)}\.[0-9a-f]{{32}}{re.escape(_ENDING)}(\.[0-9a-f]{{16}}\.part)?")
    for path in current.parent.iterdir():
        found = pattern.fullmatch(path.name)
        if found and path != current and not (found[1] and _is_locked(path)):
            path.unlink(missing_ok=True)


def _key(source: Source, encoder: RecordEncoder, wanted: pl.DataFrame, rows: int) -> str:
    """Return a digest of all that the features depend on."""
    facts = [source.fingerprint(), encoder.to_dict(), rows]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(wanted[POSITION].cast(pl.Int64).to_numpy().tobytes())
    for start in range(0, wanted.height, _IDS):
        digest.update(json.dumps(wanted["id"][start : start + _IDS].to_list()).encode())
    return digest.hexdigest()[:32]


@contextmanager
def _shared(number: int, shape: tuple[int, ...]) -> Iterator[Floats]:
    """Map an open file to write to it; at the end, wait until what was written is on disk."""
    content = mmap.mmap(number, 0)
    yield np.frombuffer(content, np.float32).reshape(shape)
    content.flush()  # the mapping itself ends with the last array that refers to it


def _mapped(number: int, shape: tuple[int, ...]) -> Tensor:
    """Map an open file to read from it.

    A private, writable mapping (numpy's mode "c") would count as memory that the process may need: the kernel
    refuses one that is larger than the machine's memory.
    """
    content = mmap.mmap(number, 0, prot=mmap.PROT_READ)
    if _FLOAT * math.prod(shape[1:]) < _READ_AHEAD:
        # A batch takes a few records from anywhere. The kernel would read their neighbours, too, in place of
        # pages that are still needed.
        content.madvise(mmap.MADV_RANDOM)
    features = np.frombuffer(content, np.float32).reshape(shape)
    with catch_warnings():
        filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(features)


def _is_locked(path: Path) -> bool:
    """Return whether a process is writing this draft."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(number)
    return False
