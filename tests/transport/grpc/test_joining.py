"""Clients join, leave and come back over real sockets: which of their streams the server uses."""

import asyncio
import gc
import logging
import threading
import weakref
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import numpy as np
import pytest

from tests.transport.grpc.parties import Federation, complete, configuration, dialled, served, until, upload
from vafl.errors import RemoteFault
from vafl.protocol.messages import Gradient, Join, Refused, Upload, Welcome
from vafl.transport.codec import Codec


def test_a_new_stream_hears_nothing_before_its_welcome():
    """A reply owed from the previous stream comes after Welcome, or the client would process it twice."""

    async def story():
        async with (
            served(rule={"name": "t-sync", "t": 2}) as federation,
            dialled(federation, 0) as first,
            dialled(federation, 1) as other,
        ):
            await first.send(Join(0), upload(0))
            await other.send(Join(1))
            await until(lambda: federation.server.activations == [1, 0])
            async with dialled(federation, 0) as again:
                old = federation.end.connections[0]
                await until(lambda: federation.end.connections[0] is not old)
                await other.send(upload(1))
                await other.receive(Gradient)
                await again.send(Join(0, 1, 0))
                return [await again.receive_next() for _ in range(2)]

    heard = complete(story())
    assert [type(message) for message in heard] == [Welcome, Gradient]


def test_a_stream_has_one_join_and_it_comes_first():
    async def story():
        async with (
            served() as federation,
            dialled(federation, 1) as other,
            dialled(federation, 0) as hasty,
        ):
            await other.send(Join(1))
            await hasty.send(upload(0))
            early = await hasty.receive(Refused)
            await hasty.send(Join(0))
            await hasty.receive(Welcome)
            await hasty.send(Join(0))
            return early, await hasty.receive(Refused), federation.server.activations

    early, late, activations = complete(story())
    assert "VFL-6125" in early.reason
    assert "VFL-6125" in late.reason
    assert activations == [0, 0]


def test_the_server_says_for_whom_it_waits_at_the_start(caplog):
    async def story():
        async with served() as federation, dialled(federation, 1):
            await until(lambda: 1 in federation.end.seen)

    with caplog.at_level(logging.INFO, "vafl.server"):
        complete(story())
    assert "waiting for client-1, client-2, 20 s at most" in caplog.text


def test_a_server_that_starts_without_a_client_names_it_and_what_to_do(caplog):
    async def story():
        async with served(network={"join_timeout": 0.2}) as federation, dialled(federation, 1):
            await until(lambda: federation.end.began is not None)
            return federation.end.missing_at_start

    assert complete(story()) == ["client-1"]
    (warning,) = [each.getMessage() for each in caplog.records if "starting without" in each.getMessage()]
    assert "client-1" in warning
    assert "client-2" not in warning
    assert "network.join_timeout" in warning


def test_a_client_says_when_it_has_joined(caplog):
    """Otherwise the last line in its log about a late server would be that it is out of reach."""

    async def story():
        async with served() as federation, dialled(federation, 1) as other:
            await other.send(Join(1))
            running = asyncio.create_task(federation.client(0).run())
            await until(lambda: "joined the run at 127.0.0.1" in caplog.text)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    with caplog.at_level(logging.INFO, "vafl.client"):
        complete(story())


def test_a_client_that_is_back_before_the_server_has_noticed_that_it_was_gone_stays():
    """While the worker is busy, it handles the Join of the new stream before the end of the old one."""
    busy, over = threading.Event(), threading.Event()

    def hold():
        busy.set()
        over.wait()

    async def story():
        async with served() as federation, dialled(federation, 1) as other:
            end = federation.end
            await other.send(Join(1))
            async with dialled(federation, 0) as first:
                await first.send(Join(0))
                await first.receive(Welcome)
                end._worker.do(hold)
                await until(busy.is_set)
                await other.send(upload(1))
                await until(lambda: end._handler.inbox)
            await until(lambda: 0 not in end.connections)
            async with dialled(federation, 0) as again:
                await again.send(Join(0))
                await until(lambda: len(end._handler.inbox) == 2)
                over.set()
                await again.receive(Welcome)
                await end._worker.settle()
                return set(federation.server.absent)

    assert complete(story()) == set()


@asynccontextmanager
async def training():
    """Train a federation of two clients without end; yield it and the clients' tasks."""
    async with served(stop={"updates": 1_000_000}) as federation:
        running = [asyncio.create_task(federation.client(index).run()) for index in range(2)]
        await until(lambda: federation.server.iteration >= 10)
        yield federation, running
        federation.end.finish("enough")
        await asyncio.gather(*running)


async def goes_on(federation, client):
    before = federation.server.activations[client]
    await until(lambda: federation.server.activations[client] >= before + 10)


def test_a_second_process_with_one_certificate_does_not_take_over_a_run_in_progress():
    """It would continue with a fresh model, unnoticed."""

    async def story():
        async with training() as (federation, _):
            before = federation.end.connections[0]
            with pytest.raises(RemoteFault, match=r"VFL-6111.*client\-1"):
                await federation.client(0).run()
            assert federation.end.connections[0] is before
            await goes_on(federation, 0)

    complete(story())


