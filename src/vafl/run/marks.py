"""The file in which a server stores the last mark of each client's privacy ledger."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from vafl.config import Config
from vafl.errors import RunFolderError
from vafl.files import make_private_folder, write_atomically
from vafl.protocol.messages import MARK_BYTES, LedgerMark
from vafl.run.agreement import STATE
from vafl.run.ledgers import ledger_path
from vafl.transport.identity import SERVER

log = logging.getLogger("vafl.server")

_FORMAT = "vafl ledger marks 1"


def marks_path(config: Config, run: Path) -> Path:
    """Return the path of the server's file of marks.

    It is next to the place of the server's ledger, so that marks survive a run whenever the clients' ledgers
    do. Without the parties' own data and without privacy.ledger, marks and ledgers belong to one run folder.
    """
    if config.privacy.ledger or SERVER in config.sources:
        return ledger_path(config, SERVER, run).with_suffix(".marks")
    return run / STATE / f"{SERVER}.marks"


class MarkFile:
    """Stores marks in a file, by client name.

    Servers of several runs may share the file, and each reads it again before it writes. If two servers write
    at the same time, one mark may be lost. The file then holds an older mark of that client, which is safe:
    the client's ledger still contains it. If the file cannot be written, the server logs a warning and keeps
    the marks in memory.

    Args:
        path: the file, which is created when the first mark arrives.
        parties: the clients' names, in the order of their numbers.
    """

    def __init__(self, path: Path, parties: Sequence[str]) -> None:
        self._path, self._parties = path, list(parties)
        self._unwritten: dict[str, bytes] = {}
        self._read()  # report a damaged file before any client joins

    def recall(self, client: int) -> bytes:
        """Return the last mark of this client; empty if there is none."""
        return (self._read() | self._unwritten).get(self._parties[client], b"")

    def remember(self, message: LedgerMark) -> None:
        """Replace the mark of this client. It is on disk when this returns, if the file is writable."""
        warned = bool(self._unwritten)
        self._unwritten[self._parties[message.client]] = message.mark
        marks = self._read() | self._unwritten
        content = {"format": _FORMAT, "marks": {party: mark.hex() for party, mark in marks.items()}}
        try:
            if not self._path.parent.exists():
                make_private_folder(self._path.parent)
            write_atomically(self._path, json.dumps(content, indent=2).encode() + b"\n", private=True)
        except OSError as error:
            if not warned:
                log.warning(
                    'cannot write "%s": %s. After a restart, this server cannot detect ledgers that were '
                    "rolled back. Set privacy.ledger to a writable folder.",
                    self._path,
                    error.strerror or error,
                )
        else:
            self._unwritten.clear()

    def _read(self) -> dict[str, bytes]:
        try:
            content = json.loads(self._path.read_bytes())
            if content["format"] != _FORMAT:
                raise ValueError(f"its format is {content['format']!r}")
            marks = {str(party): bytes.fromhex(mark) for party, mark in content["marks"].items()}
            if any(len(mark) != MARK_BYTES for mark in marks.values()):
                raise ValueError(f"a mark must have {MARK_BYTES} bytes")
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RunFolderError(
                "VFL-7121",
                f'"{self._path}" must hold the last mark of each client\'s privacy ledger. It is damaged: '
                f"{error}. Restore it from a backup. If you delete it instead, this server cannot detect "
                "ledgers that were rolled back before now.",
            ) from error
        return marks
