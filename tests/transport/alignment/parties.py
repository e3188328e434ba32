"""Server and clients of an alignment over real sockets, all in one process."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import polars as pl

from tests.waiting import LIMIT
from vafl.transport.alignment.client import AlignmentClient
from vafl.transport.alignment.frames import METHOD, PROTOCOL, Terms
from vafl.transport.alignment.server import AlignmentServer
from vafl.transport.grpc.wire import SERVICE
from vafl.transport.settings import NetworkSettings


class Quiet:
    """Counts what it should show."""

    def __init__(self):
        self.total = self.done = 0

    def begin(self, ids):
        self.total += ids

    def advance(self, ids):
        self.done += ids


class Alignments:
    """One alignment: `server` and each client's name with its ids."""

    def __init__(self, records="common", classes=("no", "yes"), **ids):
        self.ids = {name: pl.Series("id", own, pl.String) for name, own in ids.items()}
        self.clients = [name for name in ids if name != "server"]
        self.terms = Terms(PROTOCOL, "run", self.clients, records)
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
        """In the server's place, something that answers each client's stream by this."""
        server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(stream)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._listening.set()
        try:
            yield
        finally:
            await server.stop(0)

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
        """Everybody's result, the server's first: an alignment or an error."""
        work = [self.serve(), *map(self.join, self.clients)]
        return await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), LIMIT)


class Unhurried(Alignments):
    """One that nothing disturbs: a busy machine may be slow, and nobody is given up."""

    patience, heartbeat, answer_timeout = LIMIT, 30.0, LIMIT


def align(**arguments):
    """A whole alignment: (what was kept, by party; everybody's result, by party)."""
    made = []

    async def story():
        made.append(Unhurried(**arguments))
        return await made[0].all()

    results = asyncio.run(story())
    return made[0].kept, dict(zip(("server", *made[0].clients), results, strict=True))
