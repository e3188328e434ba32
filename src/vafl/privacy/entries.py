"""What a ledger's journal says, entry by entry: people, runs, and charges or their sums."""

from collections.abc import Iterable, Iterator
from io import BytesIO

import polars as pl

from vafl.privacy.accounts import Accounts
from vafl.privacy.journal import Entry, Payload

PEOPLE, SPENDER, BALANCE = 253, 254, 255  # kinds of entries; those below are charges, numbered as KINDS


def book(accounts: Accounts, kind: int, payload: Payload, unit: int = 1) -> None:
    """Books charges or sums, which are in the unit of their run."""
    if kind == BALANCE:
        accounts.book_balance(payload, unit)
    else:
        accounts.book_charge(kind, payload, unit)


def squeezed(entries: Iterable[Entry]) -> Iterator[Entry]:
    """The same in fewer bytes: the sums of each run, where its charges are longer."""
    people, charges = 0, list[Entry]()
    for kind, payload in entries:
        if kind not in (PEOPLE, SPENDER):
            charges.append((kind, payload))
            continue
        yield from _summed(charges, people)
        charges = []
        if kind == PEOPLE:
            people += len(ids_of(payload))
        yield kind, payload
    yield from _summed(charges, people)


def _summed(charges: list[Entry], people: int) -> list[Entry]:
    own = Accounts(people)
    for kind, payload in charges:
        book(own, kind, payload)
    balance = own.balance()
    return [(BALANCE, balance)] if len(balance) < sum(len(payload) for _, payload in charges) else charges


def ids_as_bytes(ids: pl.Series) -> bytes:
    """Whose accounts are opened."""
    content = BytesIO()
    pl.DataFrame({"id": ids}).write_ipc(content, compression="zstd")
    return content.getvalue()


def ids_of(payload: Payload) -> pl.Series:
    """As `ids_as_bytes` has them."""
    return pl.read_ipc(bytes(payload))["id"]
