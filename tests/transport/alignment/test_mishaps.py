"""Parties that disagree, break the protocol or leave: every party learns why, and none stores anything."""

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import grpc.aio
import pytest

from tests.transport.alignment.parties import LIMIT, Alignments
from vafl.data.alignment.curve import POINT, blind_ids, new_salt
from vafl.errors import InvalidMessage, RemoteFault, RunError, Stalled
from vafl.transport.alignment.frames import CHUNK, PATH, PROTOCOL, Kind, pack, pack_facts, pack_hello
from vafl.transport.grpc.wire import CLAIM

SALT = pack(Kind.SALT, new_salt())
GOOD = blind_ids(bytes(range(32)), ["a", "b"])  # always the same: they are part of test names


@asynccontextmanager
async def stream(made, party="bank"):
    """A client's stream whose messages the test sends."""
    await made._listening.wait()
    async with grpc.aio.insecure_channel(made.address) as channel:
        yield channel.stream_stream(PATH)(metadata=((CLAIM, party),))


async def said_by_server(call, unheard=(Kind.BEAT, Kind.BUSY)):
    """Return the next message that is not a heartbeat, or the reason if the server has ended the stream."""
    while True:
        try:
            content = await call.read()
        except grpc.aio.AioRpcError as error:
            return error.details()
        if content is grpc.aio.EOF:
            return await call.details()
        if content[:1] == pack(Kind.FAILED):
            call.cancel()
            return content[1:].decode()
        if content[0] not in unheard:
            return content


def story(*said, salt=SALT, **changes):
    """Send this after a valid HELLO and SALT; return the server's error and what the client receives."""

    async def play():
        made = Alignments(server=["a", "b"], bank=["b", "c"], **changes)
        serving = asyncio.create_task(made.serve())
        async with stream(made) as call:
            await call.write(pack_hello(made.terms, 2))
            begin = await said_by_server(call)
            assert begin == pack_facts(Kind.BEGIN, {"ids": 2})
            points = await said_by_server(call)
            assert len(points) == 1 + 2 * POINT
            for content in (salt, *said):
                await call.write(content)
            heard = await said_by_server(call)
        (error,) = await asyncio.gather(serving, return_exceptions=True)
        assert not made.kept
        return error, heard

    return asyncio.run(asyncio.wait_for(play(), LIMIT))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (pack(Kind.POINTS, GOOD[:-1]), f"1 to {CHUNK} items of 64 bytes. Found 127"),
        (pack(Kind.POINTS), f"1 to {CHUNK} items"),
        (pack(Kind.POINTS, bytes(POINT * (CHUNK + 1))), f"1 to {CHUNK} items"),
        (pack(Kind.POINTS, GOOD + GOOD), "POINTS of 2 ids. Found 4"),
        (pack(Kind.TAGS, bytes(16 * 3)), "TAGS of 2 ids. Found 3"),
        (pack(Kind.TAGS, bytes(17)), "items of 16 bytes"),
        (pack(Kind.POINTS, GOOD[:POINT]), "POINTS of 2 ids. Found 1"),
        (pack(Kind.ROWS, bytes(8)), "POINTS or TAGS. Found ROWS"),
        (pack(Kind.BUSY), "POINTS or TAGS. Found BUSY"),
        (b"\xff", "Found ff"),
        (b"", "Found nothing"),
    ],
)
def test_what_is_no_message_ends_the_alignment(said, message):
    error, heard = story(said)
    assert isinstance(error, InvalidMessage)
    assert message in str(error)
    assert "bank broke the protocol" in heard


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (GOOD[:POINT] + bytes(POINT), "on the curve"),
        (GOOD[:POINT] + b"\xff" * POINT, "on the curve"),
        (GOOD[:POINT] * 2, "sent once"),
    ],
)
def test_points_are_checked(points, message):
    error, heard = story(pack(Kind.TAGS, bytes(range(32))), pack(Kind.POINTS, points))
    assert isinstance(error, InvalidMessage)
    assert message in str(error)
    assert message in heard


def test_tags_that_are_all_alike_are_refused():
    error, _ = story(pack(Kind.TAGS, bytes(32)), pack(Kind.POINTS, GOOD))
    assert "sent once" in str(error)


@pytest.mark.parametrize(
    ("salt", "message"),
    [
        (pack(Kind.POINTS, GOOD), "SALT. Found POINTS"),
        (pack(Kind.SALT, bytes(32)), "1 to 1 items of 16 bytes. Found 32"),
    ],
)
def test_tags_need_a_salt(salt, message):
    error, _ = story(salt=salt)
    assert isinstance(error, InvalidMessage)
    assert message in str(error)


def test_a_client_has_no_more_loosened_ids_than_it_announced():
    tags, points = (pack(Kind.TAGS, bytes(range(32))), pack(Kind.POINTS, GOOD))
    error, _ = story(tags, points, pack_facts(Kind.COUNT, {"ids": 3}))  # none is common, so it is asked again
    assert isinstance(error, InvalidMessage)
    assert "2 ids cannot become more" in str(error)


