"""The ledger: what has been spent on every record of one party, durable before anything leaves.

A file holds, for each record, the sum of mu^2 it has cost so far and how often it was uploaded, by kind.
It is mapped into memory; a charge is made in place and flushed to the disk before it counts as made. All
entries only ever grow, each by a single aligned store, so a crash at any instant leaves a ledger that
shows at least what was sent. A lock keeps two processes from spending the same budget.
"""

import fcntl
import json
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from vafl.errors import BudgetExhausted, RunFolderError
from vafl.files import sync_folder, write_atomically

Kind = Literal["batch", "refresh", "request", "evaluation", "prediction", "release"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Records = npt.NDArray[np.int64]

_FORMAT, _VERSION = "vafl ledger", 1
_HEADER_BYTES = 4096
_VECTORS_AT = _HEADER_BYTES - 8  # how many vectors were uploaded in all


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
    """

    def __init__(self, path: Path | None, records: int, identity: str) -> None:
        self.path, self.records, self._identity = path, records, identity
        size = _HEADER_BYTES + records * (8 + 8 + 4 * len(KINDS))
        self._lock: int | None = None
        if path is None:
            self._memory: mmap.mmap = mmap.mmap(-1, size)
        else:
            self._memory = self._open(path, size, {"records": records, "identity": identity})
        self.spent = np.frombuffer(self._memory, np.float64, records, _HEADER_BYTES)
        self.first_use = np.frombuffer(self._memory, np.uint64, records, _HEADER_BYTES + 8 * records)
        counts = np.frombuffer(self._memory, np.uint32, records * len(KINDS), _HEADER_BYTES + 16 * records)
        self.counts = counts.reshape(len(KINDS), records)
        self._vectors = np.frombuffer(self._memory, np.uint64, 1, _VECTORS_AT)

    @property
    def vectors(self) -> int:
        """How many vectors were uploaded in all."""
        return int(self._vectors[0])

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
        after = self.spent[records] + cost
        affordable: npt.NDArray[np.bool_] = after <= limit**2 * (1 + 1e-12)
        if whole and not affordable.all():
            affordable[:] = False
        chosen = records[affordable]
        if len(chosen):
            self.spent[chosen] = after[affordable]
            self.counts[KINDS.index(kind), chosen] += 1
            self._vectors += np.uint64(len(chosen))
            if trains:
                new = chosen[self.first_use[chosen] == 0]
                self.first_use[new] = self._vectors[0]
            self._memory.flush()
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
        facts = {"format": _FORMAT, "version": _VERSION, "records": self.records, "identity": self._identity}
        header = json.dumps(facts).encode().ljust(_VECTORS_AT, b" ")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, header + self._memory[_VECTORS_AT:])

    def close(self) -> None:
        """Lets others use the file."""
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # closing is not enough: the mapping keeps the file open
            os.close(self._lock)
            self._lock = None

    def _open(self, path: Path, size: int, facts: Mapping[str, object]) -> mmap.mmap:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _create(path, size, {"format": _FORMAT, "version": _VERSION, **facts})
        self._lock = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            self._lock = None
            raise RunFolderError(
                f'the ledger "{path}" is in use by another process: two runs may not spend one budget. '
                "Wait until it ends."
            ) from None
        try:
            _check(path, size, facts)
        except RunFolderError:
            self.close()
            raise
        return mmap.mmap(self._lock, size)


def read_ledger(path: Path) -> Ledger:
    """A ledger as it stands, for reports; a run may be using it."""
    facts = _header(path)
    ledger = Ledger(None, int(str(facts["records"])), "")
    ledger.path = path
    content = path.read_bytes()
    if len(content) != len(ledger._memory):
        raise RunFolderError(f'the ledger "{path}" must have {len(ledger._memory):,} bytes. It is damaged.')
    ledger._memory[:] = content
    return ledger


def _create(path: Path, size: int, facts: Mapping[str, object]) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    with temporary.open("wb") as file:
        file.write(json.dumps(facts).encode().ljust(_VECTORS_AT, b" "))
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, path)  # unlike a rename it never replaces a ledger made meanwhile
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
    sync_folder(path.parent)


def _header(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            facts: dict[str, object] = json.loads(file.read(_VECTORS_AT))
    except (OSError, ValueError) as error:
        raise RunFolderError(f'"{path}" must be a privacy ledger. {error}.') from error
    if (facts.get("format"), facts.get("version")) != (_FORMAT, _VERSION):
        raise RunFolderError(f'"{path}" must be a privacy ledger of version {_VERSION}. Found {facts}.')
    return facts


def _check(path: Path, size: int, expected: Mapping[str, object]) -> None:
    facts = _header(path)
    for name, value in expected.items():
        if facts.get(name) != value:
            raise RunFolderError(
                f'the ledger "{path}" is for other records: its {name} is {facts.get(name)}, here it is '
                f"{value}. Name another folder in privacy.ledger for another data set."
            )
    if path.stat().st_size != size:
        raise RunFolderError(f'the ledger "{path}" must have {size:,} bytes. It is damaged.')
