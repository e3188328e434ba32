"""API keys, with which callers of `vafl serve` authenticate.

A key is 256 random bits, shown once when it is made. The file keeps a BLAKE2b digest of each key by name:

    [reports]
    digest = "0f3c..."
    created = "2026-11-18"

A fast hash is enough: slow password hashes make guessing expensive, and 256 random bits cannot be guessed.
For the same reason the digests need no salt: no two keys are alike. The hash is personalised, so that a
digest from another program is never a valid entry.
"""

import hashlib
import hmac
import logging
import os
import secrets
import time
import tomllib
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import tomli_w

from vafl.conversion import make
from vafl.errors import ConfigError
from vafl.names import PARTY
from vafl.transport.identity import files

log = logging.getLogger("vafl.http")

_PREFIX = "vafl_"  # lets people and secret scanners recognise a key
_BYTES = 32
_PERSON = b"vafl api key"
_RECHECK = 1.0  # seconds between two checks of the file for changes
_REMEDY = "Make keys with `vafl keys add FILE NAME`."


@dataclass(frozen=True)
class ApiKey:
    """One entry of a file of keys.

    Attributes:
        digest: BLAKE2b of the key, 64 hex digits.
        created: the day on which the key was made, in UTC.
    """

    digest: str
    created: str

    def __post_init__(self) -> None:
        try:
            size = len(bytes.fromhex(self.digest))
        except ValueError:
            size = 0
        if size != _BYTES:
            raise ConfigError(
                "VFL-6141", f"a key's digest must be {2 * _BYTES} hex digits. Found {self.digest!r}."
            )


def read_keys(path: Path) -> dict[str, ApiKey]:
    """Read a file of keys and return its entries by name.

    Raises:
        ConfigError: The file is missing, readable by other users, or not a file of keys.
    """
    content = files.read(path, private=True, remedy=_REMEDY)
    try:
        document = tomllib.loads(content.decode())
        return {_check_name(name): make(ApiKey, entry, name) for name, entry in document.items()}
    except (ValueError, RecursionError) as error:
        raise ConfigError("VFL-6142", f'"{path}" must be a file of API keys. {error} {_REMEDY}') from error


def add_key(path: Path, name: str) -> str:
    """Make a key under a new name and return it. Only its digest is stored, so it cannot be shown again."""
    _check_name(name)
    keys = read_keys(path) if path.exists() else {}
    if name in keys:
        raise ConfigError(
            "VFL-6143",
            f'every key must have its own name. "{path}" already has a key "{name}". Choose another name, or '
            f"remove that key first: vafl keys remove {path} {name}",
        )
    key = _PREFIX + secrets.token_urlsafe(_BYTES)
    _write(path, {**keys, name: ApiKey(_digest(key).hex(), f"{datetime.now(UTC):%Y-%m-%d}")})
    return key


def remove_key(path: Path, name: str) -> None:
    """Remove a key. A running server refuses it within a second."""
    keys = read_keys(path)
    if name not in keys:
        raise ConfigError("VFL-6144", f'"{path}" has no key "{name}". Its keys: {", ".join(keys) or "none"}.')
    del keys[name]
    _write(path, keys)


class Callers:
    """Recognise callers by the keys in a file, and reload the file when it changes.

    Raises:
        ConfigError: The file cannot be used, or has no key.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._file_stamp()
        self._digests = self._load()
        if not self._digests:
            raise ConfigError("VFL-6145", f'"{path}" must have at least one key. Found none. {_REMEDY}')
        self._checked = time.monotonic()

    def name_of(self, key: str) -> str | None:
        """Return the name under which the file has this key; None if it does not have it."""
        self._refresh()
        digest, match = _digest(key), None
        for name, known in self._digests:
            # Compare in constant time and with every key, so that the duration reveals nothing about them.
            if hmac.compare_digest(digest, known):
                match = name
        return match

    def _refresh(self) -> None:
        if time.monotonic() - self._checked < _RECHECK:
            return
        self._checked, stamp = time.monotonic(), self._file_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._digests = self._load()
        except ConfigError as error:
            log.error("cannot reload the API keys, so the previous ones stay valid: %s", error)

    def _load(self) -> list[tuple[str, bytes]]:
        keys = read_keys(self._path)
        log.info('callers with a key in "%s": %s', self._path, ", ".join(keys) or "none")
        return [(name, bytes.fromhex(key.digest)) for name, key in keys.items()]

    def _file_stamp(self) -> tuple[int, int, int] | None:
        """Return values that change whenever the file is replaced or edited; None if it cannot be read."""
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def _digest(key: str) -> bytes:
    content = key.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(content, digest_size=_BYTES, person=_PERSON).digest()


def _check_name(name: str) -> str:
    if not PARTY.fullmatch(name):
        raise ConfigError(
            "VFL-6146",
            "a key's name must be 1 to 63 letters, digits, '.', '_' or '-', a letter or digit first. "
            f"Found {name!r}. Choose another name.",
        )
    return name


def _write(path: Path, keys: dict[str, ApiKey]) -> None:
    content = tomli_w.dumps({name: asdict(key) for name, key in keys.items()}).encode()
    files.write(path, content, files.PRIVATE, overwrite=True)
