"""The ledger: the mu^2 spent on every record of one party. It is durable before an upload leaves the party.

A ledger belongs to the records of a table, not to a run. Accounts are found by record id, independent of the
alignment, the order of rows and the partners of a run. The file is a journal. In order, it lists the ids of
new accounts, the runs that begin, and the charges of each run. When charges take up much space, the sums of
each run replace them. The ids stay in this file, which never leaves the party.

The journal notices when its file alone is cut, edited or rolled back. It cannot notice when older copies of
both the file and its head are restored. Marks detect that. A mark is a random number that the ledger stores
and the client sends to its server. The server returns it when the client connects again. A ledger that does
not know the returned mark is not the newest copy.

Runs may use different neighbours. A run's charges, limits and reports are in the unit of its own neighbours.
The accounts store all of them in one unit (see `Accounts`).
"""

import json
import logging
import math
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from vafl.arrays import Doubles, Flags, Integers
from vafl.errors import BudgetExhausted, LedgerError, RunFolderError
from vafl.privacy.ledger.accounts import KINDS, NOBODY, Accounts, Kind, charge_as_bytes
from vafl.privacy.ledger.entries import (
    ACCEPTED,
    BALANCE,
    MARK,
    MARK_BYTES,
    PEOPLE,
    SPENDER,
    book,
    ids_as_bytes,
    ids_of,
    marks_in,
    squeezed,
)
from vafl.privacy.ledger.journal import Entry, Journal, entry_size, read_journal, write_journal
from vafl.privacy.ledger.spender import Spender
from vafl.privacy.settings import PrivacySettings

log = logging.getLogger(__name__)

_LONGEST = 64 << 20  # bytes of charges before the sums of each run replace them


@dataclass(frozen=True)
class Share:
    """The mu^2 that one run spent on one record (in the unit of `zero_out`), and its uploads by kind."""

    spender: Spender
    spent: float
    uploads: dict[Kind, int]


