"""The entries of a ledger's journal: people, runs, charges or their sums, and marks."""

from collections.abc import Iterable, Iterator
from io import BytesIO

import polars as pl

from vafl.privacy.ledger.accounts import Accounts
from vafl.privacy.ledger.journal import Entry, Payload

# Kinds of entries. Those below are charges, numbered as in KINDS.
MARK, ACCEPTED, PEOPLE, SPENDER, BALANCE = 251, 252, 253, 254, 255
MARK_BYTES = 16
_MARKS_KEPT = 256  # of each run, when its charges are replaced by their sums


def book(accounts: Accounts, kind: int, payload: Payload, unit: int = 1) -> None:
    """Add a charge or a balance to the accounts; its costs are in the unit of its run."""
    if kind == BALANCE:
        accounts.book_balance(payload, unit)
    else:
        accounts.book_charge(kind, payload, unit)


def squeezed(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield the same in fewer bytes: the sums of each run where its charges are longer, and its last marks.

    A server remembers the last mark it received and shows no older one. Whatever the party did with others
    since, that mark is among the last ones of its last run with this server.
    """
    people, charges, marks = 0, list[Entry](), bytearray()
    for kind, payload in entries:
        if kind == ACCEPTED:
            yield kind, payload
        elif kind == MARK:
            marks += payload
        elif kind in (PEOPLE, SPENDER):
            yield from _summed(charges, marks, people)
            charges, marks = [], bytearray()
            people += len(ids_of(payload)) if kind == PEOPLE else 0
            yield kind, payload
        else:
            charges.append((kind, payload))
    yield from _summed(charges, marks, people)


def _summed(charges: list[Entry], marks: bytearray, people: int) -> Iterator[Entry]:
    sums = Accounts(people)
    for kind, payload in charges:
        book(sums, kind, payload)
    balance = sums.balance()
    yield from [(BALANCE, balance)] if len(balance) < sum(len(payload) for _, payload in charges) else charges
    if marks:
        yield MARK, bytes(marks[-_MARKS_KEPT * MARK_BYTES :])


def marks_in(payload: Payload) -> Iterator[bytes]:
    """Yield each mark of an entry."""
    content = bytes(payload)
    for place in range(0, len(content), MARK_BYTES):
        yield content[place : place + MARK_BYTES]


def ids_as_bytes(ids: pl.Series) -> bytes:
    """Return the ids of people for whom accounts are opened."""
    content = BytesIO()
    pl.DataFrame({"id": ids}).write_ipc(content, compression="zstd")
    return content.getvalue()


def ids_of(payload: Payload) -> pl.Series:
    """Return what `ids_as_bytes` was given."""
    return pl.read_ipc(bytes(payload))["id"]
