"""Files that are whole, on disk, or not there at all."""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """The file is the old one or the new one, on disk, whatever happens meanwhile.

    Args:
        private: its owner alone may read it.
    """
    temporary = path.with_name(path.name + ".part")
    with temporary.open("wb") as file:
        if private:
            os.fchmod(file.fileno(), 0o600)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes new and renamed files of a folder survive a crash."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
