"""What every message is checked for, and how long its parts are on the wire."""

import numpy as np
import numpy.typing as npt

from vafl import kernels
from vafl.errors import Diverged, InvalidMessage
from vafl.protocol.rows import Matrix, Rows
from vafl.protocol.settings import LARGEST_WINDOW

HEADER_BYTES = 48  # kind, encoding, sequence, activation, iteration, lengths
MARK_BYTES = 16  # of a ledger's mark
LARGEST_OFFER = 4096  # bytes of a key and the proof whose it is
LONGEST_GROUP = 200  # bytes of the name of a group of features
MOST_GROUPS = 10_000
EVERYTHING = "*"  # in place of a group's name: all features of the client
ROW_BYTES = 4  # a row travels as an unsigned 32-bit number
Words = npt.NDArray[np.uint64]


def require_rows(rows: Rows) -> None:
    """Raises InvalidMessage unless these may be row numbers. So with all of these."""
    if rows.dtype != np.int64 or rows.ndim != 1:
        raise InvalidMessage(
            "VFL-4021", f"rows must be a vector of int64. Found {rows.dtype} {list(rows.shape)}."
        )


def require_matrix(name: str, matrix: Matrix, count: int | None = None) -> None:
    """Of embeddings or their gradients; `count` is how many rows they are of."""
    if matrix.dtype != np.float32 or matrix.ndim != 2:
        raise InvalidMessage(
            "VFL-4022",
            f"{name} must be a float32 matrix [rows, width]. Found {matrix.dtype} {list(matrix.shape)}.",
        )
    if count is not None and matrix.shape[0] != count:
        raise InvalidMessage(
            "VFL-4023", f"{name} must have one line a row, {count}. Found {matrix.shape[0]}."
        )
    if not kernels.all_finite(matrix):
        raise InvalidMessage(
            "VFL-4024", f"{name} must be finite. Found NaN or infinity: a step size too large does that."
        )


def require_words(words: Words, count: int) -> None:
    """Of masked scores of so many rows."""
    if words.dtype != np.uint64 or words.ndim != 2 or len(words) != count:
        raise InvalidMessage(
            "VFL-4025",
            f"masked scores must be a matrix of uint64 with one line a row, {count}. "
            f"Found {words.dtype} {list(words.shape)}.",
        )


def require_offer(offer: bytes) -> None:
    """Of a client's key and its proof."""
    if not 0 < len(offer) <= LARGEST_OFFER:
        raise InvalidMessage(
            "VFL-4026", f"an offer must have 1 to {LARGEST_OFFER} bytes. Found {len(offer)}."
        )


def require_mark(mark: bytes) -> None:
    """Raise InvalidMessage unless this can be the mark of a ledger."""
    if len(mark) != MARK_BYTES:
        raise InvalidMessage(
            "VFL-4027", f"the mark of a ledger must have {MARK_BYTES} bytes. Found {len(mark)}."
        )


def require_counts(**counts: int) -> None:
    """Of counts, by their names."""
    for name, value in counts.items():
        if value < 0:
            raise InvalidMessage("VFL-4028", f"{name} must be 0 or more. Found {value}.")


def require_window(in_flight: int) -> None:
    """Of a count of unanswered uploads."""
    if not 0 <= in_flight <= LARGEST_WINDOW:
        raise InvalidMessage("VFL-4029", f"in_flight must be in 0..{LARGEST_WINDOW}. Found {in_flight}.")


def require_some(rows: Rows) -> None:
    """Of the rows of an upload."""
    if not rows.size:
        raise InvalidMessage("VFL-4030", "an upload needs at least one row. Found none.")


def require_growth(client: int, sequence: int, before: int) -> None:
    """Raises InvalidMessage unless a message comes after all others of its client."""
    if sequence <= before:
        raise InvalidMessage(
            "VFL-4031", f"sequence of client {client} must grow beyond {before}. Found {sequence}."
        )


def require_group(name: bytes) -> str:
    """Return the name of a group of features as text; raise InvalidMessage unless it can be shown."""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        text = ""
    if not (0 < len(name) <= LONGEST_GROUP and text.isprintable() and text):
        raise InvalidMessage(
            "VFL-4032",
            f"the name of a group must be printable UTF-8 of 1 to {LONGEST_GROUP} bytes. Found "
            f"{name[:40]!r}.",
        )
    return text


def require_groups(names: tuple[bytes, ...]) -> None:
    """Raise InvalidMessage unless these are distinct names of groups."""
    if len(names) > MOST_GROUPS or len(set(names)) < len(names):
        raise InvalidMessage(
            "VFL-4033",
            f"a client names at most {MOST_GROUPS:,} groups, each once. Found {len(names):,} names.",
        )
    for name in names:
        if require_group(name) == EVERYTHING:
            raise InvalidMessage("VFL-4034", f'"{EVERYTHING}" stands for all features and names no group.')


class made_here:  # noqa: N801 - read as: with made_here()
    """Around a message of our own making: what is not finite in it is no fault of the other party."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        if isinstance(fault, InvalidMessage):
            raise Diverged(
                "VFL-4035",
                f"{fault} Lower optimiser.step_size, or scale the features, and a regression's labels.",
            ) from fault


class Explained:
    """A message that says why, in words."""

    __slots__ = ()
    reason: str

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + len(self.reason.encode())
