"""A journal: a file of entries in a keyed hash chain, to which entries can only be appended.

    {"format": "vafl ledger", "version": 3, ...} newline
    kind, length, payload, digest
    kind, length, payload, digest
    ...

Each digest is a keyed BLAKE2b digest of the entry and of the digest before it; the first one continues the
digest of the header line. The key, and a seal on the last digest, are in the head
(see vafl.privacy.ledger.seal). This module does not know what entries mean.

Append writes the entry, waits for the disk, seals it in the head, and waits for the disk again. So after a
crash the journal holds:

- every entry that `append` returned for, and each of their bytes: anything else is refused;
- at most one entry more. If it is whole, it counts. If it was cut short (`Journal.torn`), its bytes stay in
  the file until the next append overwrites them, so that a second crash cannot hide the first.

`replace` writes a shorter file with other entries, in this order: the new file under another name; a seal for
it, beside the seal for the old file; the rename. Nothing else is written before the rename is on disk, and
the next append overwrites the seal for the old file. So whichever file has the journal's name has its seal.
"""

import json
import os
import secrets
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from vafl.errors import LedgerError, RunFolderError
from vafl.files import make_private_file, sync_folder, write_atomically
from vafl.privacy.ledger.seal import (
    DIGEST,
    Head,
    Seal,
    Slots,
    head_path,
    keyed_digest,
    new_key,
    read_head,
    write_head,
)

Payload = bytes | memoryview
Entry = tuple[int, Payload]  # kind and payload

_FORMAT, _VERSION = "vafl ledger", 3
_START = struct.Struct("<BxxxI")  # kind, bytes of payload
_LONGEST_HEADER = 1 << 16  # bytes


class Content(NamedTuple):
    """A journal as it was read.

    Attributes:
        identity: what the entries are about.
        number: random; no other journal has it. It stays when entries are replaced.
        entries: all whole entries, sealed or not.
        sealed: the seal in the head for this file.
        reached: a seal for all whole entries.
        torn: whether more bytes follow: an entry that was cut short, or that is being written.
    """

    identity: str
    number: str
    entries: list[Entry]
    sealed: Seal
    reached: Seal
    torn: bool


