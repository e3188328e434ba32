"""A server that counts as none can ends its client with one clear error, and does not spoil its state."""

import asyncio

import grpc
import grpc.aio
import pytest

from tests.runtime.grpc.parties import Federation, configuration, within
from vafl.errors import InvalidMessage
from vafl.protocol.messages import Skipped, Welcome
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
