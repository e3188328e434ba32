"""Checks that messages apply to their fields, and the limits of the fields."""

from collections.abc import Sequence

import numpy as np

from vafl.arrays import Matrix, RowIds, Words
from vafl.errors import Diverged, InvalidMessage
from vafl.protocol.settings import LARGEST_WINDOW

MARK_BYTES = 16  # size of a ledger's mark
LARGEST_OFFER = 4096  # bytes of a public key and its proof
LONGEST_GROUP = 200  # bytes of the name of a feature group
MOST_GROUPS = 10_000  # feature groups that one client may name
EVERYTHING = "*"  # stands for all features of the client, in place of a group's name


def require_rows(rows: RowIds) -> None:
    """Raise InvalidMessage unless `rows` is a vector of int64."""
    if rows.dtype != np.int64 or rows.ndim != 1:
        raise InvalidMessage(
            "VFL-4021", f"rows must be a vector of int64. Found {rows.dtype} of shape {list(rows.shape)}."
        )


def require_matrix(name: str, matrix: Matrix, count: int | None = None) -> None:
    """Raise InvalidMessage unless `matrix` is finite float32 [rows, width], with `count` rows if given."""
    if matrix.dtype != np.float32 or matrix.ndim != 2:
        raise InvalidMessage(
            "VFL-4022",
            f"{name} must be a float32 matrix [rows, width]. Found {matrix.dtype} of shape "
            f"{list(matrix.shape)}.",
        )
    if count is not None and matrix.shape[0] != count:
        raise InvalidMessage(
            "VFL-4023", f"{name} must have one line for each of {count} rows. Found {matrix.shape[0]}."
        )
    if not np.isfinite(matrix).all():
        raise InvalidMessage(
            "VFL-4024", f"{name} must be finite. Found NaN or infinity. The step size may be too large."
        )


def require_words(words: Words, count: int) -> None:
    """Raise InvalidMessage unless `words` is a matrix of uint64 with `count` rows."""
    if words.dtype != np.uint64 or words.ndim != 2 or len(words) != count:
        raise InvalidMessage(
            "VFL-4025",
            f"masked scores must be a matrix of uint64 with one line for each of {count} rows. "
            f"Found {words.dtype} of shape {list(words.shape)}.",
        )


def require_offer(offer: bytes) -> None:
    """Raise InvalidMessage unless the size of an offer (key and proof) is within the limits."""
    if not 0 < len(offer) <= LARGEST_OFFER:
        raise InvalidMessage(
            "VFL-4026", f"an offer must have 1 to {LARGEST_OFFER} bytes. Found {len(offer)}."
        )


def require_mark(mark: bytes) -> None:
    """Raise InvalidMessage unless the mark has the size of a ledger's mark."""
    if len(mark) != MARK_BYTES:
        raise InvalidMessage(
            "VFL-4027", f"the mark of a ledger must have {MARK_BYTES} bytes. Found {len(mark)}."
        )


def require_counts(**counts: int) -> None:
    """Raise InvalidMessage if one of the named counts is negative."""
    for name, value in counts.items():
        if value < 0:
            raise InvalidMessage("VFL-4028", f"{name} must be 0 or more. Found {value}.")


def require_window(in_flight: int) -> None:
    """Raise InvalidMessage unless a client may have this many uploads in flight."""
    if not 0 <= in_flight <= LARGEST_WINDOW:
        raise InvalidMessage("VFL-4029", f"in_flight must be in 0..{LARGEST_WINDOW}. Found {in_flight}.")


def require_some(rows: RowIds) -> None:
    """Raise InvalidMessage if an upload has no rows."""
    if not rows.size:
        raise InvalidMessage("VFL-4030", "an upload needs at least one row. Found none.")


def require_growth(client: int, sequence: int, sequences: Sequence[int]) -> None:
    """Raise InvalidMessage unless `sequence` is larger than the last one of this client, in `sequences`."""
    before = sequences[client]
    if sequence <= before:
        raise InvalidMessage(
            "VFL-4031", f"the sequence of client {client} must grow beyond {before}. Found {sequence}."
        )


def require_group(name: bytes) -> str:
    """Return the name of a feature group as text; raise InvalidMessage unless it is printable."""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        text = ""
    if not (0 < len(name) <= LONGEST_GROUP and text.isprintable() and text):
        raise InvalidMessage(
            "VFL-4032",
            f"the name of a feature group must be printable UTF-8 of 1 to {LONGEST_GROUP} bytes. Found "
            f"{name[:40]!r}.",
        )
    return text


def require_groups(names: tuple[bytes, ...]) -> None:
    """Raise InvalidMessage unless these are distinct names of feature groups."""
    if len(names) > MOST_GROUPS or len(set(names)) < len(names):
        raise InvalidMessage(
            "VFL-4033",
            f"a client may name at most {MOST_GROUPS:,} feature groups, each once. "
            f"Found {len(names):,} names, {len(set(names)):,} of them distinct.",
        )
    for name in names:
        if require_group(name) == EVERYTHING:
            raise InvalidMessage(
                "VFL-4034",
                f'the name "{EVERYTHING}" stands for all features. Found it as the name of a feature group. '
                "Rename the group.",
            )


class made_here:  # noqa: N801 - read as: with made_here()
    """Wraps the creation of our own messages: turns InvalidMessage into Diverged.

    A NaN in a message that this party creates comes from its own model, not from the other party.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        if isinstance(fault, InvalidMessage):
            raise Diverged(
                "VFL-4035",
                f"{fault} Lower optimiser.step_size, or scale the features, and the labels of a regression.",
            ) from fault