class Journal:
    """A journal that is locked and open for appending. If it does not exist, it is created, with mode 0600.

    Attributes:
        number: random; no other journal has it.
        torn: whether a crash cut the last entry short, and nothing was appended since.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self.path, self._identity, self._file = path, identity, -1
        self._head: Head | None = None
        try:
            self._open()
        except RunFolderError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise RunFolderError(
                "VFL-5031",
                f'the ledger "{path}" must be a file that this process may write. {error}. Name another '
                "folder in privacy.ledger.",
            ) from error

    def _open(self) -> None:
        path = self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        _require_version(path)
        head = self._head = Head(path)
        # A crash during `replace` left it before the rename, so the file at `path` is still the journal. The
        # lock on the head is held by now, so no other process is writing it.
        _unfinished(path).unlink(missing_ok=True)
        if not path.exists():
            self._create(head)
        content = _read(path, head.key, head.slots)
        if content.identity != self._identity:
            raise RunFolderError(
                "VFL-5032",
                f'the ledger "{path}" is for other records: it counts {content.identity}. This run has '
                f"{self._identity}. Name another folder in privacy.ledger for this run.",
            )
        self._file = os.open(path, os.O_RDWR)
        self.number, self.torn, self._reached = content.number, content.torn, content.reached
        self._entries = content.entries
        head.use(content.sealed)
        if content.reached != content.sealed:
            os.fdatasync(self._file)  # a seal must never be on disk before its entries
            head.write(content.reached)

    def _create(self, head: Head) -> None:
        """Write a journal without entries. A crash leaves an empty head, and the next process tries again."""
        if not head.is_empty:
            raise _missing(self.path)
        content, seal = _as_bytes(head.key, self._identity, uuid4().hex, ())
        head.write(seal)
        write_atomically(self.path, content, private=True)

    def take_entries(self) -> list[Entry]:
        """Return the entries found when the journal was opened; only once, to free their memory."""
        entries, self._entries = self._entries, []
        return entries

    def append(self, kind: int, payload: bytes) -> int:
        """Append an entry; it is on disk and sealed when this returns. Return its size in bytes.

        Raises:
            RunFolderError: it could not be written. The journal is closed: it may or may not hold the entry.
        """
        before, head = self._reached, self._sealed_by()
        start = _START.pack(kind, len(payload))
        digest = _next(head.key, before.digest, start, payload)
        size = entry_size(payload)
        reached = Seal(before.file, before.entries + 1, before.end + size, digest)
        with self._writing():
            try:
                # At `before.end`, and not at the end of the file: this overwrites a torn entry.
                if os.pwritev(self._file, (start, payload, digest), before.end) < size:
                    raise OSError("the disk is full")
                # A torn entry may have been longer than this one. Its rest would be read as one more entry
                # that a crash cut short, and would be charged to everyone a second time.
                if self.torn:
                    os.ftruncate(self._file, reached.end)
                os.fdatasync(self._file)
            except OSError:
                if not self.torn:  # keep the rest of a torn entry: it has not been charged yet
                    with suppress(OSError):
                        os.ftruncate(self._file, before.end)
                raise
            head.write(reached)
        self._reached, self.torn = reached, False
        return size

    def replace(self, entries: Iterable[Entry]) -> int:
        """Replace all entries by others. Return the new size in bytes.

        Raises:
            RunFolderError: that failed. The journal is closed, and holds either the old entries or the new.
        """
        head, temporary = self._sealed_by(), _unfinished(self.path)
        content, seal = _as_bytes(head.key, self._identity, self.number, entries)
        with self._writing():
            make_private_file(temporary)
            with temporary.open("r+b") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            # From here on the head has a seal for each of the two files, so a crash on either side of the
            # rename leaves a journal that is sealed.
            head.write(seal)
            temporary.replace(self.path)
            sync_folder(self.path.parent)
            # The descriptor still refers to the old file, which has no name any more: appends would be lost.
            new = os.open(self.path, os.O_RDWR)
            os.close(self._file)
            self._file = new
        self._reached = seal
        return seal.end

    def read_entries(self) -> list[Entry]:
        """Return all entries, as they are on disk now."""
        head = self._sealed_by()
        return _read(self.path, head.key, head.slots).entries

    def close(self) -> None:
        """Let other processes use the journal."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._head is not None:
            self._head.close()

    def _sealed_by(self) -> Head:
        if self._head is None or self._file < 0:
            raise RunFolderError(
                "VFL-5033",
                f'the ledger "{self.path}" is closed, so nothing can be uploaded. Restart the client.',
            )
        return self._head

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Close the journal if a write fails: after a failed sync, the content on disk is unknown."""
        try:
            yield
        except OSError as error:
            self.close()
            raise RunFolderError(
                "VFL-5034",
                f'the ledger "{self.path}" cannot be written, so nothing can be uploaded: {error}. Fix that, '
                "then restart the client.",
            ) from error


def read_journal(path: Path) -> Content:
    """Read a journal that another process may be appending to; at least all sealed entries are returned.

    Raises:
        RunFolderError: it is not a journal of this version.
        LedgerError: it is damaged or was rolled back, or its head is missing.
    """
    if not has_journal(path):
        raise RunFolderError("VFL-5035", f'"{path}" must be a privacy ledger. There is no such file.')
    _require_version(path)
    before: set[bytes] = set()
    while True:
        key, slots = read_head(path)
        try:
            return _read(path, key, slots)
        except LedgerError:
            # The journal may have been replaced after its head was read: then the head names another file.
            now = {seal.file for seal in slots if seal is not None}
            if now == before:
                raise
            before = now


def write_journal(path: Path, identity: str, entries: Iterable[Entry]) -> None:
    """Write a journal with these entries and its head, in place of any that exists."""
    key = new_key()
    content, seal = _as_bytes(key, identity, uuid4().hex, entries)
    write_head(path, key, seal)
    write_atomically(path, content, private=True)


def entry_size(payload: Payload) -> int:
    """Return the bytes that an entry takes up in the file."""
    return _START.size + len(payload) + DIGEST


def has_journal(path: Path) -> bool:
    """Return whether the journal or its head exists."""
    return path.is_file() or head_path(path).is_file()


def _unfinished(path: Path) -> Path:
    """Return the name under which the journal's replacement is written."""
    return path.with_name(f"{path.name}.new")


def _next(key: bytes, digest: bytes, *entry: Payload) -> bytes:
    return keyed_digest(key, b"entry", digest, *entry)


