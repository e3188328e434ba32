"""What befalls a federation over real sockets: streams replaced, floods, interrupts, late comers."""

import asyncio
import logging
import threading
from collections import deque
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest
import torch

from tests.runtime.grpc.test_federation import Federation, configuration, within
from vafl.errors import RemoteFault, Stalled, Unauthenticated
from vafl.protocol.messages import Decline, Gradient, Join, Refused, Request, Upload, Welcome
from vafl.runtime.codec import Codec
from vafl.runtime.grpc.connection import Allowance
from vafl.runtime.grpc.wire import PATH

ROWS = torch.arange(16)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr("vafl.runtime.grpc.server._GRACE", 1.0)


def upload(client, activation=0, sequence=1):
    return Upload(client, sequence, activation, ROWS, torch.zeros(16, 3))


class Hand:
    """A client's stream, spoken by hand."""

    def __init__(self, stream, client):
        self._stream, self._client = stream, client
        self._heard = deque()

    async def say(self, *messages):
        for message in messages:
            await self._stream.write(Codec().encode(message))

    async def hear(self, kind):
        """The next message of this kind; others before it are dropped."""
        while True:
            message = await self.hear_next()
            if isinstance(message, kind):
                return message

    async def hear_next(self):
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
    """A federation that serves while the block runs."""
    federation = Federation(configuration(**sections))
    serving = asyncio.create_task(federation.serve())
    await federation.listening.wait()
    yield federation
    federation.end.finish("enough")
    await serving


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


def test_a_new_stream_hears_nothing_before_its_welcome():
    """An answer that was due to the stream before it comes after, or the client would answer it twice."""

    async def story():
        async with (
            served(rule={"name": "t-sync", "t": 2}) as federation,
            dialled(federation, 0) as first,
            dialled(federation, 1) as other,
        ):
            await first.say(Join(0), upload(0))
            await other.say(Join(1))
            await until(lambda: federation.server.activations == [1, 0])
            async with dialled(federation, 0) as again:
                old = federation.end.connections[0]
                await until(lambda: federation.end.connections[0] is not old)
                await other.say(upload(1))
                await other.hear(Gradient)
                await again.say(Join(0, 1, 0))
                return [await again.hear_next() for _ in range(2)]

    heard = within(30, story())
    assert [type(message) for message in heard] == [Welcome, Gradient]


def test_a_stream_has_one_join_and_it_comes_first():
    async def story():
        async with (
            served() as federation,
            dialled(federation, 1) as other,
            dialled(federation, 0) as hasty,
        ):
            await other.say(Join(1))
            await hasty.say(upload(0))
            early = await hasty.hear(Refused)
            await hasty.say(Join(0))
            await hasty.hear(Welcome)
            await hasty.say(Join(0))
            return early, await hasty.hear(Refused), federation.server.activations

    early, late, activations = within(30, story())
    assert "first message is a join" in early.reason
    assert "first message is a join" in late.reason
    assert activations == [0, 0]


def test_a_client_that_is_back_before_the_server_has_noticed_that_it_was_gone_stays():
    """While the worker is busy: the new stream's join is taken before the old one's end is."""
    busy, over = threading.Event(), threading.Event()

    def hold():
        busy.set()
        over.wait()

    async def story():
        async with served() as federation, dialled(federation, 1) as other:
            end = federation.end
            await other.say(Join(1))
            async with dialled(federation, 0) as first:
                await first.say(Join(0))
                await first.hear(Welcome)
                end._worker.do(hold)
                await until(busy.is_set)
                await other.say(upload(1))
                await until(lambda: end._inbox)
            await until(lambda: 0 not in end.connections)
            async with dialled(federation, 0) as again:
                await again.say(Join(0))
                await until(lambda: len(end._inbox) == 2)
                over.set()
                await again.hear(Welcome)
                await end._worker.settle()
                return set(federation.server.absent)

    assert within(30, story()) == set()


