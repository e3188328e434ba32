"""Write files atomically: after a crash, a file has all of its new content or is unchanged.

A file is first written under a temporary name in the same folder (a draft, NAME.<16 hex digits>.part), synced
to disk, and then renamed or linked to its final name. A crash can leave a draft behind, never half a file.
"""

import ctypes
import errno
import gc
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PUBLIC, _PRIVATE, _PRIVATE_FOLDER = 0o666, 0o600, 0o700  # modes, before the umask
_BLOCK = 512  # bytes; the unit of st_blocks
_DRAFT = re.compile(r"(.+)\.[0-9a-f]{16}\.part")


def write_atomically(path: Path, content: bytes, *, private: bool = False, durable: bool = True) -> None:
    """Replace a file's content. At any time, the file has either its old or its new content.

    Args:
        path: the file, which need not exist.
        content: the new content.
        private: create it readable by its owner only.
        durable: wait until the content is on disk, so that it survives a crash of the machine. This is slow.
    """
    with _draft(path, content, _PRIVATE if private else _PUBLIC, durable=durable) as draft:
        draft.replace(path)
    if durable:
        sync_folder(path.parent)


def write_once(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file like `write_atomically`, unless it exists or another process creates it first."""
    with _draft(path, content, _PRIVATE if private else _PUBLIC) as draft, suppress(FileExistsError):
        path.hardlink_to(draft)  # unlike a rename, this fails if the name is taken
    sync_folder(path.parent)


@contextmanager
def _draft(path: Path, content: bytes, mode: int, *, durable: bool = True) -> Iterator[Path]:
    """Write the content under a random name in the folder of `path`; remove that file afterwards."""
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
    """Return the final name of a draft; `name` itself if it is not the name of a draft."""
    draft = _DRAFT.fullmatch(name)
    return draft[1] if draft else name


def remove_drafts(folder: Path) -> None:
    """Remove drafts that crashes have left in a folder. No other process may be writing to it."""
    for entry in folder.rglob("*.part"):
        if drafted(entry.name) != entry.name:
            entry.unlink()


def make_private_folder(folder: Path) -> None:
    """Create a folder that only its owner may read, or make an existing one so."""
    folder.mkdir(_PRIVATE_FOLDER, parents=True, exist_ok=True)
    folder.chmod(_PRIVATE_FOLDER)


def make_private_file(path: Path) -> None:
    """Create an empty file that only its owner may read, in place of any existing file."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE))


def reserve(path: Path, size: int) -> None:
    """Reserve disk space for all `size` bytes of a file, which may have holes or be shorter.

    Without this, the kernel kills a process (SIGBUS) that writes to a mapped file when the disk is full.

    Raises:
        OSError: there is not enough space. The file is unchanged.
    """
    number = os.open(path, os.O_WRONLY)
    try:
        # Check before allocating: an allocation that fails halfway fills the disk for a moment, and other
        # processes fail then.
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
    """Sync a folder's entries to disk, so that new and renamed files in it survive a crash."""
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