class Ledger:
    """The accounts of all records of one party.

    Args:
        path: the file, created if it does not exist; None keeps the accounts in memory only.
        identity: what the ids identify, such as a column of a table. A ledger holds one kind of ids.
        accepts_mark: whether to accept one mark that this ledger does not know (see `recognise`).

    Attributes:
        ids: [accounts], the id of each account's record.
        spenders: all runs so far.
        accounts: the sums.
        accepted: the times (ISO 8601) at which unknown marks were accepted. The ledger may lack charges from
            before those times.
    """

    def __init__(self, path: Path | None, identity: str, *, accepts_mark: bool = False) -> None:
        self.path, self.identity, self._accepts_mark = path, identity, accepts_mark
        self.ids = pl.Series("id", [], pl.String)
        self.spenders: list[Spender] = []
        self.accounts = Accounts()
        self.accepted: list[str] = []
        self._marks: set[bytes] = set()
        self._began_at: list[int] = []  # per run: rows uploaded in minibatches before it
        self._journal: Journal | None = None
        self._unit = 1  # mu^2 in the current run's unit = _unit * mu^2 in `accounts`
        self._loose = self._firm = 0  # bytes in the file: charges and marks; the rest
        if path is not None:
            self._journal = Journal(path, identity)
            self._book_all(self._journal.take_entries())
            self._firm = path.stat().st_size - self._loose
            if self._journal.torn:
                self._charge_for_torn_entry(path)

    @classmethod
    def in_memory(cls, records: int) -> "Ledger":
        """Make a ledger without a file for a simulation, with record ids "0", "1", ..."""
        ledger = cls(None, "")
        ledger.begin(Spender("", "training", (), PrivacySettings()), numbered(records))
        return ledger

    @property
    def number(self) -> str:
        """A random id that no other ledger has; empty in memory."""
        return "" if self._journal is None else self._journal.number

    @property
    def spent(self) -> Doubles:
        """[accounts]: the spent mu^2, in the unit of the current run's neighbours."""
        return self.accounts.spent * self._unit

    @property
    def counts(self) -> npt.NDArray[np.uint32]:
        """[kinds, accounts]: the number of uploads."""
        return self.accounts.counts

    @property
    def batch_rows(self) -> list[int]:
        """[runs]: the most rows that each run has uploaded in minibatches."""
        ends = [*self._began_at[1:], self._batch_rows()]
        return [end - start for start, end in zip(self._began_at, ends, strict=True)]

    def begin(self, spender: Spender, ids: pl.Series) -> Integers:
        """Begin a run, or continue the last one if `spender` equals it.

        Args:
            spender: the run.
            ids: [rows], distinct record ids; null where the party has no record.

        Returns:
            The account of each row: [rows].
        """
        new = ids.drop_nulls()
        new = new.filter(~new.is_in(self.ids.implode()))
        if len(new):
            self._write(PEOPLE, ids_as_bytes(new))
            self._open_accounts(new)
        if self.spenders[-1:] != [spender]:
            self._write(SPENDER, spender.as_bytes())
            self._start(spender)
        known = pl.DataFrame({"id": self.ids}).with_row_index("account")
        rows = pl.DataFrame({"id": ids}).join(known, on="id", how="left", maintain_order="left")
        return rows["account"].cast(pl.Int64).fill_null(NOBODY).to_numpy()

    def charge(
        self,
        accounts: Integers,
        kind: Kind,
        cost: float,
        *,
        limit: float = math.inf,
        whole: bool = False,
        carried: float = 0.0,
        trains: bool = False,
    ) -> Flags:
        """Charge an upload of distinct records. The charge is durable when this returns.

        Args:
            accounts: the accounts of the records.
            kind: the kind of upload.
            cost: the mu^2 for each record, in the unit of the current run's neighbours.
            limit: the largest mu that may be spent on a record, in the same unit.
            whole: charge all records or none.
            carried: the mu^2 that each uploaded record costs every record trained on before.
            trains: whether a local update without noise will use the records.

        Returns:
            A mask of the charged accounts: [accounts]. The client may upload only those.
        """
        after = self.accounts.after(accounts, cost / self._unit)
        affordable: Flags = after <= self._most(limit)
        if not affordable.all():
            if whole:
                affordable[:] = False
            accounts, after = accounts[affordable], after[affordable]
        if len(accounts):
            _require_distinct(accounts)
            number = KINDS.index(kind)
            # Write the journal first: if that fails, the sums are unchanged and the caller uploads nothing.
            if self._journal is not None:
                charge = charge_as_bytes(accounts, cost, carried, trains)
                self._loose += self._journal.append(number, charge)
            self.accounts.book(number, accounts, after, carried, trains)
            # Replacing writes the whole file. It is due only after the charges have grown to the size of the
            # rest, so the rewriting costs no more than the charges themselves did.
            if self._journal is not None and self._loose > max(_LONGEST, self._firm):
                self._squeeze(self._journal)
        return affordable

    def require(self, accounts: Integers, kind: Kind, cost: float, limit: float) -> None:
        """Charge all of these records, or raise BudgetExhausted and charge none."""
        if not self.charge(accounts, kind, cost, limit=limit, whole=True).all():
            raise BudgetExhausted(
                "VFL-5051",
                f"privacy.mu_max = {limit:g} does not allow this {kind}: it costs mu {math.sqrt(cost):.4g}, "
                f"and up to mu {self._most_spent(accounts):.4g} is already spent. Raise it, or add noise.",
            )

    def require_within(self, accounts: Integers, limit: float) -> None:
        """Raise BudgetExhausted if more than the limit is already spent on any of these records."""
        if (self.accounts.after(accounts, 0.0) > self._most(limit)).any():
            raise BudgetExhausted(
                "VFL-5052",
                f"privacy.mu_max = {limit:g} does not allow any use of these records: up to mu "
                f"{self._most_spent(accounts):.4g} is already spent on them, for this run's "
                "privacy.neighbours. Raise mu_max.",
            )

    def mark(self) -> bytes:
        """Store a new random mark durably and return it. It reveals nothing about the ledger's content."""
        mark = secrets.token_bytes(MARK_BYTES)
        self._loose += self._write(MARK, mark)
        self._marks.add(mark)
        return mark

    def knows(self, mark: bytes) -> bool:
        """Return whether this ledger made or accepted the mark."""
        return mark in self._marks

    def recognise(self, mark: bytes) -> None:
        """Check the last mark that a server received from this party; empty if it received none.

        Raises:
            LedgerError: this ledger does not know the mark, and may not accept it.
        """
        if self.path is None or not mark or self.knows(mark):
            return
        if not self._accepts_mark:
            raise LedgerError(
                "VFL-5053",
                f'the ledger "{self.path}" must hold the last mark that this party sent to the server. '
                "It does not: it was restored from an older copy, or is another ledger. Nothing was sent. "
                "Restore the newest copy of the ledger and of its head. If that is lost, start once with "
                "--accept-ledger to use this ledger, and lower privacy.mu_max for what it lacks.",
            )
        self._accepts_mark = False
        self.accept(mark)
        log.warning(
            'the ledger "%s" lacks the last mark that the server received; --accept-ledger accepts this, and '
            "the ledger records it",
            self.path,
        )

    def accept(self, mark: bytes) -> None:
        """Record durably that the user accepts a mark of another ledger, or of a newer copy of this one."""
        when = datetime.now(UTC).isoformat(timespec="seconds")
        self._write(ACCEPTED, json.dumps({"mark": mark.hex(), "when": when}).encode())
        self._accept(mark, when)

    def account(self, record: str) -> int | None:
        """Return the account of the record with this id, or None."""
        return self.ids.index_of(record)

    def save_copy(self, path: Path) -> None:
        """Write a ledger in memory, which has one run, to a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        entries: list[Entry] = [
            (PEOPLE, ids_as_bytes(self.ids)),
            *((SPENDER, spender.as_bytes()) for spender in self.spenders),
            (BALANCE, self.accounts.balance(self._unit)),
        ]
        write_journal(path, self.identity, entries)

    def close(self) -> None:
        """Close the file, so that other processes can use it."""
        if self._journal is not None:
            self._journal.close()

    def _batch_rows(self) -> int:
        """Return the most rows uploaded in minibatches so far. A torn entry may have been for any rows."""
        return int(self.counts[[KINDS.index("batch"), KINDS.index("torn")]].sum())

    def _most(self, limit: float) -> float:
        """Return the limit as mu^2 in the accounts' unit, with a tolerance for rounding errors."""
        # Without the tolerance, a budget for exactly n uploads could allow only n - 1 of them: the sum of n
        # rounded costs may exceed the rounded limit.
        return limit**2 / self._unit * (1 + 1e-12)

    def _most_spent(self, accounts: Integers) -> float:
        return math.sqrt(float(self.spent[accounts[accounts != NOBODY]].max()))

    # --- the entries ---

    def _write(self, kind: int, payload: bytes) -> int:
        return 0 if self._journal is None else self._journal.append(kind, payload)

    def _charge_for_torn_entry(self, path: Path) -> None:
        """Charge every account the most that an entry cut short by a crash can have cost.

        The entry's content is lost, so any record may have been uploaded. Before the first run begins, no
        entry can be a charge.
        """
        if not self.spenders:
            return
        spender = self.spenders[-1]
        everyone, cost = np.arange(len(self.ids)), spender.dearest_upload
        carried, trains = spender.settings.carried_cost, spender.settings.protection.carries_records
        self.charge(everyone, "torn", cost, carried=carried, trains=trains)
        log.warning(
            'a crash cut the last entry of the ledger "%s" short: mu^2 %.4g is charged to each of its %d '
            "accounts, the most that entry can have cost",
            path,
            cost,
            len(everyone),
        )

    def _accept(self, mark: bytes, when: str) -> None:
        self.accepted.append(when)
        self._marks.add(mark)

    def _open_accounts(self, ids: pl.Series) -> None:
        self.ids = pl.concat([self.ids, ids])
        self.accounts.grow(len(ids))

    def _start(self, spender: Spender) -> None:
        self.spenders.append(spender)
        self._began_at.append(self._batch_rows())
        self._unit = spender.settings.clips_apart**2
        self.accounts.settle()

    def _book_all(self, entries: Iterable[Entry]) -> None:
        for _ in self._book_by_run(entries):
            pass

    def _book_by_run(self, entries: Iterable[Entry]) -> Iterator[None]:
        """Book the entries, and yield after the last entry of each run."""
        for kind, payload in entries:
            if kind == SPENDER:
                if self.spenders:
                    yield
                self._start(Spender.of(bytes(payload)))
            elif kind == PEOPLE:
                self._open_accounts(ids_of(payload))
            elif kind == ACCEPTED:
                facts = json.loads(bytes(payload))
                self._accept(bytes.fromhex(facts["mark"]), facts["when"])
            elif kind == MARK:
                self._marks.update(marks_in(payload))
            else:
                book(self.accounts, kind, payload, self._unit)
            if kind <= MARK:
                self._loose += entry_size(payload)
        yield

    def _squeeze(self, journal: Journal) -> None:
        self._firm, self._loose = journal.replace(squeezed(journal.read_entries())), 0