def test_of_two_processes_with_one_certificate_the_newer_stays_and_the_older_ends(caplog):
    """Dialling again, they would take each other's place for ever."""

    async def story():
        async with served(stop={"updates": 1_000_000}) as federation:
            running = [asyncio.create_task(federation.client(index).run()) for index in range(2)]
            await until(lambda: federation.server.iteration >= 10)
            newer = federation.client(0)
            running.append(asyncio.create_task(newer.run()))
            with pytest.raises(RemoteFault, match="another process has taken this party's place"):
                await running[0]
            before = federation.server.activations[0]
            await until(lambda: federation.server.activations[0] >= before + 10)
            federation.end.finish("enough")
            await asyncio.gather(*running[1:])
            return newer.reconnects

    assert within(30, story()) == 0
    assert "client-1 is here again" in caplog.text


def test_a_client_that_hears_nothing_and_dials_again_leaves_no_stream_behind():
    """Its answers lie on each of them: dialling, it would fill the server's memory."""

    async def flood(hand):
        for number in range(200):
            rows, embeddings = torch.arange(100), torch.zeros(100, 4096)
            await hand.say(Upload(0, number + 1, number, rows, embeddings))

    async def story():
        model, stop = {"head": "linear", "width": 4096}, {"updates": 1_000_000}
        async with (
            served(model=model, stop=stop, evaluation={"every": 1_000_000}) as federation,
            dialled(federation, 1) as other,
            dialled(federation, 0) as first,
        ):
            connections = federation.end.connections
            await other.say(Join(1))
            await first.say(Join(0))
            flooding = asyncio.create_task(flood(first))
            await until(lambda: 0 in connections and connections[0].outbox.qsize() > 10)
            deaf = connections[0]
            async with dialled(federation, 0):
                await until(lambda: connections[0] is not deaf)
                waiting = deaf.outbox.qsize()
                await until(deaf.reader.done)
            flooding.cancel()
            return waiting

    assert within(30, story()) == 2  # why it ends, and its end


def test_dialling_again_buys_no_messages():
    async def story():
        async with served(network={"messages_per_second": 0.001}) as federation:
            async with dialled(federation, 1) as other:
                await other.say(Join(1))
                for _ in range(2):
                    async with dialled(federation, 0) as fast:
                        await fast.say(Join(0), *[upload(0, 99)] * 8)
                        refused = [await fast.hear(Refused) for _ in range(8)]
            return refused

    assert all("at most 0.001 messages a second" in refusal.reason for refusal in within(30, story()))


def test_an_allowance_grows_with_time_up_to_a_second():
    allowance = Allowance(rate=100.0, left=0.0)
    assert not allowance.take()
    allowance.at -= 60.0
    assert sum(allowance.take() for _ in range(200)) in (100, 101)


def test_a_flood_is_answered_and_counted_but_does_not_fill_the_log(caplog):
    async def story():
        async with (
            served() as federation,
            dialled(federation, 1) as other,
            dialled(federation, 0) as hostile,
        ):
            await other.say(Join(1))
            await hostile.say(Join(0), *[upload(0, 99)] * 100)
            refused = [await hostile.hear(Refused) for _ in range(100)]
            await until(lambda: 0 not in federation.end.connections)  # it was shown the door
            return refused, federation.end.violations

    with caplog.at_level(logging.WARNING, "vafl.server"):
        refused, violations = within(30, story())
    assert len(refused) == violations["client-1"] == 100
    assert 10 <= caplog.text.count("refused from client-1") <= 20


def test_a_client_that_comes_back_after_the_end_is_told():
    async def story():
        async with served(stop={"updates": 100_000}) as federation:
            running = [asyncio.create_task(federation.client(index).run()) for index in range(2)]
            await until(lambda: federation.server.iteration >= 10)
            running[0].cancel()
            await until(lambda: 0 in federation.server.absent)
            federation.end.finish("enough")
            await running[1]
            return await federation.client(0).run()

    assert within(30, story()) == "enough"


