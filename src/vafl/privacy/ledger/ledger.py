"""The ledger: what has been spent on every person of one party, durable before anything leaves.

A ledger belongs to a table's people, not to a run: accounts are found by record id, whatever the alignment,
the order of rows and the partners are this time. Its file is a journal. In order, it lists people for whom
accounts are opened, runs that begin, and their charges. When charges take up much space, the sums of each run
replace them. The ids stay in this file, which never leaves the party.

The journal notices when its file alone is cut, edited or rolled back. It cannot notice when older copies of
both the file and its head are restored. For that the ledger makes marks: random bytes that the client sends
to its server, and that the server shows the next time. A ledger that does not know it is not the newest.

Runs may differ in their neighbours. Each charges, limits and is shown mu^2 by its own; the accounts count all
of them by one (see `Accounts`).
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

from vafl.errors import BudgetExhausted, LedgerError, RunFolderError
from vafl.privacy.ledger.accounts import KINDS, NOBODY, Accounts, Floats, Kind, Numbers, charge_as_bytes
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

_LONGEST = 64 << 20  # bytes of charges before runs are replaced by their sums


@dataclass(frozen=True)
class Share:
    """What one run has spent on one record: mu^2 as of `zero_out`, and uploads by kind."""

    spender: Spender
    spent: float
    uploads: dict[Kind, int]


class Ledger:
    """The account of every person.

    Args:
        path: the file, made if it is not there; None keeps the accounts in memory only.
        identity: what ids are ids of; a ledger is for one kind of ids only.
        accepts_mark: whether to accept one mark that this ledger does not know (see `recognise`).

    Attributes:
        ids: [accounts], whose they are.
        spenders: all runs so far.
        accounts: the sums.
        accepted: when marks it did not know were accepted, as ISO 8601. What was spent before may be missing.
    """

    def __init__(self, path: Path | None, identity: str, *, accepts_mark: bool = False) -> None:
        self.path, self.identity, self._accepts_mark = path, identity, accepts_mark
        self.ids = pl.Series("id", [], pl.String)
        self.spenders: list[Spender] = []
        self.accounts = Accounts()
        self.accepted: list[str] = []
        self._marks: set[bytes] = set()
        self._began_at: list[int] = []  # rows that minibatches had uploaded by then
        self._journal: Journal | None = None
        self._unit = 1  # of the run that spends: so many times the accounts' mu^2
        self._loose = self._firm = 0  # bytes of charges and marks in the file, and of all else
        if path is not None:
            self._journal = Journal(path, identity)
            self._book_all(self._journal.take_entries())
            self._firm = path.stat().st_size - self._loose
            if self._journal.torn:
                self._charge_for_torn_entry(path)

    @classmethod
    def in_memory(cls, records: int) -> "Ledger":
        """For records 0, 1, ... that have no other names, and a process that sends nothing."""
        ledger = cls(None, "")
        ledger.begin(Spender("", "training", (), PrivacySettings()), numbered(records))
        return ledger

    @property
    def number(self) -> str:
        """No other ledger's; empty in memory."""
        return "" if self._journal is None else self._journal.number

    @property
    def spent(self) -> Floats:
        """[accounts], the sum of mu^2, by the neighbours of the run that spends."""
        return self.accounts.spent * self._unit

    @property
    def counts(self) -> npt.NDArray[np.uint32]:
        """[kinds, accounts], uploads."""
        return self.accounts.counts

    @property
    def batch_rows(self) -> list[int]:
        """[runs], how many rows of minibatches each has uploaded, at most."""
        ends = [*self._began_at[1:], self._batch_rows()]
        return [end - start for start, end in zip(self._began_at, ends, strict=True)]

    def begin(self, spender: Spender, ids: pl.Series) -> Numbers:
        """Begins a run, or goes on with the last one.

        Args:
            ids: [rows], whose each row is, everyone's once; null where it is no record of this party.

        Returns:
            [rows], the account of each.
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
        accounts: Numbers,
        kind: Kind,
        cost: float,
        *,
        limit: float = math.inf,
        whole: bool = False,
        carried: float = 0.0,
        trains: bool = False,
    ) -> npt.NDArray[np.bool_]:
        """Charges an upload of distinct records, durably.

        Args:
            cost: mu^2 for each of them, by the neighbours of the run that spends.
            limit: the largest mu any record may have spent, by those.
            whole: charge all of them or none.
            carried: mu^2 that each of them costs whoever was trained on before.
            trains: a local update will use them, unnoised.

        Returns:
            [accounts], which ones were charged: only those may be uploaded.
        """
        after = self.accounts.after(accounts, cost / self._unit)
        affordable: npt.NDArray[np.bool_] = after <= self._most(limit)
        if not affordable.all():
            if whole:
                affordable[:] = False
            accounts, after = accounts[affordable], after[affordable]
        if len(accounts):
            _require_distinct(accounts)
            number = KINDS.index(kind)
            if self._journal is not None:
                charge = charge_as_bytes(accounts, cost, carried, trains)
                self._loose += self._journal.append(number, charge)
            self.accounts.book(number, accounts, after, carried, trains)
            if self._journal is not None and self._loose > max(_LONGEST, self._firm):
                self._squeeze(self._journal)
        return affordable

    def require(self, accounts: Numbers, kind: Kind, cost: float, limit: float) -> None:
        """Charges all of these records, or raises BudgetExhausted and charges none."""
        if not self.charge(accounts, kind, cost, limit=limit, whole=True).all():
            raise BudgetExhausted(
                "VFL-5051",
                f"privacy.mu_max = {limit:g} does not allow this {kind}: it costs mu {math.sqrt(cost):.4g}, "
                f"and up to {self._most_spent(accounts):.4g} are spent already. Raise mu_max, or add noise.",
            )

    def require_within(self, accounts: Numbers, limit: float) -> None:
        """Raises BudgetExhausted if more than the limit is spent on any of these records already."""
        if (self.accounts.after(accounts, 0.0) > self._most(limit)).any():
            raise BudgetExhausted(
                "VFL-5052",
                f"privacy.mu_max = {limit:g} does not allow to use these records: up to mu "
                f"{self._most_spent(accounts):.4g} is spent on them already, as this run's "
                "privacy.neighbours count. Raise mu_max.",
            )

    def mark(self) -> bytes:
        """Enter a fresh random mark, durably, and return it. It tells nothing about what is in the ledger."""
        mark = secrets.token_bytes(MARK_BYTES)
        self._loose += self._write(MARK, mark)
        self._marks.add(mark)
        return mark

    def knows(self, mark: bytes) -> bool:
        """Whether this ledger made or accepted the mark."""
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
        """Enter, durably, that a mark of another ledger, or of a newer state of this one, is accepted."""
        when = datetime.now(UTC).isoformat(timespec="seconds")
        self._write(ACCEPTED, json.dumps({"mark": mark.hex(), "when": when}).encode())
        self._accept(mark, when)

    def account(self, record: str) -> int | None:
        """Return the account of the record with this id, or None."""
        return self.ids.index_of(record)

    def save_copy(self, path: Path) -> None:
        """Writes the one run of a ledger in memory into a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        entries: list[Entry] = [
            (PEOPLE, ids_as_bytes(self.ids)),
            *((SPENDER, spender.as_bytes()) for spender in self.spenders),
            (BALANCE, self.accounts.balance(self._unit)),
        ]
        write_journal(path, self.identity, entries)

    def close(self) -> None:
        """Lets others use the file."""
        if self._journal is not None:
            self._journal.close()

    def _batch_rows(self) -> int:
        """How many rows of minibatches were uploaded, at most: a torn entry may have been for any rows."""
        return int(self.counts[[KINDS.index("batch"), KINDS.index("torn")]].sum())

    def _most(self, limit: float) -> float:
        """mu^2 of an account at which the limit is reached."""
        return limit**2 / self._unit * (1 + 1e-12)

    def _most_spent(self, accounts: Numbers) -> float:
        return math.sqrt(float(self.spent[accounts[accounts != NOBODY]].max()))

    # --- the entries ---

    def _write(self, kind: int, payload: bytes) -> int:
        return 0 if self._journal is None else self._journal.append(kind, payload)

    def _charge_for_torn_entry(self, path: Path) -> None:
        """Charge everyone the most that an entry which a crash cut short can have cost.

        Nobody can tell what it was for. Before the first run begins, nothing can have been charged.
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
        """Books what the entries say, and stops wherever a run is over."""
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
    ledger, entries = _found(path)
    ledger._book_all(entries)
    return ledger


def read_history(path: Path, record: str) -> list[Share]:
    """What each run has spent on one record, of the runs that have."""
    ledger, entries = _found(path)
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
        ledger.accounts.spent[account], known = 0.0, counts  # less what is infinite, nothing could be told
    return shares


def _found(path: Path) -> tuple[Ledger, list[Entry]]:
    try:
        content = read_journal(path)
    except RunFolderError:
        raise
    except OSError as error:
        raise RunFolderError("VFL-5054", f'"{path}" must be a privacy ledger. {error}.') from error
    return Ledger(None, content.identity), content.entries


def numbered(records: int) -> pl.Series:
    """Ids of records that have numbers only."""
    return pl.Series("id", np.arange(records)).cast(pl.String)


def _require_distinct(accounts: Numbers) -> None:
    """A record named twice would be charged once."""
    if not (accounts[1:] > accounts[:-1]).all():
        own = np.sort(accounts[accounts != NOBODY])
        if (own[1:] == own[:-1]).any():
            raise ValueError("an upload names each record once at most")
