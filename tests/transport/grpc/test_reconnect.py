"""A client dials again, or gives up, when the server is down, slow or silent, or refuses it."""

import asyncio
from contextlib import asynccontextmanager, nullcontext, suppress

import grpc
import grpc.aio
import pytest

from tests.transport.grpc.parties import Federation, complete, configuration, dialled, served, until
from vafl.errors import RemoteFault, Stalled, Unauthenticated
from vafl.protocol.messages import Join

CLOSED = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed"
REFUSED = "failed to connect to all addresses; last error: UNKNOWN: Connection refused"


def test_patience_is_for_a_server_that_is_gone_and_not_for_one_that_has_nothing_to_say():
    async def story():
        async with served(rule={"name": "t-sync", "t": 2}) as federation, dialled(federation, 1) as other:
            await other.send(Join(1))
            federation.overrides = {"patience": 1.5}
            running = asyncio.create_task(federation.client(0).run())
            await until(lambda: federation.server.activations[0] == 1)
            await asyncio.sleep(2.0)
            first = federation.end.connections[0]
            first.end()  # the server drops the stream
            await until(lambda: running.done() or federation.end.connections.get(0, first) is not first)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return running.cancelled()

    assert complete(story())


def test_a_client_whose_heart_beats_faster_than_the_server_s_is_not_thrown_out():
    """Regression: the third ping within the server's minimum interval closed the connection, every 3 s."""

    async def story():
        async with served(rule={"name": "t-sync", "t": 2}) as federation, dialled(federation, 1) as other:
            await other.send(Join(1))
            federation.overrides = {"heartbeat": 0.5}
            client = federation.client(0)
            running = asyncio.create_task(client.run())
            with suppress(TimeoutError):
                await asyncio.wait_for(until(lambda: client.reconnects > 0), 4.0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return client.reconnects

    assert complete(story()) == 0


def failed(details):
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, (), (), details)


def test_a_connection_closed_at_once_is_a_refusal_only_if_it_happens_again_and_again():
    """A server that is killed during a handshake closes the connection in the same way."""
    federation = Federation(configuration())
    federation.address = "127.0.0.1:1"
    client = federation.client(0)
    for details in (CLOSED, REFUSED, CLOSED, CLOSED, CLOSED, CLOSED):
        client._reconnect.judge(failed(details))
    with pytest.raises(Unauthenticated, match="VFL-6182"):
        client._reconnect.judge(failed(CLOSED))


def test_after_a_welcome_patience_rules_however_often_connections_are_closed():
    """A proxy whose server is down accepts connections and closes them."""

    async def story():
        async with served(stop={"updates": 1_000_000}) as federation, dialled(federation, 1) as other:
            await other.send(Join(1))
            client = federation.client(0)
            running = asyncio.create_task(client.run())
            await until(lambda: federation.server.activations[0] > 0)
            first = federation.end.connections[0]
            first.end()  # the server drops the stream
            await until(lambda: federation.end.connections.get(0, first) is not first)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return client

    reach = complete(story())._reconnect
    for _ in range(20):
        reach.judge(failed(CLOSED))
    reach.heard -= 1000.0
    with pytest.raises(Stalled, match="VFL-6113"):
        reach.judge(failed(CLOSED))


@pytest.mark.parametrize(
    ("largest", "width", "said"),
    [
        (1000, 3, "VFL-6092"),
        (20_000, 256, "VFL-6112"),
    ],
)
def test_parties_that_disagree_on_the_largest_message_do_not_dial_for_ever(largest, width, said):
    """A message may pass the receiver's gRPC limit, which is at least that of terms, and fail the codec's."""

    async def story():
        model, network = {"head": "linear", "width": width}, {"largest_message": largest}
        sections = {"schedule": {"batch_size": 64}, "model": model, "network": network}
        async with served(**sections) as federation, dialled(federation, 1) as other:
            await other.send(Join(1))
            with pytest.raises(RemoteFault, match=said):
                await federation.client(0).run()

    complete(story())


@asynccontextmanager
async def slow_way(address, seconds):
    """Start a proxy to `address` that delays all bytes in both directions; return the proxy's address."""
    ends = []

    async def carry(reader, writer):
        while content := await reader.read(1 << 16):
            asyncio.get_running_loop().call_later(seconds, writer.write, content)

    async def accept(reader, writer):
        onward, outward = await asyncio.open_connection(*address.split(":"))
        ends.extend((writer, outward))
        await asyncio.gather(carry(reader, outward), carry(onward, writer))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as listener:
        yield "{}:{}".format(*listener.sockets[0].getsockname())
        for end in ends:
            end.close()


def test_a_long_way_to_the_server_is_no_reason_to_give_up_a_handshake():
    async def story():
        async with served() as federation, slow_way(federation.address, 1.3) as address:
            federation.address = address
            running = asyncio.create_task(federation.client(0).run())
            await until(lambda: 0 in federation.end.seen)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    complete(story())


class Closed:
    """A stream that the server ends after the first message."""

    said = 0

    async def write(self, frame):
        self.said += 1
        if self.said > 1:
            raise asyncio.InvalidStateError("RPC already finished.")

    async def read(self):
        return grpc.aio.EOF

    async def code(self):
        return grpc.StatusCode.FAILED_PRECONDITION

    async def details(self):
        return "no client of this run"

    async def initial_metadata(self):
        return ()

    trailing_metadata = initial_metadata

    def cancel(self):
        pass


def test_a_refusal_that_comes_before_the_client_has_said_all_is_heard(monkeypatch):
    federation = Federation(configuration())
    federation.address = "127.0.0.1:1"
    client = federation.client(0)
    monkeypatch.setattr("vafl.transport.grpc.client.dial", lambda *_: nullcontext(Closed()))
    with pytest.raises(RemoteFault, match=r"VFL-6111.*client\-1.*no client of this run"):
        complete(client.run())


def test_a_server_that_hangs_up_is_dialled_once_at_a_time():
    """Regression: closed channels kept dialling on their own, ten times a second after some minutes."""

    async def story():
        dials = []

        async def hang_up(_, writer):
            dials.append(writer)
            writer.close()

        listener = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        federation = Federation(configuration())
        federation.address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        client = federation.client(0)
        running = asyncio.create_task(client.run())
        await asyncio.sleep(1.5)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        listener.close()
        return len(dials), client.reconnects + 1

    dials, attempts = complete(story())
    assert 2 <= dials <= attempts
