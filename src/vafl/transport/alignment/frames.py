"""The messages of an alignment: one byte for the kind, then a body. Every message is checked here.

A client's first message has no kind: its terms, see `AlignmentTerms`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from vafl.arrays import Integers
from vafl.data.alignment.curve import POINT, SALT, TAG
from vafl.errors import InvalidMessage
from vafl.transport.alignment.reasons import LONGEST_REASON
from vafl.transport.grpc.terms import Terms
from vafl.transport.grpc.wire import SERVICE

METHOD = "Align"
PATH = f"/{SERVICE}/{METHOD}"
PROTOCOL = 6
CHUNK = 2048  # points or tags per message, which take less than 0.1 s to compute
LARGEST_FRAME = 1 << 20  # bytes
LARGEST_SET = 1 << 27  # ids of one party
_PAIR = np.dtype([("place", "<u4"), ("row", "<u4")])
ROW = _PAIR.itemsize


class Kind(IntEnum):
    """The kind of a message."""

    COUNT = 0  # client: how many ids it has, or how many loosened ids
    PROGRESS = 1  # server: it has received a message of some client within the last heartbeat
    BEGIN = 2  # server: all clients are here, and how many ids the server has
    SALT = 3  # client: the salt of the tags of one exchange
    POINTS = 4  # both: blinded ids
    TAGS = 5  # client: tags of the server's points
    AGAIN = 6  # server: repeat the exchange with loosened ids, since hardly any ids match
    RESULT = 7  # server: the facts of the alignment, and how many rows this client has
    ROWS = 8  # server: places of the client's ids, and their row numbers
    RECEIVED = 9  # client: it has all its rows
    DONE = 10  # server: every client has its rows, and the server's alignment is on disk
    FAILED = 11  # server: the alignment has ended, and why


ITEM = {Kind.POINTS: POINT, Kind.TAGS: TAG, Kind.ROWS: ROW, Kind.SALT: SALT}  # bytes per item
_FACTS = 8192  # bytes
_LARGEST = {  # bytes of a body that does not hold items; 0 for kinds that are not listed
    **dict.fromkeys((Kind.COUNT, Kind.BEGIN, Kind.AGAIN), _FACTS),
    Kind.RESULT: LARGEST_FRAME - 1,
    Kind.FAILED: LONGEST_REASON,
}


def pack(kind: Kind, body: bytes = b"") -> bytes:
    """Return a message of this kind."""
    return bytes((kind,)) + body


def unpack(content: bytes) -> tuple[Kind, bytes]:
    """Return a message's kind and body.

    Raises:
        InvalidMessage: the kind is unknown, or the body has a size that this kind cannot have.
    """
    if not content or content[0] >= len(Kind):
        raise InvalidMessage(
            "VFL-6031",
            f"a message must begin with a kind from 0 to {len(Kind) - 1}. Found "
            f"{content[:1].hex() or 'nothing'}.",
        )
    kind, body = Kind(content[0]), content[1:]
    size, most = ITEM.get(kind), 1 if kind is Kind.SALT else CHUNK
    if size and (not body or len(body) % size or len(body) > size * most):
        raise InvalidMessage(
            "VFL-6032",
            f"{kind.name} must hold 1 to {most} items of {size} bytes. Found {len(body):,} bytes.",
        )
    if not size and len(body) > (largest := _LARGEST.get(kind, 0)):
        raise InvalidMessage(
            "VFL-6033", f"{kind.name} must have at most {largest:,} bytes. Found {len(body):,} bytes."
        )
    return kind, body


def pack_facts(kind: Kind, facts: Mapping[str, Any]) -> bytes:
    """Return a message whose body is a JSON object."""
    return pack(kind, json.dumps(facts).encode())


def unpack_facts(body: bytes, **kinds: type) -> dict[str, Any]:
    """Return the JSON object of a body, which must have exactly these names and types."""
    try:
        facts = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage("VFL-6034", "a message of facts must be JSON. Found other content.") from error
    if not isinstance(facts, dict) or {name: type(value) for name, value in facts.items()} != kinds:
        raise InvalidMessage(
            "VFL-6035",
            f"a message must have exactly these facts, in their types: {', '.join(kinds)}. Found "
            f"{facts!r:.200}.",
        )
    return facts


def unpack_count(body: bytes) -> int:
    """Return the number of ids that the other party announces."""
    count: int = unpack_facts(body, ids=int)["ids"]
    if not 0 < count <= LARGEST_SET:
        raise InvalidMessage("VFL-6036", f"a party must have 1 to {LARGEST_SET:,} ids. Found {count:,}.")
    return count


def unpack_loosened(body: bytes, announced: int) -> int:
    """Return the number of loosened ids that the other party announces.

    Loosening merges ids and never makes new ones. A larger number would let the peer test more ids than this
    party's log shows.

    Args:
        announced: how many ids the peer has announced before.
    """
    count = unpack_count(body)
    if count > announced:
        raise InvalidMessage(
            "VFL-6037", f"{announced:,} ids cannot become more by loosening them. Found {count:,}."
        )
    return count


def pack_rows(places: Integers, rows: Integers) -> list[bytes]:
    """Return messages with places in the order in which a client has sent its ids, and their row numbers."""
    pairs = np.empty(len(places), _PAIR)
    pairs["place"], pairs["row"] = places, rows
    return [pack(Kind.ROWS, pairs[at : at + CHUNK].tobytes()) for at in range(0, len(pairs), CHUNK)]


def unpack_rows(content: bytes | bytearray) -> tuple[Integers, Integers]:
    """Return places and row numbers from the joined bodies of `pack_rows`."""
    pairs = np.frombuffer(content, _PAIR)
    return pairs["place"].astype(np.int64), pairs["row"].astype(np.int64)


@dataclass(frozen=True)
class AlignmentTerms(Terms):
    """The terms of an alignment.

    Attributes:
        parties: names of the clients.
        records: data.records.
    """

    parties: list[str]
    records: str
