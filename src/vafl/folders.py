"""Lock folders, so that only one process at a time writes to them."""

import fcntl
import os
from pathlib import Path

from vafl.errors import RunFolderError

LOCK = ".lock"  # a file in the folder, locked while the folder is in use and never removed


class HeldFolder:
    """Create a folder if needed, and lock it until `close`.

    The kernel releases the lock when the process ends, even if it is killed. So no stale lock can remain.

    Raises:
        RunFolderError: another process has locked the folder, or it cannot be written.
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
                f'only one process at a time may write to a folder. "{folder}" is in use by another process, '
                "which continues undisturbed. End that process first, or choose another --out.",
            ) from None
        except OSError as error:
            self.close()
            raise RunFolderError(
                "VFL-1042",
                f'"{folder}" must be a folder that this process may write to. Found: {error.strerror}. '
                "Choose another --out.",
            ) from error

    def close(self) -> None:
        """Release the lock. Closing twice does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "HeldFolder":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
