"""Sum up the spent mu^2 and the uploads of each account. The ledger adds record ids and the file.

Some modes (`embed_only`) train on records without noise. The model then carries those records into the
uploads of others, and each such upload costs every record that the model was trained on before. Adding that
cost to all accounts at every upload would be slow, so `Accounts` keeps one running total, `carried`, and
notes its value at each record's first use. The carried cost of a record is the difference. `settle` adds it
to `spent`.
"""

import struct
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from vafl.arrays import Doubles, Integers

# A "torn" charge pays for an entry that a crash cut short. It may have been for any upload.
Kind = Literal["batch", "refresh", "request", "evaluation", "prediction", "release", "torn"]
KINDS: tuple[Kind, ...] = get_args(Kind)

NOBODY = -1  # the account of rows that the party has no record for: uploading them reveals no record
_ENDLESS = -1e300  # the mu^2 spent by NOBODY: so low that it never reaches a limit
_INT32, _UINT32, _FLOAT64 = np.dtype("<i4"), np.dtype("<u4"), np.dtype("<f8")
_CHARGE = struct.Struct("<ddB3x")  # cost, carried, trains
_BALANCE = struct.Struct("<Id")  # number of accounts, total carried


class Accounts:
    """The accounts of all records, numbered from 0.

    The arrays have one more element at the end, which is also index NOBODY (-1). Its budget is endless.

    Accounts are in the unit of `zero_out` neighbours, whatever neighbours a run uses. `replace` neighbours
    have twice that mu, which is four times the mu^2. Charges and balances as bytes are in the unit of their
    run: `unit` times the mu^2 here.

    Attributes:
        carried: the mu^2 that all uploads since the last `settle` cost each record trained on before them.
    """

    def __init__(self, count: int = 0) -> None:
        self._spent = np.zeros(count + 1)
        self._spent[NOBODY] = _ENDLESS
        self._counts = np.zeros((len(KINDS), count + 1), dtype=np.uint32)
        self._first_use = np.full(count + 1, np.inf)  # `carried` at first use; inf before
        self.carried = 0.0

    def __len__(self) -> int:
        return len(self._spent) - 1

    @property
    def spent(self) -> Doubles:
        """[accounts]: the mu^2 of the record's own uploads, and the carried mu^2 up to the last `settle`."""
        return self._spent[:NOBODY]

    @property
    def counts(self) -> npt.NDArray[np.uint32]:
        """[kinds, accounts]: the number of uploads."""
        return self._counts[:, :NOBODY]

    @property
    def total(self) -> Doubles:
        """[accounts]: the mu^2 of the record's own uploads, and all carried mu^2."""
        return self.spent + self._carried_since()[:NOBODY]

    def grow(self, count: int) -> None:
        """Open `count` more accounts."""
        places = len(self)
        self._spent = np.insert(self._spent, places, np.zeros(count))
        self._counts = np.insert(self._counts, places, np.zeros((count, 1), dtype=np.uint32), axis=1)
        self._first_use = np.insert(self._first_use, places, np.full(count, np.inf))

    def after(self, numbers: Integers, cost: float) -> Doubles:
        """Return the mu^2 that these accounts would have spent after a charge of `cost`: [numbers]."""
        after: Doubles = self._spent.take(numbers) + cost
        return after

    def book(self, kind: int, numbers: Integers, after: Doubles, carried: float, trains: bool) -> None:
        """Book an upload of distinct records, and of any number of rows of NOBODY.

        Args:
            kind: the index in KINDS.
            numbers: the accounts.
            after: the mu^2 that each account has spent after this upload, from `after`.
            carried: the mu^2 that each uploaded row costs every record trained on before.
            trains: whether a local update without noise will use the records.
        """
        self._spent[numbers] = after
        self._counts[kind][numbers] += 1
        self.carried += carried * len(numbers)
        if trains:
            self._first_use[numbers[np.isinf(self._first_use[numbers])]] = self.carried

    def settle(self) -> None:
        """Add the carried mu^2 to `spent`, so that limits include it, and restart the running total at 0.

        The restart is needed after uploads that carried infinite mu^2: the difference of two infinite totals
        would not tell which records had been trained on.
        """
        self._spent += self._carried_since()
        self._spent[NOBODY] = _ENDLESS  # restore it: an upload without a clip adds infinity
        self._first_use[np.isfinite(self._first_use)] = self.carried = 0.0

    def _carried_since(self) -> Doubles:
        """Return the mu^2 carried since each record's first use; 0 for records that were not trained on.

        A record whose first use has an infinite `carried` looks unused here. That is safe: its own upload had
        an infinite cost as well.
        """
        used = np.isfinite(self._first_use)
        return np.where(used, self.carried - np.where(used, self._first_use, 0), 0)

    # --- as bytes ---

    def balance(self, unit: int = 1) -> bytes:
        """Return all sums as bytes for `book_balance`."""
        used = np.flatnonzero(self.counts.any(0))
        first = self._first_use[used]
        return b"".join(
            (
                _BALANCE.pack(len(used), self.carried),
                used.astype(_INT32).tobytes(),
                (self._spent[used] * unit).astype(_FLOAT64).tobytes(),
                np.where(np.isfinite(first), first, 0).astype(_FLOAT64).tobytes(),
                self._counts[:, used].astype(_UINT32).tobytes(),
            )
        )

    def book_balance(self, content: bytes | memoryview, unit: int = 1) -> None:
        """Add the sums of one run, from a `balance` that started at 0."""
        size, carried = _BALANCE.unpack_from(content)
        places = np.cumsum([_BALANCE.size, 4 * size, 8 * size, 8 * size])
        used = np.frombuffer(content, _INT32, size, places[0]).astype(np.int64)
        first = np.frombuffer(content, _FLOAT64, size, places[2])
        self._spent[used] += np.frombuffer(content, _FLOAT64, size, places[1]) / unit
        self._counts[:, used] += np.frombuffer(content, _UINT32, offset=places[3]).reshape(len(KINDS), size)
        new = (first > 0) & np.isinf(self._first_use[used])
        self._first_use[used[new]] = self.carried + first[new]
        self.carried += carried

    def book_charge(self, kind: int, content: bytes | memoryview, unit: int = 1) -> None:
        """Book an upload from the bytes of `charge_as_bytes`."""
        cost, carried, trains = _CHARGE.unpack_from(content)
        numbers = np.frombuffer(content, _INT32, offset=_CHARGE.size).astype(np.int64)
        self.book(kind, numbers, self.after(numbers, cost / unit), carried, bool(trains))


def charge_as_bytes(numbers: Integers, cost: float, carried: float, trains: bool) -> bytes:
    """Return an upload as bytes, for `Accounts.book_charge`."""
    return _CHARGE.pack(cost, carried, trains) + numbers.astype(_INT32).tobytes()
