"""Folders that one process at a time may write."""

import fcntl
import os
from pathlib import Path

from vafl.errors import RunFolderError

LOCK = ".lock"  # in the folder; it stays there, and is locked while the folder is in use


class HeldFolder:
    """A folder, made if it is not there, that others who ask for it are kept out of until this one is closed
    or its process has ended, however it ends.

    Raises:
        RunFolderError: another process has it, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._file = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise RunFolderError(
                "VFL-1041",
                f'a folder is written by one process at a time. "{folder}" is in use by another, which goes '
                "on undisturbed. End that one first, or name another --out.",
            ) from None
        except OSError as error:
            self.close()
            raise RunFolderError(
                "VFL-1042",
                f'"{folder}" must be a folder that this process may write. Found: {error.strerror}. Name '
                "another --out.",
            ) from error

    def close(self) -> None:
        """Lets others have it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "HeldFolder":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