def _as_bytes(key: bytes, identity: str, number: str, entries: Iterable[Entry]) -> tuple[bytes, Seal]:
    """Return the content of a new file, and its seal."""
    file = secrets.token_bytes(DIGEST)
    facts = {
        "format": _FORMAT,
        "version": _VERSION,
        "identity": identity,
        "number": number,
        "file": file.hex(),
    }
    header = json.dumps(facts).encode() + b"\n"
    parts: list[Payload] = [header]
    digest, count = keyed_digest(key, b"header", header), 0
    for kind, payload in entries:
        start = _START.pack(kind, len(payload))
        digest = _next(key, digest, start, payload)
        parts += (start, payload, digest)
        count += 1
    content = b"".join(parts)
    return content, Seal(file, count, len(content), digest)


def _facts(path: Path, content: bytes) -> tuple[dict[str, Any], int]:
    """Return what the header line says, and where the entries begin.

    Raises:
        RunFolderError: this is not a ledger of this version.
    """
    size = content.find(b"\n", 0, _LONGEST_HEADER) + 1
    try:
        facts, _ = json.JSONDecoder().raw_decode(content[:size].decode())
        if facts["format"] != _FORMAT:
            raise ValueError(f"its format is {facts['format']!r}")
        version = facts["version"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RunFolderError(
            "VFL-5036",
            f'"{path}" must be a privacy ledger. Its first line is not the header of one: {error}.',
        ) from error
    if version != _VERSION:
        raise RunFolderError(
            "VFL-5037",
            f'"{path}" is a privacy ledger of version {version}. This vafl reads version {_VERSION}. Keep '
            "the file, name another folder in privacy.ledger, and lower privacy.mu_max^2 by the largest mu^2 "
            "that the vafl that wrote it shows.",
        )
    return facts, size


def _require_version(path: Path) -> None:
    """Raise RunFolderError if there is a file that is not a ledger of this version.

    Its head would be missing or another one, which would be a confusing complaint.
    """
    if path.exists():
        with path.open("rb") as file:
            _facts(path, file.read(_LONGEST_HEADER))


def _missing(path: Path) -> LedgerError:
    return LedgerError(
        "VFL-5038",
        f'a ledger and its head belong together. Found "{head_path(path)}" without "{path}". Restore the '
        "newest copy of the ledger. If it is lost, move the head away to start a new one, and lower "
        "privacy.mu_max for what the old one may have spent.",
    )


def _read(path: Path, key: bytes, slots: Slots) -> Content:
    """Read a journal, and check it against the seals in its head."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise _missing(path) from None
    facts, start = _facts(path, content)
    named = facts.get("file")
    # During `replace` the two seals are for two files; otherwise both may be for this one.
    seals = [seal for seal in slots if seal is not None and seal.file.hex() == named]
    if not seals:
        raise LedgerError(
            "VFL-5039",
            f'the ledger "{path}" was rolled back or belongs to another head: "{head_path(path)}" seals '
            "another file. Restore the newest copy of both.",
        )
    sealed = max(seals, key=lambda seal: seal.entries)
    entries: list[Entry] = []
    chain = [(start, keyed_digest(key, b"header", content[:start]))]
    for kind, payload, end, digest in _whole_entries(memoryview(content), *chain[0], key):
        entries.append((kind, payload))
        chain.append((end, digest))
    end, digest = chain[-1]
    # The chain must pass through the sealed point. It may go on beyond it, by the entry that a crash left
    # written and not sealed. It may not end before it: then sealed entries are missing or damaged.
    if chain[sealed.entries : sealed.entries + 1] != [(sealed.end, sealed.digest)]:
        raise LedgerError(
            "VFL-5040",
            f'the ledger "{path}" is damaged or was rolled back: its head seals {sealed.entries:,} entries '
            f"in {sealed.end:,} bytes. Found {len(content):,} bytes, intact up to byte {end:,}. Restore the "
            f'newest copy of it and of "{head_path(path)}". If there is none, move both away to start a new '
            "ledger, and lower privacy.mu_max for what this one may have spent.",
        )
    reached = Seal(sealed.file, len(entries), end, digest)
    return Content(facts["identity"], facts["number"], entries, sealed, reached, end < len(content))


def _whole_entries(
    content: memoryview, place: int, digest: bytes, key: bytes
) -> Iterator[tuple[int, memoryview, int, bytes]]:
    """Yield (kind, payload, end, digest) of each entry up to the first that does not continue the chain."""
    while len(content) - place >= _START.size + DIGEST:
        kind, length = _START.unpack_from(content, place)
        begin, end = place + _START.size, place + _START.size + length
        if end + DIGEST > len(content):
            return  # cut short by a crash, or a damaged length
        digest = _next(key, digest, content[place:end])
        place = end + DIGEST
        if content[end:place] != digest:
            return
        yield kind, content[begin:end], place, digest