def test_a_client_that_goes_away_ends_it_for_all():
    async def play():
        made = Alignments(server=["a", "b"], bank=["b", "c"], shop=["b"])
        work = asyncio.gather(made.serve(), made.join("shop"), return_exceptions=True)
        async with stream(made) as call:
            await call.write(pack_hello(made.terms, 2))
            assert await said_by_server(call) == pack_facts(Kind.BEGIN, {"ids": 2})
        return await work

    server, shop = asyncio.run(asyncio.wait_for(play(), LIMIT))
    assert isinstance(server, Stalled)
    assert isinstance(shop, RunError)
    for error in (server, shop):
        assert "bank went away" in str(error)


def test_a_client_that_is_silent_is_not_waited_for():
    error, heard = story()  # it reads, and says not even that it is alive
    assert isinstance(error, Stalled)
    assert "bank has been silent for 3 s" in heard


def test_a_client_that_shows_nothing_but_life_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(Alignments, "patience", 1.0)

    async def play():
        made = Alignments(server=["a", "b"], bank=["b", "c"], shop=["b"])
        work = asyncio.gather(made.serve(), made.join("shop"), return_exceptions=True)
        async with stream(made) as call:
            await call.write(pack_hello(made.terms, 2))
            while not work.done():
                with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # the stream has ended
                    await call.write(pack(Kind.BEAT))
                await asyncio.wait([work], timeout=0.1)
        return await work

    server, shop = asyncio.run(asyncio.wait_for(play(), LIMIT))
    assert isinstance(server, Stalled)
    for error in (server, shop):
        assert "bank has sent only heartbeats for 1 s" in str(error)


def test_a_server_shows_each_client_whether_it_hears_from_others(monkeypatch):
    monkeypatch.setattr(Alignments, "heartbeat", 0.2)

    async def play():
        made = Alignments(server=["a", "b"], bank=["b", "c"], shop=["b"])
        serving = asyncio.create_task(made.serve())
        async with stream(made) as bank, stream(made, "shop") as shop:

            async def shop_hears(kind):
                while (await said_by_server(shop, unheard=()))[0] != kind:
                    for call in (bank, shop):
                        await call.write(pack(Kind.BEAT))

            for call, count in ((bank, 2), (shop, 1)):
                await call.write(pack_hello(made.terms, count))
            await shop_hears(Kind.BEGIN)
            await shop_hears(Kind.BEAT)
            await bank.write(SALT)
            await shop_hears(Kind.BUSY)
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(asyncio.wait_for(play(), LIMIT))


def test_a_client_that_does_not_come_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(Alignments, "patience", 0.3)

    async def play():
        made = Alignments(server=["a"], bank=["a"], shop=["a"])
        return await asyncio.gather(made.serve(), made.join("bank"), return_exceptions=True)

    server, bank = asyncio.run(asyncio.wait_for(play(), LIMIT))
    for error in (server, bank):
        assert "VFL-6055" in str(error)
        assert "shop" in str(error)


def test_parties_that_differ_and_strangers_are_refused_and_the_others_go_on():
    async def play():
        made = Alignments(server=["a", "b"], bank=["b", "c"])
        made.ids["thief"], made.progress["thief"] = made.ids["bank"], made.progress["bank"]
        serving = asyncio.create_task(made.serve())
        refused = [
            await asyncio.gather(made.join(party, terms), return_exceptions=True)
            for party, terms in (
                ("bank", replace(made.terms, records="labelled")),
                ("bank", replace(made.terms, parties=["bank", "shop"])),
                ("bank", replace(made.terms, protocol=2)),
                ("thief", made.terms),
            )
        ]
        async with stream(made) as call:
            await call.write(pack(Kind.HELLO, b"{}"))
            junk = await said_by_server(call)
        gone = asyncio.create_task(made.join("bank"))
        await asyncio.sleep(0)  # it begins to dial
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await asyncio.gather(serving, made.join("bank"))
        return [error for (error,) in refused], junk, made.kept

    (records, parties, old, thief), junk, kept = asyncio.run(asyncio.wait_for(play(), LIMIT))
    for error in (records, parties, old, thief):
        assert isinstance(error, RemoteFault)
    assert "records 'common' at the server, 'labelled' at the client" in str(records)
    assert "parties ['bank'] at the server, ['bank', 'shop'] at the client" in str(parties)
    assert f"protocol {PROTOCOL} at the server, 2 at the client" in str(old)
    assert "VFL-6051" in str(thief)
    assert '"thief"' in str(thief)
    assert "VFL-6035" in junk
    assert kept["bank"].ids.to_list() == ["b"]


def test_a_server_that_is_ended_tells_its_clients():
    async def play():
        made = Alignments(server=["a"], bank=["a"], shop=["a"])
        serving, bank = asyncio.create_task(made.serve()), asyncio.create_task(made.join("bank"))
        while "bank" not in made.server._clients:
            await asyncio.sleep(0.01)
        serving.cancel()
        return (await asyncio.gather(bank, return_exceptions=True))[0]

    assert "the server was ended" in str(asyncio.run(asyncio.wait_for(play(), LIMIT)))
