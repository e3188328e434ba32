"""Read and write key and certificate files. Private ones are never readable by other users."""

import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from vafl.errors import ConfigError

PRIVATE = 0o600
PUBLIC = 0o644
_FOLDER = 0o700
_OTHERS = 0o077  # any permission of the group and of other users
_REMEDY = "Make the files with `vafl certs`, or get them from the party that runs it."


def make_private_folder(path: Path) -> None:
    """Create a folder with mode 0700, whatever the umask; an existing one must be private already.

    Raises:
        ConfigError: The folder cannot be created, or other users may access it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=_FOLDER)
        path.chmod(_FOLDER)  # the umask may have removed permissions of the owner
    except OSError as error:
        if not path.is_dir():
            raise ConfigError(
                "VFL-6171",
                f'"{path}" must be a folder that can be created. Found: {error.strerror}. Choose another '
                "folder.",
            ) from None
        _require_private_folder(path)


def _require_private_folder(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _OTHERS:
        raise ConfigError(
            "VFL-6172",
            f'"{path}" must be accessible to its owner only (mode 0700), because it will hold private keys. '
            f"Found mode {mode:04o}. Run: chmod 700 {path}, or choose a folder that does not exist yet.",
        )


def refuse_taken(paths: Iterable[Path]) -> None:
    """Raise ConfigError if any of the files exists."""
    for path in paths:
        if os.path.lexists(path):
            raise _taken(path)


def _taken(path: Path) -> ConfigError:
    return ConfigError(
        "VFL-6173",
        f'"{path}" exists and is left as it is. Add --overwrite to replace it, or choose another folder.',
    )


def write(path: Path, content: bytes, mode: int, *, overwrite: bool = False) -> None:
    """Write a file atomically. Other users cannot read a private one at any time.

    Raises:
        ConfigError: The file exists and `overwrite` is false, or the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        _write_through(temporary, content, mode)
        if overwrite:
            temporary.replace(path)
        else:
            path.hardlink_to(temporary)  # unlike a rename, this fails if the name is taken
    except FileExistsError:
        raise _taken(path) from None
    except OSError as error:
        raise ConfigError(
            "VFL-6174",
            f'"{path}" must be a file that can be written. Found: {error.strerror}. Choose another folder.',
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def _write_through(path: Path, content: bytes, mode: int) -> None:
    """Write a new file and sync it to disk. It is created private, and gets its mode before any content."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def read(path: Path, *, private: bool = False, remedy: str = _REMEDY) -> bytes:
    """Read a file.

    Args:
        path: The file.
        private: Refuse the file if other users may access it.
        remedy: The end of the error message if the file cannot be read.

    Raises:
        ConfigError: The file cannot be read, or `private` is set and other users may access it.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read()
    except OSError as error:
        raise ConfigError(
            "VFL-6175", f'"{path}" must be a file this user can read. Found: {error.strerror}. {remedy}'
        ) from None
    if private and mode & _OTHERS:
        raise ConfigError(
            "VFL-6176",
            f'"{path}" must be readable by its owner only. Found mode {mode:04o}. Run: chmod 600 {path}. If '
            "other users may have read it, make a new one (`vafl certs --overwrite`, `vafl keys`).",
        )
    return content
