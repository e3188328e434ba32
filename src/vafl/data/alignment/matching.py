"""Tags compared, rows chosen and numbered: all that follows once the points have been exchanged."""

import secrets
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import polars as pl

from vafl.data.alignment.curve import TAG
from vafl.errors import InvalidMessage

Places = npt.NDArray[np.int64]
Buffer = bytes | bytearray


def shuffled(count: int) -> Places:
    """An order that nobody can predict: random bits from the operating system, sorted."""
    return np.argsort(np.frombuffer(secrets.token_bytes(8 * count), np.uint64), kind="stable")


def match(own: Buffer, theirs: Buffer) -> tuple[Places, Places]:
    """Where the same tags stand: places among the own ones and among theirs.

    Raises:
        InvalidMessage: a tag is there twice, so somebody sent an id twice or no honest points.
    """
    tables = [_table(tags) for tags in (own, theirs)]
    for table in tables:
        if table.select("first", "second").is_duplicated().any():
            raise InvalidMessage("VFL-2041", "each id must be sent once. Found one more than once.")
    left, right = tables
    found = left.join(right, on=("first", "second"), how="inner", suffix=" of theirs")
    return found["place"].to_numpy(), found["place of theirs"].to_numpy()


def _table(tags: Buffer) -> pl.DataFrame:
    halves = np.frombuffer(tags, np.uint64).reshape(-1, TAG // 8)
    return pl.DataFrame(
        {"first": halves[:, 0], "second": halves[:, 1], "place": np.arange(len(halves), dtype=np.int64)}
    )


def common(count: int, matches: Sequence[Places]) -> Places:
    """Those of `count` places that are in every one of the matches."""
    everywhere = np.ones(count, bool)
    for places in matches:
        here = np.zeros(count, bool)
        here[places] = True
        everywhere &= here
    return np.flatnonzero(everywhere)


def number(count: int, chosen: Places) -> Places:
    """For each of `count` places its row number, in random order from 0; -1 for those not chosen."""
    numbers = np.full(count, -1, np.int64)
    numbers[chosen] = shuffled(len(chosen))
    return numbers
