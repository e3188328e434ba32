"""Files that are whole, on disk, or not there at all."""

import ctypes
import errno
import gc
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PUBLIC, _PRIVATE, _PRIVATE_FOLDER = 0o666, 0o600, 0o700  # of which the umask takes away
_BLOCK = 512  # bytes, of st_blocks
_DRAFT = re.compile(r"(.+)\.[0-9a-f]{16}\.part")


def write_atomically(path: Path, content: bytes, *, private: bool = False, durable: bool = True) -> None:
    """The file is the old one or the new one, on disk, whatever happens meanwhile.

    Args:
        private: its owner alone may read it, from its first moment.
        durable: it is there after the machine has crashed, too; waiting for the disk takes its time.
    """
    with _draft(path, content, _PRIVATE if private else _PUBLIC, durable=durable) as draft:
        draft.replace(path)
    if durable:
        sync_folder(path.parent)


def write_once(path: Path, content: bytes, *, private: bool = False) -> None:
    """As `write_atomically`, but never in the place of a file that is there, made this very moment or not."""
    with _draft(path, content, _PRIVATE if private else _PUBLIC) as draft, suppress(FileExistsError):
        path.hardlink_to(draft)  # unlike a rename, this fails if the name is taken
    sync_folder(path.parent)


@contextmanager
def _draft(path: Path, content: bytes, mode: int, *, durable: bool = True) -> Iterator[Path]:
    """The content, on disk, under a name that nobody else has; not there any more afterwards."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def drafted(name: str) -> str:
    """The name of the file that `name` was to become, if a crash has left it; `name` itself otherwise."""
    found = _DRAFT.fullmatch(name)
    return found[1] if found else name


def remove_drafts(folder: Path) -> None:
    """Removes what crashes have left half written in a folder that nobody else is writing now."""
    for entry in folder.rglob("*.part"):
        if drafted(entry.name) != entry.name:
            entry.unlink()


def make_private_folder(folder: Path) -> None:
    """A folder that its owner alone may look into, whoever made it."""
    folder.mkdir(_PRIVATE_FOLDER, parents=True, exist_ok=True)
    folder.chmod(_PRIVATE_FOLDER)


def make_private_file(path: Path) -> None:
    """An empty file, in the place of whatever is there, that its owner alone may read."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE))


def reserve(path: Path, size: int) -> None:
    """Has the disk keep room for all `size` bytes of a file, which may have holes or be shorter: whoever
    writes to mapped memory that has no room on the disk is killed. Where there is not enough, none is taken:
    a disk that is full for a moment fails others."""
    number = os.open(path, os.O_WRONLY)
    try:
        file, disk = os.fstat(number), os.fstatvfs(number)
        if size - file.st_blocks * _BLOCK > disk.f_bavail * disk.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            os.posix_fallocate(number, 0, size)
        except OSError:
            os.ftruncate(number, file.st_size)
            raise
    finally:
        os.close(number)


def sync_folder(folder: Path) -> None:
    """Makes new and renamed files of a folder survive a crash."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def return_freed_memory() -> None:
    """Return memory that was freed to the operating system, where the C library can.

    glibc keeps freed blocks for later. After a table of 10^6 rows was read, these are about 180 MB that a
    process would hold until it ends.
    """
    gc.collect()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
