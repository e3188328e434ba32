"""Parties that disagree, break the protocol or leave: every party learns why, and none stores anything."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc.aio
import pytest

from tests.transport.alignment.parties import LIMIT, Alignments
from vafl.data.alignment.curve import POINT, blind_ids, new_salt
from vafl.errors import InvalidMessage, RemoteFault, RunError, Stalled
from vafl.transport.alignment.frames import CHUNK, PATH, PROTOCOL, Kind, pack, pack_facts
from vafl.transport.grpc.wire import CLAIM

SALT = pack(Kind.SALT, new_salt())
GOOD = blind_ids(bytes(range(32)), ["a", "b"])  # always the same: they are part of test names


@asynccontextmanager
async def stream(made, party="bank"):
    """A client's stream whose messages the test sends."""
    await made._listening.wait()
    async with grpc.aio.insecure_channel(made.address) as channel:
        yield channel.stream_stream(PATH)(metadata=((CLAIM, party),))


async def introduce(call, made, ids=2):
    """Send what a client sends first."""
    await call.write(made.terms.to_bytes())
    await call.write(pack_facts(Kind.COUNT, {"ids": ids}))


async def said_by_server(call, unheard=(Kind.PROGRESS,)):
    """Return the next message but PROGRESS, or the reason if the server has ended the stream."""
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
    """Send this after a valid beginning and SALT; return the server's error and what the client receives."""

    async def play():
        made = Alignments(server=["a", "b"], bank=["b", "c"], **changes)
        serving = asyncio.create_task(made.serve())
        async with stream(made) as call:
            await introduce(call, made)
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
        (pack(Kind.PROGRESS), "POINTS or TAGS. Found PROGRESS"),
        (pack(Kind.FAILED, b"!"), "POINTS or TAGS. Found FAILED"),
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
            await introduce(call, made)
            assert await said_by_server(call) == pack_facts(Kind.BEGIN, {"ids": 2})
        return await work

    server, shop = asyncio.run(asyncio.wait_for(play(), LIMIT))
    assert isinstance(server, Stalled)
    assert isinstance(shop, RunError)
    for error in (server, shop):
        assert "bank went away" in str(error)


def test_a_client_that_is_silent_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(Alignments, "patience", 1.0)

    async def play():
        made = Alignments(server=["a", "b"], bank=["b", "c"], shop=["b"])
        work = asyncio.gather(made.serve(), made.join("shop"), return_exceptions=True)
        async with stream(made) as call:
            await introduce(call, made)
            heard = [await said_by_server(call) for _ in range(3)]  # it reads, and says nothing
        return await work, heard[-1]

    (server, shop), heard = asyncio.run(asyncio.wait_for(play(), LIMIT))
    assert isinstance(server, Stalled)
    for text in (str(server), str(shop), heard):
        assert "VFL-6062" in text
        assert "bank has sent nothing for 1 s" in text


def test_a_client_that_says_nothing_at_all_is_not_admitted(monkeypatch):
    monkeypatch.setattr(Alignments, "heartbeat", 0.2)

    async def play():
        made = Alignments(server=["a"], bank=["a"])
        serving = asyncio.create_task(made.serve())
        async with stream(made) as call:
            refused = await said_by_server(call)
        await asyncio.gather(serving, made.join("bank"))
        return refused

    assert "VFL-6105" in asyncio.run(asyncio.wait_for(play(), LIMIT))


def test_a_server_shows_each_client_whether_it_hears_from_others(monkeypatch):
    monkeypatch.setattr(Alignments, "heartbeat", 0.1)
    monkeypatch.setattr(Alignments, "patience", 1.0)

    async def play():
        made = Alignments(server=["a", "b"], bank=["b", "c"], shop=["b"])
        serving = asyncio.create_task(made.serve())
        async with stream(made) as bank, stream(made, "shop") as shop:
            await introduce(bank, made)
            await introduce(shop, made, ids=1)
            heard = [await said_by_server(shop)]
            await bank.write(SALT)
            while isinstance(heard[-1], bytes):  # until the server gives up: both say nothing more
                heard.append(await said_by_server(shop, unheard=()))
        await asyncio.gather(serving, return_exceptions=True)
        return heard

    heard = asyncio.run(asyncio.wait_for(play(), LIMIT))
    assert heard[0] == pack_facts(Kind.BEGIN, {"ids": 2})
    assert "VFL-6062" in heard[-1]
    messages = 3  # two COUNT and a SALT, in at least ten heartbeats
    assert 1 <= heard.count(pack(Kind.PROGRESS)) <= messages


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
            await call.write(b"{}")
            junk = await said_by_server(call)
        async with stream(made) as call:
            await call.write(made.terms.to_bytes())
            await call.write(SALT)
            skipped = await said_by_server(call)
        gone = asyncio.create_task(made.join("bank"))
        await asyncio.sleep(0)  # it begins to dial
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await asyncio.gather(serving, made.join("bank"))
        return [error for (error,) in refused], junk, skipped, made.kept

    (records, parties, old, thief), junk, skipped, kept = asyncio.run(asyncio.wait_for(play(), LIMIT))
    for error in (records, parties, old, thief):
        assert isinstance(error, RemoteFault)
    assert "records 'common' at the server, 'labelled' at the client" in str(records)
    assert "parties ['bank'] at the server, ['bank', 'shop'] at the client" in str(parties)
    assert f"protocol {PROTOCOL} at the server, 2 at the client" in str(old)
    assert "VFL-6104" in str(thief)
    assert '"thief"' in str(thief)
    assert "VFL-6132" in junk
    assert "VFL-6052" in skipped
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
