"""Files and folders that only their owner may read, made so from their first moment."""

import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from vafl.errors import ConfigError

PRIVATE = 0o600
PUBLIC = 0o644
_FOLDER = 0o700
_OTHERS = 0o077
_REMEDY = "Make the files with `vafl certs`, or get them from the party that does."


def make_private_folder(path: Path) -> None:
    """Makes the folder with mode 0700 whatever the umask; one that exists must have that mode."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=_FOLDER)
        path.chmod(_FOLDER)  # the umask may have taken bits from the owner
    except OSError as error:
        if not path.is_dir():
            raise ConfigError(
                "VFL-6171",
                f'"{path}" must be a folder that can be made. Found: {error.strerror}. Name another.',
            ) from None
        _require_private_folder(path)


def _require_private_folder(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _OTHERS:
        raise ConfigError(
            "VFL-6172",
            f'"{path}" must be its owner\'s alone (mode 0700), for private keys go there. '
            f"Found mode {mode:04o}. Run: chmod 700 {path}, or name a folder that does not exist yet.",
        )


def refuse_taken(paths: Iterable[Path]) -> None:
    """Raises ConfigError if any of the files exists."""
    for path in paths:
        if os.path.lexists(path):
            raise _taken(path)


def _taken(path: Path) -> ConfigError:
    return ConfigError(
        "VFL-6173",
        f'"{path}" exists and is left as it is. Say so if it is to be replaced (--overwrite), or name '
        "another folder.",
    )


def write(path: Path, content: bytes, mode: int, *, overwrite: bool = False) -> None:
    """Writes a whole file or none; no other user can read a private one at any moment.

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
            f'"{path}" must be a file that can be written. Found: {error.strerror}. Name another folder.',
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def _write_through(path: Path, content: bytes, mode: int) -> None:
    """Born with mode 0600 or less and under a name nobody else knows; opened up, if at all, later."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def read(path: Path, *, private: bool = False, remedy: str = _REMEDY) -> bytes:
    """Read a file.

    Args:
        private: Refuse the file if anyone but its owner could have read it.
        remedy: What to do if it cannot be read.
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
            f'"{path}" must be readable by its owner only. Found mode {mode:04o}. Run: chmod 600 {path}; if '
            "others may have read it, replace it by a new one (`vafl certs --overwrite`, `vafl keys`).",
        )
    return content