def test_the_server_s_words_are_one_line_without_control_characters():
    async def story():
        async with served(stop={"updates": 1_000_000}) as federation:
            running = [asyncio.create_task(federation.client(index).run()) for index in range(2)]
            await until(lambda: federation.server.iteration >= 10)
            federation.end.finish("enough\x1b[2J\x07\r\nerror: \u202eno")
            return await asyncio.gather(*running)

    assert within(30, story()) == ["enough[2Jerror: no"] * 2


def test_clients_are_not_told_what_the_server_s_failure_says_of_its_files():
    def full():
        raise OSError(28, "No space left on device", "secret/head.part")

    async def story():
        federation = Federation(configuration())
        federation.conductor.checkpoint = full
        serving = asyncio.create_task(federation.serve())
        await federation.listening.wait()
        clients = (federation.client(index).run() for index in range(2))
        ends = await asyncio.gather(*clients, return_exceptions=True)
        with pytest.raises(OSError, match="secret"):
            await serving
        return ends

    ends = within(30, story())
    assert [str(end) for end in ends] == [
        "the server ended the run without a result: the server failed; its log says why."
    ] * 2
    assert {end.exit_code for end in ends} == {4}


def test_what_fails_when_the_run_is_over_takes_no_result_away():
    async def story():
        async with served() as federation, dialled(federation, 0):
            await until(lambda: 0 in federation.end.seen)
            federation.end.finish("enough")
            await until(federation.end._over.is_set)
            federation.end.fail(OSError("too late"))

    within(30, story())


def test_an_interrupt_before_everybody_has_joined_ends_the_run():
    async def story():
        federation = Federation(configuration(network={"join_timeout": 1000.0}))
        federation.conductor.interrupted = True
        await federation.serve()
        return federation.points

    assert len(within(20, story())) == 1


def test_the_server_says_for_whom_it_waits_at_the_start(caplog):
    async def story():
        async with served() as federation, dialled(federation, 1):
            await until(lambda: 1 in federation.end.seen)

    with caplog.at_level(logging.INFO, "vafl.server"):
        within(20, story())
    assert "waiting for client-1, client-2, 20 s at most" in caplog.text


def test_checkpoints_do_not_wait_for_an_evaluation():
    """A client that is slow to say the rows held out must not make a crash cost more than the interval."""
    federation = Federation(configuration())
    server, conductor, saved = federation.server, federation.conductor, []
    server.absent = set()
    conductor.checkpoint = lambda: saved.append(server.iteration) or server.settled()
    end = SimpleNamespace(began=0.0, now=0.0, updates=0, server=server, traffic=[], finish=None, seen={0, 1})
    assert [type(said) for said in conductor(end)] == [Request, Request]
    server.iteration = end.updates = 10
    conductor(end)
    assert saved == [10]
    assert federation.points == []


def test_no_step_follows_the_evaluation_that_turns_out_to_be_the_last():
    """The run is told to stop while an evaluation is under way: what is saved must be what was measured."""
    federation = Federation(configuration())
    server, conductor, ended = federation.server, federation.conductor, []
    server.absent = set()
    end = SimpleNamespace(
        began=0.0, now=0.0, updates=7, server=server, traffic=[], finish=ended.append, seen={0, 1}
    )
    end.parties, server.iteration = federation.names, 7
    asked = conductor(end)
    for request in asked:
        server.receive(Decline(request.client, 1, request.number, "not now"))
    conductor.interrupted = True
    conductor(end)
    assert ended == ["the server was told to stop"]
    assert server.last_iteration == 7


def test_a_client_that_is_told_to_end_ends_after_its_turn():
    """Its state is saved next: a turn that goes on meanwhile would tear it."""

    async def story():
        async with served() as federation, dialled(federation, 1) as other:
            await other.say(Join(1))
            client = federation.client(0)
            in_turn, over = threading.Event(), threading.Event()

            def slow():
                in_turn.set()
                threading.Event().wait(0.3)
                over.set()

            client._after = slow
            running = asyncio.create_task(client.run())
            await until(in_turn.is_set)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            return over.is_set()

    assert within(30, story())