def test_nor_does_it_when_the_first_one_is_gone():
    async def story():
        async with training() as (federation, running):
            running.pop(0).cancel()
            await until(lambda: 0 in federation.server.absent)
            with pytest.raises(RemoteFault, match=r"VFL-6111.*client\-1"):
                await federation.client(0).run()
            await goes_on(federation, 1)

    complete(story())


def test_a_process_that_resumes_or_replaces_stays_and_the_older_one_ends_for_good(caplog):
    """If they dialled again, the two would evict each other forever."""

    async def story():
        async with training() as (federation, running):
            older = federation.client(0)
            running.append(asyncio.create_task(older.run()))
            older._takes_over = True
            with pytest.raises(RemoteFault, match="VFL-6092"):
                await running.pop(0)
            newer = federation.client(0, takes_over=True)
            running.append(asyncio.create_task(newer.run()))
            with pytest.raises(RemoteFault, match="VFL-6092"):
                await running.pop(1)
            with pytest.raises(RemoteFault, match="VFL-6092"):
                await older.run()  # though its line was cut, and it has not heard
            await goes_on(federation, 0)
            return newer.reconnects

    assert complete(story()) == 0
    assert "client-1 is here again" in caplog.text


def test_a_client_that_hears_nothing_and_dials_again_leaves_no_stream_behind():
    """Unread replies wait on each of its streams, so reconnecting must not fill the server's memory."""

    async def flood(hand):
        for number in range(200):
            rows, embeddings = np.arange(100), np.zeros((100, 4096), np.float32)
            await hand.send(Upload(0, number + 1, number, rows, embeddings))

    async def story():
        model, stop = {"head": "linear", "width": 4096}, {"updates": 1_000_000}
        async with (
            served(
                model=model, stop=stop, evaluation={"every": 1_000_000}, network={"answer_timeout": 2.0}
            ) as federation,
            dialled(federation, 1) as other,
            dialled(federation, 0) as first,
        ):
            connections = federation.end.connections
            await other.send(Join(1))
            await first.send(Join(0))
            flooding = asyncio.create_task(flood(first))
            await until(lambda: 0 in connections and connections[0].queued > 10)
            deaf = weakref.ref(connections[0])
            async with dialled(federation, 0):
                await until(lambda: connections[0] is not deaf())
                waiting = deaf().queued
                await until(lambda: deaf() is None)
            flooding.cancel()
            return waiting

    gc.disable()  # it must be gone by then, not some time later
    try:
        assert complete(story()) < 10  # why it ends, its end, and what the worker was about to say
    finally:
        gc.enable()


@asynccontextmanager
async def brittle_way(address):
    """Start a proxy to `address`; yield its address, and a function that cuts it unnoticed by the server."""
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
            await other.send(Join(1))
            running = asyncio.create_task(federation.client(0).run())
            await until(lambda: federation.server.activations[0] >= 10)
            cut()
            await until(lambda: running.done() or caplog.text.count("client-1 is here again") == 1)
            before = federation.server.activations[0]
            await until(lambda: running.done() or federation.server.activations[0] >= before + 10)
            federation.end.finish("enough")
            return await running

    assert complete(story()) == "enough"


def test_uploads_that_are_skipped_for_a_client_that_is_gone_come_slower_and_the_server_says_why(
    caplog, monkeypatch
):
    monkeypatch.setattr("vafl.run.network_driver._SILENCE", 0.5)
    rule = {"name": "async", "delay_bound": 2, "when_unanswered": "skip"}

    async def story():
        async with served(rule=rule, stop={"updates": 10_000}) as federation:
            running = [asyncio.create_task(federation.client(index).run()) for index in range(2)]
            await until(lambda: federation.server.iteration >= 10)
            running[1].cancel()
            await until(lambda: "was skipped because" in caplog.text)
            skipped = federation.server.activations[0]
            await asyncio.sleep(1.0)
            skipped = federation.server.activations[0] - skipped
            running[1] = asyncio.create_task(federation.client(1, takes_over=True).run())
            before = federation.server.iteration
            await until(lambda: federation.server.iteration >= before + 10)
            return skipped

    with caplog.at_level(logging.WARNING, "vafl.server"):
        skipped = complete(story())
    assert skipped <= 3
    assert "waiting for fresh embeddings from client-2: every upload since" in caplog.text
    assert "gone: client-2" in caplog.text


def test_a_server_that_went_back_hears_nothing_before_the_client_has_saved_that(monkeypatch):
    """This holds even if the next uploads take so long that they are sent separately."""
    federation, events = Federation(configuration(rule={"window": 2})), []
    federation.address = "127.0.0.1:1"
    client = federation.client(0)
    client._after = lambda: events.append("saved")
    client._worker = SimpleNamespace(
        tell=lambda function, *_: events.append(function.__name__), worked=lambda: 0.0, may_wait=True
    )
    monkeypatch.setattr("vafl.transport.grpc.client.HELD_BACK", -1.0)

    def send(contents): ...

    session = SimpleNamespace(welcome=False, answered=0, send=send)
    client._receive(session, Codec().encode(Welcome(0, 0, (0, 0))))
    assert events == ["saved", "send", "_end_turn"]
