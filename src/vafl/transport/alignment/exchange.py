"""The private set intersection of one client and the server: points go both ways, tags go to the server.

The server learns which of its ids the client has, and their places in the client's shuffled order. The client
learns only how many ids the server has. Secrets and orders are made here and are never sent.
"""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Protocol

import polars as pl

from vafl.arrays import Integers
from vafl.data.alignment.curve import POINT, TAG, blind_ids, bound, new_salt, new_secret, tag_points
from vafl.data.alignment.matching import match, shuffled
from vafl.errors import InvalidMessage
from vafl.transport.alignment.compute_pool import ComputePool
from vafl.transport.alignment.frames import CHUNK, ITEM, Kind, pack
from vafl.transport.alignment.stream import AlignmentStream, together


class Progress(Protocol):
    """Shows how far an exchange has come."""

    def begin(self, ids: int) -> None:
        """Start an exchange that processes this many ids."""

    def advance(self, ids: int) -> None:
        """Record that this many more ids are processed."""


async def answer(
    stream: AlignmentStream,
    pool: ComputePool,
    party: str,
    ids: pl.Series,
    server_count: int,
    progress: Progress,
) -> Integers:
    """Run a client's side and return the order in which its ids were sent.

    Args:
        party: the client.
        server_count: how many ids the server has announced.
    """
    secret, salt, order = new_secret(), new_salt(), shuffled(len(ids))
    await stream.send(pack(Kind.SALT, salt))

    async def send_points() -> None:
        async for points in pool.work(blind_ids, secret, _chunks(ids, order)):
            await stream.send(pack(Kind.POINTS, points))
            progress.advance(len(points) // POINT)

    async def send_tags() -> None:
        make = partial(tag_points, salt=bound(salt, party))
        async for tags in pool.work(make, secret, _receive_points(stream, server_count)):
            await stream.send(pack(Kind.TAGS, tags))
            progress.advance(len(tags) // TAG)

    await together(send_points(), send_tags())
    return order


class Offer:
    """The server's ids as points: computed once, and sent to every client while they are computed.

    Args:
        ids: the server's ids.
    """

    def __init__(self, ids: pl.Series) -> None:
        self.ids, self.order = ids, shuffled(len(ids))
        self.secret = new_secret()
        self._chunks: list[bytes] = []
        self._grown = asyncio.Condition()

    async def compute(self, pool: ComputePool) -> None:
        """Compute all points. `send` may run at the same time."""
        async for points in pool.work(blind_ids, self.secret, _chunks(self.ids, self.order)):
            async with self._grown:
                self._chunks.append(points)
                self._grown.notify_all()

    async def send(self, stream: AlignmentStream) -> None:
        """Send all points to one client, each chunk as soon as it is computed."""
        for place in range(-(-len(self.ids) // CHUNK)):
            async with self._grown:
                while len(self._chunks) <= place:
                    await self._grown.wait()
            # Send without holding the condition, so that a slow client does not hold up the others.
            await stream.send(pack(Kind.POINTS, self._chunks[place]))


async def find(
    stream: AlignmentStream,
    pool: ComputePool,
    party: str,
    offer: Offer,
    client_count: int,
    progress: Progress,
) -> tuple[Integers, Integers]:
    """Run the server's side with one client and return the ids that both have.

    Args:
        party: the client.
        client_count: how many ids the client has announced.

    Returns:
        The places of the common ids at the server, and in the order in which the client has sent its ids.
    """
    server_tags, client_tags = bytearray(), bytearray()

    async def receive_points() -> AsyncIterator[bytes]:
        """Yield the client's points, and collect the tags that arrive between them."""
        missing_points, missing_tags = client_count, len(offer.ids)
        while missing_points or missing_tags:
            kind, body = await stream.receive(Kind.POINTS, Kind.TAGS)
            if kind is Kind.POINTS:
                missing_points -= _items(kind, body, missing_points)
                yield body
            else:
                missing_tags -= _items(kind, body, missing_tags)
                server_tags.extend(body)
                progress.advance(len(body) // TAG)

    async def receive() -> None:
        # The salt is bound to the client's name, so tags of relayed points compare with no other client's.
        _, salt = await stream.receive(Kind.SALT)
        make = partial(tag_points, salt=bound(salt, party))
        async for tags in pool.work(make, offer.secret, receive_points()):
            client_tags.extend(tags)
            progress.advance(len(tags) // TAG)

    await together(offer.send(stream), receive())
    server_places, client_places = await asyncio.to_thread(match, server_tags, client_tags)
    return offer.order[server_places], client_places


async def _receive_points(stream: AlignmentStream, count: int) -> AsyncIterator[bytes]:
    """Yield the server's points, as many as it has announced."""
    while count > 0:
        kind, body = await stream.receive(Kind.POINTS)
        count -= _items(kind, body, count)
        yield body


def _items(kind: Kind, body: bytes, missing: int) -> int:
    """Return the number of points or tags in a message.

    Every message must be full, or hold all that are missing. Otherwise a peer could send tiny messages and
    keep an exchange going almost forever.
    """
    count, expected = len(body) // ITEM[kind], min(missing, CHUNK)
    if count != expected:
        raise InvalidMessage(
            "VFL-6021", f"the next message must be {kind.name} of {expected:,} ids. Found {count:,}."
        )
    return count


async def _chunks(ids: pl.Series, order: Integers) -> AsyncIterator[list[str]]:
    for at in range(0, len(order), CHUNK):
        yield ids.gather(order[at : at + CHUNK]).to_list()
