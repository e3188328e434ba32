"""A server and its clients over real sockets in one process, and hand-made client streams."""

import asyncio
from collections import deque
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import numpy as np

from tests.waiting import LIMIT
from vafl.config import from_document
from vafl.models.losses import LOSSES
from vafl.protocol.messages import Upload
from vafl.protocol.table import EmbeddingTable
from vafl.run.agreement import make_terms
from vafl.run.assembly import make_client, make_server, widths
from vafl.run.controller import RunController
from vafl.run.network_driver import NetworkDriver
from vafl.run.plan import make_plan
from vafl.transport.codec import Codec
from vafl.transport.grpc.client import FederationClient
from vafl.transport.grpc.server import FederationServer
from vafl.transport.grpc.wire import PATH

ROWS = np.arange(16)


def configuration(**sections):
    network = {
        "address": "127.0.0.1:0",
        "security": "plaintext",
        "join_timeout": 20.0,
        **sections.pop("network", {}),
    }
    document = {
        "data": {"name": "iris"},
        "schedule": {"batch_size": 16},
        "stop": {"updates": 60},
        "evaluation": {"every": 20},
        **sections,
        "network": network,
    }
    return from_document(document)


class Federation:
    """A server and its clients, on the test's event loop."""

    def __init__(self, config):
        self.config, self.plan = config, make_plan(config)
        rows, tests = self.plan.data.rows, self.plan.data.parts.test
        summed = config.model.combine == "sum"
        table = EmbeddingTable(rows + tests, widths(self.plan), summed=summed)
        self.server = make_server(self.plan, table)
        self.points = []
        controller = RunController(
            config.stop, config.evaluation, self.plan.task.metrics, checkpoint_every=10
        )
        self.driver = NetworkDriver(
            controller=controller,
            held_out=np.arange(rows, rows + tests),
            labels=self.plan.data.labels[rows:],
            metrics=self.plan.task.metrics,
            loss=LOSSES[self.plan.task.loss],
            observe=self.points.append,
            checkpoint=self.server.uploads_done,
            answer_timeout=config.network.answer_timeout,
        )
        self.names = [party.name for party in self.plan.data.parties]
        self.terms = make_terms(self.plan)
        self.end = FederationServer(self.server, self.names, self.terms, config.network, None, self.driver)
        self.end._away = 1.0  # many tests leave a client behind on purpose
        self.listening = asyncio.Event()

    async def serve(self):
        await self.end.serve(self._listens)

    def _listens(self, address):
        self.address = address
        self.listening.set()

    def client(self, index, terms=None, privacy=None, **options):
        network = configuration(network={"address": self.address, **self.overrides}).network
        client = make_client(
            self.plan, index, privacy=privacy, with_held_out=True, refresh_rows=self.refresh_rows
        )
        return FederationClient(client, self.names[index], terms or self.terms, network, None, **options)

    overrides: dict = {}  # noqa: RUF012
    refresh_rows = None


async def run_all(federation):
    serving = asyncio.create_task(federation.serve())
    await federation.listening.wait()
    clients = [federation.client(index) for index in range(len(federation.names))]
    reasons = await asyncio.gather(*(client.run() for client in clients))
    await serving
    return clients, reasons


def complete(coroutine):
    """Run a coroutine to its end. The limit only turns a hang into a failure."""

    async def limited():
        return await asyncio.wait_for(coroutine, LIMIT)

    return asyncio.run(limited())


def upload(client, activation=0, sequence=1):
    return Upload(client, sequence, activation, ROWS, np.zeros((16, 3), np.float32))


class Hand:
    """A client's stream whose messages the test sends."""

    def __init__(self, stream, client):
        self._stream, self._client = stream, client
        self._heard = deque()

    async def send(self, *messages):
        for message in messages:
            await self._stream.write(Codec().encode(message))

    async def receive(self, kind):
        """Return the next message of this kind, and drop others before it."""
        while True:
            message = await self.receive_next()
            if isinstance(message, kind):
                return message

    async def receive_next(self):
        if not self._heard:
            self._heard += Codec().frames(await self._stream.read())
        return Codec().from_server(self._heard.popleft(), self._client)


@asynccontextmanager
async def dialled(federation, client):
    async with grpc.aio.insecure_channel(federation.address) as channel:
        stream = channel.stream_stream(PATH)(metadata=(("vafl-party", federation.names[client]),))
        await stream.write(federation.terms.to_bytes())
        yield Hand(stream, client)


@asynccontextmanager
async def served(**sections):
    """Serve a federation while the block runs."""
    federation = Federation(configuration(**sections))
    serving = asyncio.create_task(federation.serve())
    await federation.listening.wait()
    yield federation
    federation.end.finish("enough")
    await serving


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)
