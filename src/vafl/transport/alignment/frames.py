"""What the parties say to each other while they align: one kind and one body a message, checked here."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from vafl.data.alignment.curve import POINT, SALT, TAG
from vafl.errors import InvalidMessage
from vafl.transport.alignment.reasons import LONGEST_REASON
from vafl.transport.grpc.wire import SERVICE

METHOD = "Align"
PATH = f"/{SERVICE}/{METHOD}"
PROTOCOL = 5
CHUNK = 2048  # points or tags in a message: less than 0.1 s of arithmetic
LARGEST_FRAME = 1 << 20
LARGEST_SET = 1 << 27  # ids of one party
_PAIR = np.dtype([("place", "<u4"), ("row", "<u4")])
ROW = _PAIR.itemsize


class Kind(IntEnum):
    """What a message is."""

    BEAT = 0  # a sign of life
    HELLO = 1  # a client's terms
    BEGIN = 2  # the server has so many ids, and everybody is here
    POINTS = 3
    TAGS = 4
    AGAIN = 5  # the server: once more, with loosened ids, since hardly any is common
    COUNT = 6  # a client has so many of those
    RESULT = 7  # the server: the facts of the alignment, and how many rows this client has
    ROWS = 8
    RECEIVED = 9  # a client has all that it needs
    DONE = 10  # the server: so has everybody
    FAILED = 11  # the server goes no further, and why
    BUSY = 12  # a sign of life of a server that has heard from somebody since the last one
    SALT = 13  # a client's, of the tags of one exchange


ITEM = {Kind.POINTS: POINT, Kind.TAGS: TAG, Kind.ROWS: ROW, Kind.SALT: SALT}
_FACTS = 8192
_LARGEST = {
    **dict.fromkeys((Kind.HELLO, Kind.BEGIN, Kind.AGAIN, Kind.COUNT), _FACTS),
    Kind.RESULT: LARGEST_FRAME - 1,
    Kind.FAILED: LONGEST_REASON,
}


def pack(kind: Kind, body: bytes = b"") -> bytes:
    """A message."""
    return bytes((kind,)) + body


def unpack(content: bytes) -> tuple[Kind, bytes]:
    """The message's kind and its body, of a size that this kind can have.

    Raises:
        InvalidMessage: it is none of ours.
    """
    if not content or content[0] >= len(Kind):
        raise InvalidMessage(
            "VFL-6031", f"a message begins with its kind. Found {content[:1].hex() or 'nothing'}."
        )
    kind, body = Kind(content[0]), content[1:]
    size, most = ITEM.get(kind), 1 if kind is Kind.SALT else CHUNK
    if size and (not body or len(body) % size or len(body) > size * most):
        raise InvalidMessage(
            "VFL-6032", f"{kind.name} holds 1 to {most} items of {size} bytes. Found {len(body):,} bytes."
        )
    if not size and len(body) > _LARGEST.get(kind, 0):
        raise InvalidMessage("VFL-6033", f"{kind.name} is shorter than that. Found {len(body):,} bytes.")
    return kind, body


def pack_facts(kind: Kind, facts: Mapping[str, Any]) -> bytes:
    """A message of plain facts."""
    return pack(kind, json.dumps(facts).encode())


def unpack_facts(body: bytes, **kinds: type) -> dict[str, Any]:
    """Plain facts with exactly these names and types."""
    try:
        facts = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage("VFL-6034", "facts travel as JSON. Found something else.") from error
    if not isinstance(facts, dict) or {name: type(value) for name, value in facts.items()} != kinds:
        raise InvalidMessage("VFL-6035", f"facts needed: {', '.join(kinds)}. Found {facts!r:.200}.")
    return facts


def checked_count(count: int) -> int:
    """How many ids the other party says it has."""
    if not 0 < count <= LARGEST_SET:
        raise InvalidMessage("VFL-6036", f"a party has 1 to {LARGEST_SET:,} ids. Found {count:,}.")
    return count


def unpack_count(body: bytes) -> int:
    """How many ids the other party says it has."""
    return checked_count(unpack_facts(body, ids=int)["ids"])


def unpack_loosened(body: bytes, announced: int) -> int:
    """How many ids it has when their forms are loosened, which merges some and makes none.

    Args:
        announced: how many it said it has: so that nobody asks about more ids than its log shows.
    """
    count = unpack_count(body)
    if count > announced:
        raise InvalidMessage(
            "VFL-6037", f"{announced:,} ids cannot become more by loosening them. Found {count:,}."
        )
    return count


def pack_rows(places: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> list[bytes]:
    """Places in the order a client sent its points, and their row numbers, as messages."""
    pairs = np.empty(len(places), _PAIR)
    pairs["place"], pairs["row"] = places, rows
    return [pack(Kind.ROWS, pairs[at : at + CHUNK].tobytes()) for at in range(0, len(pairs), CHUNK)]


def unpack_rows(content: bytes | bytearray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All bodies of `pack_rows` together, as places and row numbers."""
    pairs = np.frombuffer(content, _PAIR)
    return pairs["place"].astype(np.int64), pairs["row"].astype(np.int64)


@dataclass(frozen=True)
class Terms:
    """What every party must have set alike before anything is computed."""

    protocol: int
    run_id: str
    parties: list[str]
    records: str

    def difference(self, other: "Terms") -> str:
        """The terms that differ, in words; empty if none do."""
        mine, theirs = asdict(self), asdict(other)
        return "; ".join(
            f"{name} {value!r} here, {theirs[name]!r} there"
            for name, value in mine.items()
            if value != theirs[name]
        )


def pack_hello(terms: Terms, ids: int) -> bytes:
    """A client's first message."""
    return pack_facts(Kind.HELLO, {**asdict(terms), "ids": ids})


def unpack_hello(body: bytes) -> tuple[Terms, int]:
    """A client's terms, and how many ids it has."""
    facts = unpack_facts(body, protocol=int, run_id=str, parties=list, records=str, ids=int)
    return Terms(**{name: facts[name] for name in Terms.__annotations__}), checked_count(facts["ids"])
