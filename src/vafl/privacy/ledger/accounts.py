"""Sums by account: what was spent, by which kind of upload. No ids and no files: those are the ledger's."""

import struct
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

# A "torn" charge is for an entry that a crash cut short: nobody knows which upload it was for.
Kind = Literal["batch", "refresh", "request", "evaluation", "prediction", "release", "torn"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NOBODY = -1  # the account of rows that are no record of this party: nothing about anyone leaves with them
_ENDLESS = -1e300  # spent by nobody: no limit is ever reached
_INT32, _UINT32, _FLOAT64 = np.dtype("<i4"), np.dtype("<u4"), np.dtype("<f8")
_CHARGE = struct.Struct("<ddB3x")  # cost, carried, whether it trains
_BALANCE = struct.Struct("<Id")  # accounts, carried in all


class Accounts:
    """Numbered from 0; one more place, the last and so also place NOBODY, can never be spent up.

    They count what tells a record from nothing (`zero_out`), whatever the neighbours of a run are: what tells
    it from any other record (`replace`) is twice that mu, four times that mu^2. Bytes have the unit of their
    run: so many times the mu^2 here.

    Attributes:
        carried: mu^2 that uploads of others have cost, since the last `settle`, whoever was trained on
            before: a trained model takes its records along. Only `embed_only` lets that happen.
    """

    def __init__(self, count: int = 0) -> None:
        self._spent = np.zeros(count + 1)
        self._spent[NOBODY] = _ENDLESS
        self._counts = np.zeros((len(KINDS), count + 1), dtype=np.uint32)
        self._first_use = np.full(count + 1, np.inf)  # what was carried then; infinite where there was none
        self.carried = 0.0

    def __len__(self) -> int:
        return len(self._spent) - 1

    @property
    def spent(self) -> Floats:
        """[accounts], the sum of mu^2 of their own uploads and, up to the last `settle`, of others'."""
        return self._spent[:NOBODY]

    @property
    def counts(self) -> npt.NDArray[np.uint32]:
        """[kinds, accounts], uploads."""
        return self._counts[:, :NOBODY]

    @property
    def total(self) -> Floats:
        """[accounts], mu^2 with all that others' uploads have carried."""
        return self.spent + self._carried_since()[:NOBODY]

    def grow(self, count: int) -> None:
        """Opens so many more accounts."""
        places = len(self)
        self._spent = np.insert(self._spent, places, np.zeros(count))
        self._counts = np.insert(self._counts, places, np.zeros((count, 1), dtype=np.uint32), axis=1)
        self._first_use = np.insert(self._first_use, places, np.full(count, np.inf))

    def after(self, numbers: Numbers, cost: float) -> Floats:
        """[numbers], what these accounts will have spent, with so much more."""
        after: Floats = self._spent.take(numbers) + cost
        return after

    def book(self, kind: int, numbers: Numbers, after: Floats, carried: float, trains: bool) -> None:
        """An upload of distinct records, and of any number of rows that are nobody's.

        Args:
            after: what they have spent then.
        """
        self._spent[numbers] = after
        self._counts[kind][numbers] += 1
        self.carried += carried * len(numbers)
        if trains:
            self._first_use[numbers[np.isinf(self._first_use[numbers])]] = self.carried

    def settle(self) -> None:
        """Books what others' uploads have carried, so that a limit counts it, and begins to count anew: after
        uploads that carried infinitely much nobody could be told from those who were not trained on."""
        self._spent += self._carried_since()
        self._spent[NOBODY] = _ENDLESS  # an upload without a clip costs infinitely much
        self._first_use[np.isfinite(self._first_use)] = self.carried = 0.0

    def _carried_since(self) -> Floats:
        """Where what was carried by the first use is infinite, so is what that record's own upload cost."""
        used = np.isfinite(self._first_use)
        return np.where(used, self.carried - np.where(used, self._first_use, 0), 0)

    # --- as bytes ---

    def balance(self, unit: int = 1) -> bytes:
        """All of it, as `book_balance` takes it."""
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
        """Adds the sums of a run, which had begun to count at nothing."""
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
        """Books an upload as `charge_as_bytes` has it."""
        cost, carried, trains = _CHARGE.unpack_from(content)
        numbers = np.frombuffer(content, _INT32, offset=_CHARGE.size).astype(np.int64)
        self.book(kind, numbers, self.after(numbers, cost / unit), carried, bool(trains))


def charge_as_bytes(numbers: Numbers, cost: float, carried: float, trains: bool) -> bytes:
    """An upload, to be booked again by whoever reads it."""
    return _CHARGE.pack(cost, carried, trains) + numbers.astype(_INT32).tobytes()
