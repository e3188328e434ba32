"""The server and the clients of an alignment over real sockets, in one process."""

import asyncio
from contextlib import asynccontextmanager

import polars as pl

from tests.waiting import LIMIT
from vafl.transport.alignment.client import AlignmentClient
from vafl.transport.alignment.frames import METHOD, PROTOCOL, AlignmentTerms
from vafl.transport.alignment.server import AlignmentServer
from vafl.transport.grpc.admission import serve_streams
from vafl.transport.settings import NetworkSettings


class Quiet:
    """Record the progress instead of showing it."""

    def __init__(self):
        self.total = self.done = 0

    def begin(self, ids):
        self.total += ids

    def advance(self, ids):
        self.done += ids


class Alignments:
    """One alignment. The arguments are the ids of `server` and of each client."""

    def __init__(self, records="common", classes=("no", "yes"), **ids):
        self.ids = {name: pl.Series("id", own, pl.String) for name, own in ids.items()}
        self.clients = [name for name in ids if name != "server"]
        self.terms = AlignmentTerms(PROTOCOL, "run", self.clients, records)
        self.kept, self.progress = {}, {name: Quiet() for name in ids}
        self._listening = asyncio.Event()
        self.server = AlignmentServer(
            self.ids["server"],
            classes,
            self.terms,
            self.settings("127.0.0.1:0"),
            None,
            1,
            self.progress["server"],
            lambda found: self.kept.__setitem__("server", found),
        )

    patience, heartbeat, answer_timeout = 20.0, 1.0, 5.0

    def settings(self, address):
        return NetworkSettings(
            address=address,
            security="plaintext",
            heartbeat=self.heartbeat,
            patience=self.patience,
            answer_timeout=self.answer_timeout,
        )

    @asynccontextmanager
    async def served_by(self, stream):
        """Serve each client's stream with this function, in place of the server."""
        async with serve_streams(METHOD, stream, self.settings("127.0.0.1:0"), None) as self.address:
            self._listening.set()
            yield

    async def serve(self):
        def listens(address):
            self.address = address
            self._listening.set()

        return await self.server.serve(listens)

    async def join(self, party, terms=None):
        await self._listening.wait()
        client = AlignmentClient(
            party,
            self.ids[party],
            terms or self.terms,
            self.settings(self.address),
            None,
            1,
            self.progress[party],
            lambda found: self.kept.__setitem__(party, found),
        )
        return await client.run()

    async def all(self):
        """Return the result of every party, the server's first: an alignment or an error."""
        work = [self.serve(), *map(self.join, self.clients)]
        return await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), LIMIT)


class Unhurried(Alignments):
    """Run an undisturbed alignment. Its timeouts are long enough for a busy machine."""

    patience, heartbeat, answer_timeout = LIMIT, 30.0, LIMIT


def align(**arguments):
    """Run an alignment; return what each party has stored, and each party's result."""
    made = []

    async def story():
        made.append(Unhurried(**arguments))
        return await made[0].all()

    results = asyncio.run(story())
    return made[0].kept, dict(zip(("server", *made[0].clients), results, strict=True))
