"""The head of a ledger: the key of its hash chain, and a seal on how far that chain goes.

A ledger alone cannot show that its last entries are missing. So a small file beside it, `NAME.ledger.head`,
seals how many entries the ledger has and the digest of its chain. The chain's key is in the head too: without
it, entries cannot be forged. The head is never replaced, so a lock on it is also the lock of the ledger.

    page 0   what this file is, and the key
    page 1   a seal       the two are written in turn: a write that a crash interrupts
    page 2   a seal       damages one of them and leaves the other

Each seal names the ledger file it belongs to. While a ledger is replaced by a shorter one (see `Journal`),
one seal is for the old file and the other for the new file, so that either may be found after a crash.
"""

import fcntl
import hashlib
import os
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path

from vafl.errors import LedgerError, RunFolderError
from vafl.files import write_atomically, write_once

DIGEST = 16  # bytes
_KEY = 32  # bytes
_PAGE = 4096  # bytes: no disk has larger sectors, so writing one page cannot damage another
_MAGIC = b"vafl ledger head 3\n"
_SEAL = struct.Struct(f"<{DIGEST}sQQ{DIGEST}s")


@dataclass(frozen=True)
class Seal:
    """How far a ledger's chain goes.

    Attributes:
        file: random id of the ledger file.
        entries: how many entries it has.
        end: the byte where the last one ends.
        digest: the chain's digest there.
    """

    file: bytes
    entries: int
    end: int
    digest: bytes


Slots = list[Seal | None]  # two; None where a page holds no intact seal
_NO_FILE = Seal(bytes(DIGEST), 0, 0, bytes(DIGEST))  # in a head whose ledger is not written yet


def keyed_digest(key: bytes, purpose: bytes, *parts: bytes | memoryview) -> bytes:
    """Return a keyed BLAKE2b digest; one made for another purpose never matches it."""
    digest = hashlib.blake2b(key=key, digest_size=DIGEST, person=purpose)
    for part in parts:
        digest.update(part)
    return digest.digest()


def new_key() -> bytes:
    """Return a random key for a ledger's chain."""
    return secrets.token_bytes(_KEY)


def head_path(ledger: Path) -> Path:
    """Return where the head of this ledger is."""
    return ledger.with_name(f"{ledger.name}.head")


def read_head(ledger: Path) -> tuple[bytes, Slots]:
    """Return the key and the two slots, at least one of them intact.

    Raises:
        LedgerError: the head is missing or damaged.
    """
    path = head_path(ledger)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise LedgerError(
            "VFL-5061",
            f'a ledger needs its head file, which proves that the ledger is complete. Found "{ledger}" '
            f'without "{path}". Restore the head. If it is lost, move the ledger away to start a new one, '
            "and lower privacy.mu_max for what the old one may have spent.",
        ) from None
    key = content[len(_MAGIC) : len(_MAGIC) + _KEY]
    slots = [_unpacked(key, content[page * _PAGE :]) for page in (1, 2)]
    if not content.startswith(_MAGIC) or slots == [None, None]:
        raise LedgerError(
            "VFL-5062",
            f'the head of a ledger must hold an intact seal. "{path}" holds none. Restore the newest copy of '
            f'it and of "{ledger}".',
        )
    return key, slots


def write_head(ledger: Path, key: bytes, seal: Seal) -> None:
    """Write a head with this seal, in place of any that exists."""
    write_atomically(head_path(ledger), _as_bytes(key, seal), private=True)


class Head:
    """The head of a ledger, locked: one process at a time may use the two files.

    Args:
        ledger: the ledger's file. If neither it nor its head exists, the head is created.

    Attributes:
        key: the key of the ledger's chain.
        slots: both seals, as they are on disk.

    Raises:
        LedgerError: the head is missing or damaged.
        RunFolderError: another process uses this ledger.
    """

    def __init__(self, ledger: Path) -> None:
        path, self._file = head_path(ledger), -1
        # Look for the ledger first. Another process that creates both creates the head before the ledger.
        if not ledger.exists() and not path.exists():
            write_once(path, _as_bytes(new_key(), _NO_FILE), private=True)
        read_head(ledger)  # raises if it is missing
        self._file = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.key, self.slots = read_head(ledger)  # again: the last owner of the lock may have written it
        except BlockingIOError:
            self.close()
            raise RunFolderError(
                "VFL-5063",
                f'the ledger "{ledger}" is in use by another process: two runs may not spend one budget '
                "at the same time. Wait until it ends.",
            ) from None
        except BaseException:
            self.close()
            raise
        self._current = 0 if self.slots[0] is not None else 1

    @property
    def is_empty(self) -> bool:
        """Return whether no entry was ever sealed, so that a missing ledger file has lost nothing."""
        return not any(seal.entries for seal in self.slots if seal is not None)

    def use(self, seal: Seal) -> None:
        """Keep this one of the two seals when the next one is written."""
        self._current = self.slots.index(seal)

    def write(self, seal: Seal) -> None:
        """Write a seal in place of the one not in use, and use it; it is on disk when this returns."""
        # The page of the current seal is not touched, so a crash in the middle of this write leaves one seal.
        slot = 1 - self._current
        os.pwrite(self._file, _packed(self.key, seal), (slot + 1) * _PAGE)
        os.fdatasync(self._file)
        self.slots[slot], self._current = seal, slot

    def close(self) -> None:
        """Release the lock."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _packed(key: bytes, seal: Seal) -> bytes:
    content = _SEAL.pack(seal.file, seal.entries, seal.end, seal.digest)
    return content + keyed_digest(key, b"seal", content)


def _unpacked(key: bytes, content: bytes) -> Seal | None:
    body, digest = content[: _SEAL.size], content[_SEAL.size : _SEAL.size + DIGEST]
    return Seal(*_SEAL.unpack(body)) if digest == keyed_digest(key, b"seal", body) else None


def _as_bytes(key: bytes, seal: Seal) -> bytes:
    pages = (_MAGIC + key, _packed(key, seal), _packed(key, seal))
    return b"".join(page.ljust(_PAGE, b"\0") for page in pages)
