"""A server that counts as none can ends its client with one clear error, and does not spoil its state; one
that asks and asks and takes no answer waits on its own side."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import numpy as np
import pytest

from tests.runtime.grpc.parties import Federation, configuration, until, within
from vafl.errors import InvalidMessage
from vafl.protocol.messages import Request, Skipped, Welcome
from vafl.runtime.codec import Codec
from vafl.runtime.grpc.wire import METHOD, SERVICE


async def told(*said):
    """What comes of a client whose server says this, and the client."""

    async def stream(_, context):
        for _ in ("terms", "join"):
            await context.read()
        for message in said:
            await context.write(Codec().encode(message))
        while isinstance(await context.read(), bytes):
            pass

    server, federation = grpc.aio.server(), Federation(configuration())
    handler = grpc.stream_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    federation.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    client = federation.client(0)
    (error,) = await asyncio.gather(client.run(), return_exceptions=True)
    await server.stop(0)
    return error, client.client


@pytest.mark.parametrize(
    "said",
    [
        [Welcome(0, 0, ())],
        [Welcome(0, 0, (0, 0, 0))],
        [Welcome(0, 0, (2**63, 0))],
        [Welcome(0, -5, (0, 0))],
        [Welcome(0, 0, (0, 0)), Skipped(0, 0, 0, (1,), "lost")],
    ],
)
def test_where_no_run_can_stand_is_the_server_s_fault_and_changes_nothing(said):
    error, client = within(20, told(*said))
    assert isinstance(error, InvalidMessage), error
    assert "must count its steps and the uploads of 2 clients" in str(error)
    assert client.applied == 0
    assert client.iteration == -1


class Deaf:
    """The stream of a server that asks 20 questions at a time, and takes no answer."""

    def __init__(self):
        self._said, self._asked, self._never = 0, 0, asyncio.Event()

    def stream_stream(self, path):
        return lambda metadata: self

    async def read(self):
        await asyncio.sleep(0)
        if not self._asked:
            self._asked = 1
            return Codec().encode(Welcome(0, 0, (0, 0)))
        numbers = range(self._asked, self._asked + 20)
        self._asked += 20
        (content,) = Codec().contents([Request(0, number, np.arange(100)) for number in numbers])
        return content

    async def write(self, content):
        self._said += 1
        if self._said > 2:  # the terms, and the join
            await self._never.wait()

    def cancel(self):
        pass


def test_answers_that_the_server_does_not_take_are_not_made(monkeypatch):
    """Not even to what is asked at one time, or has been read already; and that does not keep a client from
    ending."""

    async def story():
        stream, federation = Deaf(), Federation(configuration())

        @asynccontextmanager
        async def channel(*_):
            yield stream

        monkeypatch.setattr("vafl.runtime.grpc.client.open_channel", channel)
        federation.address, federation.overrides = "127.0.0.1:1", {"largest_message": 10_000}
        client, made = federation.client(0), []
        answer = client.client._answer
        client.client._answer = lambda request: made.append(request.number) or answer(request)
        running = asyncio.create_task(client.run())
        await until(lambda: len(made) > 5)
        await asyncio.sleep(0.3)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return len(made)

    assert within(20, story()) * 1648 <= 2 * 10_000 + 2 * 1648
