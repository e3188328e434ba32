"""Match tags, choose rows and number them: the steps that follow the exchange of points."""

import secrets
from collections.abc import Sequence

import numpy as np
import polars as pl

from vafl.arrays import Integers
from vafl.data.alignment.curve import TAG
from vafl.errors import InvalidMessage

Buffer = bytes | bytearray


def shuffled(count: int) -> Integers:
    """Return a random permutation of 0..count-1, drawn from the operating system's secure generator."""
    # Sorting random 64-bit keys gives a uniform permutation; ties are too rare to bias it.
    return np.argsort(np.frombuffer(secrets.token_bytes(8 * count), np.uint64), kind="stable")


def match(own: Buffer, theirs: Buffer) -> tuple[Integers, Integers]:
    """Return the positions of the tags that both sides have, in `own` and in `theirs`.

    Raises:
        InvalidMessage: one side has the same tag twice, so it sent an id twice or forged its points.
    """
    tables = [_table(tags) for tags in (own, theirs)]
    for table in tables:
        if table.select("first", "second").is_duplicated().any():
            raise InvalidMessage(
                "VFL-2041",
                "each id must be sent once. Found one that was sent more than once. Remove duplicate ids "
                "at both parties, and run `vafl align` again.",
            )
    left, right = tables
    matched = left.join(right, on=("first", "second"), how="inner", suffix=" of theirs")
    return matched["place"].to_numpy(), matched["place of theirs"].to_numpy()


def _table(tags: Buffer) -> pl.DataFrame:
    """Return 16-byte tags as two uint64 columns to join on, and the position of each tag."""
    halves = np.frombuffer(tags, np.uint64).reshape(-1, TAG // 8)
    return pl.DataFrame(
        {"first": halves[:, 0], "second": halves[:, 1], "place": np.arange(len(halves), dtype=np.int64)}
    )


def common(count: int, matches: Sequence[Integers]) -> Integers:
    """Return the positions in 0..count-1 that are in every one of `matches`."""
    in_all = np.ones(count, bool)
    for places in matches:
        matched = np.zeros(count, bool)
        matched[places] = True
        in_all &= matched
    return np.flatnonzero(in_all)


def number(count: int, chosen: Integers) -> Integers:
    """Return a row number for each of `count` positions: random order from 0, and -1 if not chosen."""
    numbers = np.full(count, -1, np.int64)
    numbers[chosen] = shuffled(len(chosen))
    return numbers
