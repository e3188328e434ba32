"""The ledger: what has been spent on every record of one party, durable before anything leaves.

A ledger is one file to which charges are appended: a first line that says whose it is, then entries, each
with checksums. A charge is on disk before it counts as made, so a crash at any instant leaves a ledger
that shows at least what was sent; an entry cut short by a crash paid for nothing that left. Now and
then all entries are replaced by their balance. A lock keeps two processes from spending one budget.
"""

import fcntl
import json
import math
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from vafl.errors import BudgetExhausted, RunFolderError
from vafl.files import sync_folder, write_atomically

Kind = Literal["batch", "refresh", "request", "evaluation", "prediction", "release"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Records = npt.NDArray[np.int64]

_FORMAT, _VERSION = "vafl ledger", 1
_ENTRY = struct.Struct("<BBxxId")  # kind, whether it trains, bytes that follow, cost
_CHECKSUMS = struct.Struct("<II")  # of that, and of the bytes that follow
_SUMMARY = struct.Struct("<QI")  # a balance begins with: vectors in all, the first line's checksum
_START = _ENTRY.size + _CHECKSUMS.size
_BALANCE = 255  # the kind of an entry that sums up all before it
_LONGEST = 64 << 20  # bytes of entries before they are replaced by their balance


class Ledger:
    """The account of every record.

    Args:
        path: the file, made if it is not there; None keeps the account in memory only.
        records: how many there are.
        identity: tells one set of records from another; a ledger is for one set only.

    Attributes:
        spent: [records], the sum of mu^2.
        counts: [kinds, records], uploads by kind.
        first_use: [records], how many vectors had been uploaded in all when a local update first used
            the record; 0 if none did. The valid bound for `embed_only` rests on it.
        vectors: how many vectors were uploaded in all.
    """

    def __init__(self, path: Path | None, records: int, identity: str) -> None:
        self.path, self.records, self._identity = path, records, identity
        self.spent = np.zeros(records)
        self.counts = np.zeros((len(KINDS), records), dtype=np.uint32)
        self.first_use = np.zeros(records, dtype=np.uint64)
        self.vectors = 0
        self._file: int | None = None
        self._entries = 0
        if path is not None:
            self._open(path)

    def charge(
        self,
        records: Records,
        kind: Kind,
        cost: float,
        *,
        limit: float = math.inf,
        whole: bool = False,
        trains: bool = False,
    ) -> npt.NDArray[np.bool_]:
        """Charges an upload of distinct records, durably.

        Args:
            cost: mu^2 for each of them.
            limit: the largest mu any record may have spent.
            whole: charge all of them or none.
            trains: a local update will use them.

        Returns:
            [records], which ones were charged: only those may be uploaded.
        """
        affordable: npt.NDArray[np.bool_] = self.spent.take(records) + cost <= limit**2 * (1 + 1e-12)
        if not affordable.all():
            if whole:
                affordable[:] = False
            records = records[affordable]
        if len(records):
            number = KINDS.index(kind)
            if self._file is not None:
                self._append(self._file, number, trains, cost, records.astype("<u4").tobytes())
            self._book(number, trains, cost, records)
            if self._entries > max(_LONGEST, 4 * self.spent.nbytes * len(KINDS)):
                self._replace_by_balance()
        return affordable

    def require(self, records: Records, kind: Kind, cost: float, limit: float) -> None:
        """Charges all of these records, or raises BudgetExhausted and charges none."""
        if not self.charge(records, kind, cost, limit=limit, whole=True).all():
            spent = math.sqrt(float(self.spent[records].max()))
            raise BudgetExhausted(
                f"privacy.mu_max = {limit:g} does not allow this {kind}: it costs mu {math.sqrt(cost):.4g}, "
                f"and up to {spent:.4g} are spent already. Raise mu_max, or add noise."
            )

    def save_copy(self, path: Path) -> None:
        """Writes the account as it stands into another file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, self._whole())

    def close(self) -> None:
        """Lets others use the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _book(self, kind: int, trains: bool, cost: float, records: Records) -> None:
        self.spent[records] += cost
        self.counts[kind][records] += 1
        self.vectors += len(records)
        if trains:
            first = self.first_use[records]
            if not first.all():
                self.first_use[records[first == 0]] = self.vectors

    # --- the file ---

    def _append(self, file: int, kind: int, trains: bool, cost: float, payload: bytes) -> None:
        """On disk when this returns; nothing was charged if it raises."""
        entry = _entry(kind, trains, cost, payload)
        try:
            written = os.write(file, entry)
            if written < len(entry):
                os.ftruncate(file, os.fstat(file).st_size - written)
                raise OSError("the disk is full")
            os.fdatasync(file)
        except OSError as error:
            raise RunFolderError(
                f'the ledger "{self.path}" cannot be written, so nothing may be uploaded: {error}.'
            ) from error
        self._entries += len(entry)

    def _whole(self) -> bytes:
        """A file that says the same in one entry."""
        facts = {
            "format": _FORMAT,
            "version": _VERSION,
            "records": self.records,
            "identity": self._identity,
        }
        line = json.dumps(facts).encode() + b"\n"
        arrays = (self.spent.astype("<f8"), self.first_use.astype("<u8"), self.counts.astype("<u4"))
        balance = [_SUMMARY.pack(self.vectors, zlib.crc32(line)), *(array.tobytes() for array in arrays)]
        return line + _entry(_BALANCE, False, 0.0, b"".join(balance))

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            self._create(path)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end = self._replay(path)
        except BlockingIOError:
            self.close()
            raise RunFolderError(
                f'the ledger "{path}" is in use by another process: two runs may not spend one budget. '
                "Wait until it ends."
            ) from None
        except RunFolderError:
            self.close()
            raise
        os.ftruncate(self._file, end)  # an entry cut short by a crash paid for nothing

    def _create(self, path: Path) -> None:
        """Whole or not at all, and never over a ledger made meanwhile."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
        write_atomically(temporary, self._whole())
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
        sync_folder(path.parent)

    def _replace_by_balance(self) -> None:
        """The new file is locked before it takes the old one's place."""
        if self.path is None or self._file is None:
            return
        temporary = self.path.with_name(f"{self.path.name}.part")
        new = os.open(temporary, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o666)
        fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with os.fdopen(os.dup(new), "wb") as file:
            file.write(self._whole())
            file.flush()
            os.fsync(new)
        temporary.replace(self.path)
        sync_folder(self.path.parent)
        os.close(self._file)
        self._file, self._entries = new, 0

    def _replay(self, path: Path) -> int:
        """Books all that the file says; gives where its last whole entry ends."""
        content = path.read_bytes()
        facts, start = _header(path, content)
        for name, value in (("records", self.records), ("identity", self._identity)):
            if facts.get(name) != value:
                raise RunFolderError(
                    f'the ledger "{path}" is for other records: its {name} is {facts.get(name)}, here it is '
                    f"{value}. Name another folder in privacy.ledger for another data set."
                )
        entries = _entries(path, content, start)
        balance = next(entries, None)
        if balance is None or not self._take_balance(balance[3], content[:start]):
            raise _damaged(path, start)
        end = first = balance[4]
        for kind, trains, cost, payload, after in entries:
            self._book(kind, trains, cost, np.frombuffer(payload, "<u4").astype(np.int64))
            end = after
        self._entries = end - first
        return end

    def _take_balance(self, payload: bytes, first_line: bytes) -> bool:
        """Takes the first entry over, if it is one that fits."""
        size = self.records
        if len(payload) != _SUMMARY.size + size * (16 + 4 * len(KINDS)):
            return False
        self.vectors, checksum = _SUMMARY.unpack_from(payload)
        self.spent[:] = np.frombuffer(payload, "<f8", size, _SUMMARY.size)
        self.first_use[:] = np.frombuffer(payload, "<u8", size, _SUMMARY.size + 8 * size)
        counts = np.frombuffer(payload, "<u4", size * len(KINDS), _SUMMARY.size + 16 * size)
        self.counts[:] = counts.reshape(-1, size)
        return bool(checksum == zlib.crc32(first_line))


def read_ledger(path: Path) -> Ledger:
    """A ledger as it stands, for reports; a run may be using it."""
    try:
        facts, _ = _header(path, path.read_bytes())
    except OSError as error:
        raise RunFolderError(f'"{path}" must be a privacy ledger. {error}.') from error
    ledger = Ledger(None, int(facts["records"]), str(facts["identity"]))
    ledger._replay(path)
    return ledger


def _entry(kind: int, trains: bool, cost: float, payload: bytes) -> bytes:
    start = _ENTRY.pack(kind, trains, len(payload), cost)
    return start + _CHECKSUMS.pack(zlib.crc32(start), zlib.crc32(payload)) + payload


def _header(path: Path, content: bytes) -> tuple[dict[str, Any], int]:
    """The first line, and where the entries begin."""
    line, newline, _ = content.partition(b"\n")
    try:
        facts = json.loads(line) if newline else {}
    except ValueError:
        facts = {}
    facts = facts if isinstance(facts, dict) else {}
    is_ledger = (facts.get("format"), facts.get("version")) == (_FORMAT, _VERSION)
    if not is_ledger or type(facts.get("records")) is not int or type(facts.get("identity")) is not str:
        raise RunFolderError(
            f'"{path}" must be a privacy ledger of version {_VERSION}. It is something else.'
        )
    return facts, len(line) + 1


def _entries(path: Path, content: bytes, position: int) -> Iterator[tuple[int, bool, float, bytes, int]]:
    """(kind, trains, cost, payload, where it ends) of each whole entry; a crash may have cut the last."""
    while len(content) - position >= _START:
        kind, trains, length, cost = _ENTRY.unpack_from(content, position)
        start_sum, payload_sum = _CHECKSUMS.unpack_from(content, position + _ENTRY.size)
        end = position + _START + length
        payload = content[position + _START : end]
        if zlib.crc32(content[position : position + _ENTRY.size]) != start_sum:
            if any(content[position:]):
                raise _damaged(path, position)
            return
        if len(payload) < length or zlib.crc32(payload) != payload_sum:
            if end < len(content):
                raise _damaged(path, position)
            return
        yield kind, bool(trains), cost, payload, end
        position = end


def _damaged(path: Path, position: int) -> RunFolderError:
    return RunFolderError(
        f'the ledger "{path}" is damaged at byte {position:,}: what was spent is not known any more. Put '
        "back a copy, or count every record of it as spent."
    )
