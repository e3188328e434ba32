"""A journal: a file of checksummed entries to which entries are appended, on disk before they count.

A crash at any instant leaves all entries made before it, and one cut short at most, which counts for nothing.
A lock keeps other processes out. What entries mean is not known here.
"""

import fcntl
import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from vafl.errors import RunFolderError
from vafl.files import sync_folder, write_atomically, write_once

Payload = bytes | memoryview
Entry = tuple[int, Payload]  # kind, and what it says

_FORMAT, _VERSION = "vafl ledger", 2
_HEAD = struct.Struct("<BxxxI")  # kind, bytes that follow
_SUMS = struct.Struct("<II")  # checksums of that, and of the bytes that follow
_START = _HEAD.size + _SUMS.size


@dataclass(frozen=True)
class Content:
    """A journal as it was found.

    Attributes:
        identity: what the entries are about.
        number: random, no other journal's.
        end: where the last whole entry ends.
    """

    identity: str
    number: str
    entries: list[Entry]
    end: int


class Journal:
    """The file, locked and open for appending; made if it is not there, for its owner's eyes only.

    Attributes:
        number: random, no other journal's.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self.path, self._file = path, -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                write_once(path, _as_bytes(identity, ()), private=True)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND)
            self._lock()
            found = read_journal(path)
            if found.identity != identity:
                raise RunFolderError(
                    f'the ledger "{path}" is for other records: it counts {found.identity}; here are '
                    f"{identity}. Name another folder in privacy.ledger for these."
                )
            os.ftruncate(self._file, found.end)  # an entry cut short counts for nothing
        except RunFolderError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise RunFolderError(
                f'the ledger "{path}" must be a file that this process may write. {error}. Name another '
                "folder in privacy.ledger."
            ) from error
        self.number, self._identity, self._found = found.number, identity, found.entries

    def take_entries(self) -> list[Entry]:
        """What was in it when it was opened; once, since it may be much."""
        found, self._found = self._found, []
        return found

    def append(self, kind: int, payload: bytes) -> int:
        """On disk when this returns; if it raises, that is not known. Gives the bytes written."""
        head = _head(kind, payload)
        size = len(head) + len(payload)
        try:
            written = os.writev(self._file, (head, payload))
            if written < size:
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                raise OSError("the disk is full")
            os.fdatasync(self._file)
        except OSError as error:
            raise RunFolderError(
                f'the ledger "{self.path}" cannot be written, so nothing may be uploaded: {error}.'
            ) from error
        return size

    def replace(self, entries: Iterable[Entry]) -> int:
        """Other entries take the place of all; gives the new size. The new file is locked before it is the
        journal."""
        temporary = self.path.with_name(f"{self.path.name}.new")
        write_journal(temporary, self._identity, entries, self.number)
        new = os.open(temporary, os.O_RDWR | os.O_APPEND)
        fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary.replace(self.path)
        sync_folder(self.path.parent)
        os.close(self._file)
        self._file = new
        return os.fstat(new).st_size

    def close(self) -> None:
        """Lets others use the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _lock(self) -> None:
        """Of the very file that has the name: its last user may have replaced it meanwhile."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = os.path.samestat(os.fstat(self._file), self.path.stat())
        except BlockingIOError:
            alone = False
        if not alone:
            raise RunFolderError(
                f'the ledger "{self.path}" is in use by another process: two runs may not spend one budget '
                "at the same time. Wait until it ends."
            )


def read_journal(path: Path) -> Content:
    """What a journal says; another process may be appending to it."""
    content = path.read_bytes()
    facts, start = _header(path, content)
    found = list(_whole_entries(path, memoryview(content), start))
    end = found[-1][2] if found else start
    if end - start < facts["length"]:
        raise _damaged(path, end)
    return Content(facts["identity"], facts["number"], [(kind, payload) for kind, payload, _ in found], end)


def write_journal(path: Path, identity: str, entries: Iterable[Entry], number: str | None = None) -> None:
    """A journal with these entries in the place of whatever was there."""
    write_atomically(path, _as_bytes(identity, entries, number), private=True)


def _as_bytes(identity: str, entries: Iterable[Entry], number: str | None = None) -> bytes:
    body = b"".join(part for kind, payload in entries for part in (_head(kind, payload), payload))
    facts = {
        "format": _FORMAT,
        "version": _VERSION,
        "identity": identity,
        "number": number or uuid4().hex,
        "length": len(body),
    }
    line = json.dumps(facts).encode()
    return b"%b %08x\n" % (line, zlib.crc32(line)) + body


def _head(kind: int, payload: Payload) -> bytes:
    """What an entry begins with."""
    head = _HEAD.pack(kind, len(payload))
    return head + _SUMS.pack(zlib.crc32(head), zlib.crc32(payload))


def _header(path: Path, content: bytes) -> tuple[dict[str, Any], int]:
    """The first line, and where the entries begin."""
    line, newline, _ = content.partition(b"\n")
    said, _, checksum = line.rpartition(b" ")
    if newline and checksum == b"%08x" % zlib.crc32(said):
        facts: dict[str, Any] = json.loads(said)
        if (facts.get("format"), facts.get("version")) == (_FORMAT, _VERSION):
            return facts, len(line) + 1
    if line.startswith(b'{"format": "vafl ledger", "version": 1,'):
        raise RunFolderError(
            f'"{path}" is a ledger of version 1, which counted the rows of one alignment and not people. '
            "Let the vafl that wrote it show the largest mu in it, keep it, name another folder in "
            "privacy.ledger, and lower mu_max^2 by that mu^2."
        )
    raise RunFolderError(f'"{path}" must be a privacy ledger of version {_VERSION}. It is something else.')


def _whole_entries(path: Path, content: memoryview, place: int) -> Iterator[tuple[int, memoryview, int]]:
    """(kind, payload, where it ends) of each whole entry; a crash may have cut the last."""
    while len(content) - place >= _START:
        kind, length = _HEAD.unpack_from(content, place)
        head_sum, payload_sum = _SUMS.unpack_from(content, place + _HEAD.size)
        end = place + _START + length
        payload = content[place + _START : end]
        if zlib.crc32(content[place : place + _HEAD.size]) != head_sum:
            if any(content[place:]):
                raise _damaged(path, place)
            return
        if len(payload) < length or zlib.crc32(payload) != payload_sum:
            if end < len(content):
                raise _damaged(path, place)
            return
        yield kind, payload, end
        place = end


def _damaged(path: Path, place: int) -> RunFolderError:
    return RunFolderError(
        f'the ledger "{path}" is damaged at byte {place:,}: what was spent is not known any more. Put '
        "back a copy, or count every record of it as spent."
    )
