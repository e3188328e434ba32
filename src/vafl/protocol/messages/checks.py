"""What every message is checked for, and how long its parts are on the wire."""

import numpy as np
import numpy.typing as npt

from vafl import kernels
from vafl.errors import Diverged, InvalidMessage
from vafl.protocol.rows import Matrix, Rows
from vafl.protocol.settings import LARGEST_WINDOW

HEADER_BYTES = 48  # kind, encoding, sequence, activation, iteration, lengths
LARGEST_OFFER = 4096  # bytes of a key and the proof whose it is
ROW_BYTES = 4  # a row travels as an unsigned 32-bit number
Words = npt.NDArray[np.uint64]


def rows_fault(rows: Rows) -> str | None:
    """What is wrong with row numbers; None if nothing is. So with all of these."""
    if rows.dtype != np.int64 or rows.ndim != 1:
        return f"rows must be a vector of int64. Found {rows.dtype} {list(rows.shape)}."
    return None


def matrix_fault(name: str, matrix: Matrix, count: int | None = None) -> str | None:
    """Of embeddings or their gradients; `count` is how many rows they are of."""
    if matrix.dtype != np.float32 or matrix.ndim != 2:
        return f"{name} must be a float32 matrix [rows, width]. Found {matrix.dtype} {list(matrix.shape)}."
    if count is not None and matrix.shape[0] != count:
        return f"{name} must have one line a row, {count}. Found {matrix.shape[0]}."
    if not kernels.all_finite(matrix):
        return f"{name} must be finite. Found NaN or infinity: a step size too large does that."
    return None


def words_fault(words: Words, count: int) -> str | None:
    """Of masked scores of so many rows."""
    if words.dtype != np.uint64 or words.ndim != 2 or len(words) != count:
        return (
            f"masked scores must be a matrix of uint64 with one line a row, {count}. "
            f"Found {words.dtype} {list(words.shape)}."
        )
    return None


def offer_fault(offer: bytes) -> str | None:
    """Of a client's key and its proof."""
    if 0 < len(offer) <= LARGEST_OFFER:
        return None
    return f"an offer must have 1 to {LARGEST_OFFER} bytes. Found {len(offer)}."


def window_fault(in_flight: int) -> str | None:
    """Of a count of unanswered uploads."""
    if 0 <= in_flight <= LARGEST_WINDOW:
        return None
    return f"in_flight must be in 0..{LARGEST_WINDOW}. Found {in_flight}."


def count_fault(name: str, value: int) -> str | None:
    """Of a count."""
    return f"{name} must be 0 or more. Found {value}." if value < 0 else None


def require(*faults: str | None) -> None:
    """Raises InvalidMessage with the first of the faults, if there is any."""
    for fault in faults:
        if fault:
            raise InvalidMessage(fault)


def require_growth(client: int, sequence: int, before: int) -> None:
    """Raises InvalidMessage unless a message comes after all others of its client."""
    if sequence <= before:
        raise InvalidMessage(f"sequence of client {client} must grow beyond {before}. Found {sequence}.")


class made_here:  # noqa: N801 - read as: with made_here()
    """Around a message of our own making: what is not finite in it is no fault of the other party."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        if isinstance(fault, InvalidMessage):
            raise Diverged(
                f"{fault} Lower optimiser.step_size, or scale the features, and a regression's labels."
            ) from fault


class Explained:
    """A message that says why, in words."""

    __slots__ = ()
    reason: str

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + len(self.reason.encode())
