"""The exchange itself, at either end of a line: points go both ways, tags go to the server.

The server learns which of its ids the client has, and at which places of the client's shuffled order; the
client learns nothing but how many ids the server has. Secrets and orders are made here and never leave.
"""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Protocol

import polars as pl

from vafl.data.alignment.curve import POINT, TAG, blind_ids, bound, new_salt, new_secret, tag_points
from vafl.data.alignment.matching import Places, match, shuffled
from vafl.errors import InvalidMessage
from vafl.transport.alignment.compute_pool import ComputePool
from vafl.transport.alignment.frames import CHUNK, ITEM, Kind, pack
from vafl.transport.alignment.stream import AlignmentStream, together


class Progress(Protocol):
    """Who shows how far it is."""

    def begin(self, ids: int) -> None:
        """So many ids are to be dealt with."""

    def advance(self, ids: int) -> None:
        """So many more are."""


async def answer(
    line: AlignmentStream, crew: ComputePool, party: str, ids: pl.Series, theirs: int, progress: Progress
) -> Places:
    """A client's side; gives the order in which its ids were sent.

    Args:
        party: the client.
        theirs: how many ids the server says it has.
    """
    secret, salt, order = new_secret(), new_salt(), shuffled(len(ids))
    await line.say(pack(Kind.SALT, salt))

    async def offer() -> None:
        async for points in crew.work(blind_ids, secret, _chunks(ids, order)):
            await line.say(pack(Kind.POINTS, points))
            progress.advance(len(points) // POINT)

    async def tag() -> None:
        make = partial(tag_points, salt=bound(salt, party))
        async for tags in crew.work(make, secret, _points(line, theirs)):
            await line.say(pack(Kind.TAGS, tags))
            progress.advance(len(tags) // TAG)

    await together(offer(), tag())
    return order


class Offer:
    """The server's ids as points, computed once for all clients, said to each as they come to be.

    Args:
        ids: the server's own.
    """

    def __init__(self, ids: pl.Series) -> None:
        self.ids, self.order = ids, shuffled(len(ids))
        self.secret = new_secret()
        self._chunks: list[bytes] = []
        self._grown = asyncio.Condition()

    async def compute(self, crew: ComputePool) -> None:
        async for points in crew.work(blind_ids, self.secret, _chunks(self.ids, self.order)):
            async with self._grown:
                self._chunks.append(points)
                self._grown.notify_all()

    async def say(self, line: AlignmentStream) -> None:
        for place in range(-(-len(self.ids) // CHUNK)):
            async with self._grown:
                while len(self._chunks) <= place:
                    await self._grown.wait()
            await line.say(pack(Kind.POINTS, self._chunks[place]))


async def find(
    line: AlignmentStream, crew: ComputePool, party: str, offer: Offer, theirs: int, progress: Progress
) -> tuple[Places, Places]:
    """The server's side with one client; gives its own ids that are common, and their places there.

    Args:
        party: the client.
        theirs: how many ids the client says it has.
    """
    own_tags, their_tags = bytearray(), bytearray()

    async def points() -> AsyncIterator[bytes]:
        """The client's points; tags that come in between are kept."""
        missing_points, missing_tags = theirs, len(offer.ids)
        while missing_points or missing_tags:
            kind, body = await line.hear(Kind.POINTS, Kind.TAGS)
            if kind is Kind.POINTS:
                missing_points -= _items(kind, body, missing_points)
                yield body
            else:
                missing_tags -= _items(kind, body, missing_tags)
                own_tags.extend(body)
                progress.advance(len(body) // TAG)

    async def listen() -> None:
        _, salt = await line.hear(Kind.SALT)
        make = partial(tag_points, salt=bound(salt, party))
        async for tags in crew.work(make, offer.secret, points()):
            their_tags.extend(tags)
            progress.advance(len(tags) // TAG)

    await together(offer.say(line), listen())
    places, at = await asyncio.to_thread(match, own_tags, their_tags)
    return offer.order[places], at


async def _points(line: AlignmentStream, count: int) -> AsyncIterator[bytes]:
    """The server's points, as many as it said."""
    while count > 0:
        kind, body = await line.hear(Kind.POINTS)
        count -= _items(kind, body, count)
        yield body


def _items(kind: Kind, body: bytes, missing: int) -> int:
    """How many points or tags: a full message or all that are missing, so that each brings the end nearer."""
    count, expected = len(body) // ITEM[kind], min(missing, CHUNK)
    if count != expected:
        raise InvalidMessage(
            "VFL-6021", f"{kind.name} of {expected:,} ids come next, no more and no fewer. Found {count:,}."
        )
    return count


async def _chunks(ids: pl.Series, order: Places) -> AsyncIterator[list[str]]:
    for at in range(0, len(order), CHUNK):
        yield ids.gather(order[at : at + CHUNK]).to_list()