def read_ledger(path: Path) -> Ledger:
    """Read a ledger for a report; a run may be using it. An entry that is not whole yet is left out."""
    ledger, entries = _read(path)
    ledger._book_all(entries)
    return ledger


def read_history(path: Path, record: str) -> list[Share]:
    """Return the share of each run that spent anything on one record."""
    ledger, entries = _read(path)
    shares: list[Share] = []
    known = np.zeros(len(KINDS), dtype=np.uint32)
    for _ in ledger._book_by_run(entries):
        account = ledger.account(record)
        if account is None:
            continue
        ledger.accounts.settle()
        spent, counts = float(ledger.accounts.spent[account]), ledger.counts[:, account].copy()
        if spent or (counts > known).any():
            uploads = dict(zip(KINDS, (counts - known).tolist(), strict=True))
            shares.append(Share(ledger.spenders[-1], spent, uploads))
        # Reset the account rather than subtract: the difference of two infinite sums would not be a number.
        ledger.accounts.spent[account], known = 0.0, counts
    return shares


def _read(path: Path) -> tuple[Ledger, list[Entry]]:
    try:
        content = read_journal(path)
    except RunFolderError:
        raise
    except OSError as error:
        raise RunFolderError("VFL-5054", f'"{path}" must be a readable privacy ledger. {error}.') from error
    return Ledger(None, content.identity), content.entries


def numbered(records: int) -> pl.Series:
    """Return the ids of records that have numbers only: "0", "1", ..."""
    return pl.Series("id", np.arange(records)).cast(pl.String)


def _require_distinct(accounts: Integers) -> None:
    """Raise ValueError if a record occurs twice: it would be uploaded twice but charged once."""
    if not (accounts[1:] > accounts[:-1]).all():
        records = np.sort(accounts[accounts != NOBODY])
        if (records[1:] == records[:-1]).any():
            raise ValueError("an upload must contain each record at most once")