def test_uploads_that_are_skipped_for_a_client_that_is_gone_come_slower_and_the_server_says_why(
    caplog, monkeypatch
):
    monkeypatch.setattr("vafl.runtime.grpc.conductor._SILENCE", 0.5)
    rule = {"name": "async", "delay_bound": 2, "when_unanswered": "skip"}

    async def story():
        async with served(rule=rule, stop={"updates": 10_000}) as federation:
            running = [asyncio.create_task(federation.client(index).run()) for index in range(2)]
            await until(lambda: federation.server.iteration >= 10)
            running[1].cancel()
            await until(lambda: "was skipped for want of them" in caplog.text)
            skipped = federation.server.activations[0]
            await asyncio.sleep(1.0)
            skipped = federation.server.activations[0] - skipped
            running[1] = asyncio.create_task(federation.client(1).run())
            before = federation.server.iteration
            await until(lambda: federation.server.iteration >= before + 10)
            return skipped

    with caplog.at_level(logging.WARNING, "vafl.server"):
        skipped = within(60, story())
    assert skipped <= 3
    assert "waiting for fresh embeddings from client-2: every upload since" in caplog.text
    assert "gone: client-2" in caplog.text


def test_patience_is_for_a_server_that_is_gone_and_not_for_one_that_has_nothing_to_say():
    async def story():
        async with served(rule={"name": "t-sync", "t": 2}) as federation, dialled(federation, 1) as other:
            await other.say(Join(1))
            federation.overrides = {"patience": 1.5}
            running = asyncio.create_task(federation.client(0).run())
            await until(lambda: federation.server.activations[0] == 1)
            await asyncio.sleep(2.0)
            first = federation.end.connections[0]
            first.outbox.put_nowait(None)  # the server drops the stream
            await until(lambda: running.done() or federation.end.connections.get(0, first) is not first)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return running.cancelled()

    assert within(20, story())


def test_a_client_whose_heart_beats_faster_than_the_server_s_is_not_thrown_out():
    """gRPC's third ping within the time that the server allowed for one ended the connection, every 3 s."""

    async def story():
        async with served(rule={"name": "t-sync", "t": 2}) as federation, dialled(federation, 1) as other:
            await other.say(Join(1))
            federation.overrides = {"heartbeat": 0.5}
            client = federation.client(0)
            running = asyncio.create_task(client.run())
            with suppress(TimeoutError):
                await asyncio.wait_for(until(lambda: client.reconnects > 0), 4.0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return client.reconnects

    assert within(20, story()) == 0


CLOSED = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed"
REFUSED = "failed to connect to all addresses; last error: UNKNOWN: Connection refused"


def failed(details):
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, (), (), details)


def test_a_connection_closed_at_once_is_a_refusal_only_if_it_happens_again_and_again():
    """A server that is killed amid a handshake closes it, too."""
    federation = Federation(configuration())
    federation.address = "127.0.0.1:1"
    client = federation.client(0)
    for details in (CLOSED, REFUSED, CLOSED, CLOSED, CLOSED, CLOSED):
        client._reach.judge(failed(details))
    with pytest.raises(Unauthenticated, match="Its log says why"):
        client._reach.judge(failed(CLOSED))


def test_after_a_welcome_patience_rules_however_often_connections_are_closed():
    """A forwarder whose server is away accepts connections, and closes them."""

    async def story():
        async with served(stop={"updates": 1_000_000}) as federation, dialled(federation, 1) as other:
            await other.say(Join(1))
            client = federation.client(0)
            running = asyncio.create_task(client.run())
            await until(lambda: federation.server.activations[0] > 0)
            first = federation.end.connections[0]
            first.outbox.put_nowait(None)  # the server drops the stream
            await until(lambda: federation.end.connections.get(0, first) is not first)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            return client

    reach = within(20, story())._reach
    for _ in range(20):
        reach.judge(failed(CLOSED))
    reach.heard -= 1000.0
    with pytest.raises(Stalled, match="patience sets how long to try"):
        reach.judge(failed(CLOSED))


