"""The entries of a ledger's journal: people, runs, charges or their sums, and marks."""

from collections.abc import Iterable, Iterator
from io import BytesIO

import polars as pl

from vafl.privacy.ledger.accounts import Accounts
from vafl.privacy.ledger.journal import Entry, Payload

# Kinds of entries. Smaller numbers are charges: the index of their kind in KINDS.
MARK, ACCEPTED, PEOPLE, SPENDER, BALANCE = 251, 252, 253, 254, 255
MARK_BYTES = 16
_MARKS_KEPT = 256  # marks kept per run when sums replace its charges


def book(accounts: Accounts, kind: int, payload: Payload, unit: int = 1) -> None:
    """Add a charge or a balance to the accounts. Its costs are in the unit of its run."""
    if kind == BALANCE:
        accounts.book_balance(payload, unit)
    else:
        accounts.book_charge(kind, payload, unit)


def squeezed(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield equivalent entries in fewer bytes: sums instead of the charges of a run, and only its last marks.

    A run keeps its charges if they are shorter than its sums. Dropping older marks is safe: a server only
    returns the last mark that it received, and that is among the last marks of the last run with this server.
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
    """Return the ids of new accounts as bytes."""
    content = BytesIO()
    pl.DataFrame({"id": ids}).write_ipc(content, compression="zstd")
    return content.getvalue()


def ids_of(payload: Payload) -> pl.Series:
    """Return the ids from the bytes of `ids_as_bytes`."""
    return pl.read_ipc(bytes(payload))["id"]