@pytest.mark.parametrize(
    ("largest", "width", "said"),
    [(1000, 3, r"Found 1,072\. network\.largest_message sets the limit"), (20_000, 256, "larger than max")],
)
def test_parties_that_disagree_on_the_largest_message_do_not_dial_for_ever(largest, width, said):
    """What a limit below that of the terms lets through is refused when it is read."""

    async def story():
        model, network = {"head": "linear", "width": width}, {"largest_message": largest}
        sections = {"schedule": {"batch_size": 64}, "model": model, "network": network}
        async with served(**sections) as federation, dialled(federation, 1) as other:
            await other.say(Join(1))
            with pytest.raises(RemoteFault, match=said):
                await federation.client(0).run()

    within(20, story())


@asynccontextmanager
async def slow_way(address, seconds):
    """A way to `address` on which everything takes so long, each way; gives where it begins."""
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


@asynccontextmanager
async def brittle_way(address):
    """A way to `address`; gives where it begins, and what cuts it there, unnoticed at the other end."""
    near, far = [], []

    async def carry(reader, writer):
        with suppress(ConnectionError):
            while content := await reader.read(1 << 16):
                writer.write(content)

    async def accept(reader, writer):
        onward, outward = await asyncio.open_connection(*address.split(":"))
        near.append(writer)
        far.append(outward)
        await asyncio.gather(carry(reader, outward), carry(onward, writer))

    def cut():
        while near:
            near.pop().transport.abort()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as listener:
        yield "{}:{}".format(*listener.sockets[0].getsockname()), cut
        for end in (*near, *far):
            end.close()


def test_a_client_whose_way_was_cut_takes_its_own_place_before_the_server_has_noticed(caplog):
    async def story():
        async with (
            served(stop={"updates": 1_000_000}) as federation,
            dialled(federation, 1) as other,
            brittle_way(federation.address) as (federation.address, cut),
        ):
            await other.say(Join(1))
            running = asyncio.create_task(federation.client(0).run())
            await until(lambda: federation.server.activations[0] >= 10)
            cut()
            await until(lambda: running.done() or caplog.text.count("client-1 is here again") == 1)
            before = federation.server.activations[0]
            await until(lambda: running.done() or federation.server.activations[0] >= before + 10)
            federation.end.finish("enough")
            return await running

    assert within(30, story()) == "enough"


def test_a_long_way_to_the_server_is_no_reason_to_give_up_a_handshake():
    async def story():
        async with served() as federation, slow_way(federation.address, 1.3) as address:
            federation.address = address
            running = asyncio.create_task(federation.client(0).run())
            await until(lambda: 0 in federation.end.seen)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    within(20, story())


class Closed:
    """A channel whose streams the server ends after the first message."""

    said = 0

    async def __aenter__(self):
        return self

    async def __aexit__(self, *raised):
        pass

    def stream_stream(self, path):
        return lambda metadata: self

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
    monkeypatch.setattr("vafl.runtime.grpc.client.open_channel", lambda *_: Closed())
    with pytest.raises(RemoteFault, match="refused client-1: no client of this run"):
        within(20, client.run())


def test_a_turn_of_the_worker_that_finds_nothing_to_do_does_nothing():
    """What arrives while the worker takes the messages before it may be taken with them."""

    async def story():
        async with served() as federation:
            for _ in range(3):
                federation.end._worker.do(federation.end._handle)
            await federation.end._worker.settle()
            return federation.end._failure

    assert within(20, story()) is None


def test_more_frames_than_may_travel_together_are_refused_in_words():
    async def story():
        async with (
            served() as federation,
            dialled(federation, 1) as other,
            dialled(federation, 0) as hostile,
        ):
            await other.say(Join(1))
            await hostile.say(Join(0))
            await hostile._stream.write(Codec().encode(upload(0)) * 200)
            refused = await hostile.hear(Refused)
            return refused.reason, federation.server.activations

    reason, activations = within(20, story())
    assert "frames travel together. Found more" in reason
    assert activations == [0, 0]
