"""A client checks everything its server sends, and stores nothing after an invalid message."""

import asyncio

import grpc
import grpc.aio
import numpy as np
import pytest

from tests.transport.alignment.parties import LIMIT, Alignments
from vafl.data.alignment.curve import blind_ids, new_secret
from vafl.errors import InvalidMessage, RemoteFault, RunError, Stalled
from vafl.transport.alignment.frames import LARGEST_SET, Kind, pack, pack_facts, pack_rows

BEGIN = pack_facts(Kind.BEGIN, {"ids": 2})
AGAIN = pack_facts(Kind.AGAIN, {"ids": 2})
POINTS = pack(Kind.POINTS, blind_ids(new_secret(), ["x", "y"]))
TOKEN = "0123456789abcdef" * 2
RESULT = {"token": TOKEN, "rows": 2, "label": "paid", "with_local": False, "classes": ["n", "y"], "own": 2}


def result(**changes):
    return pack_facts(Kind.RESULT, {**RESULT, **changes})


def rows(places, numbers):
    return pack_rows(np.array(places), np.array(numbers))[0]


def told(*script, records="common"):
    """Run a client whose server sends this, then nothing; return the client's error."""

    async def stream(context):
        for content in script:
            await context.write(content)
        while isinstance(await context.read(), bytes):
            pass

    return served(stream, records)


def served(stream, records="common"):
    """Run a client with three ids whose server serves this stream; return the client's error."""

    async def play():
        made = Alignments(records, server=["x"], bank=["a", "b", "c"])
        async with made.served_by(stream):
            (error,) = await asyncio.gather(made.join("bank"), return_exceptions=True)
        assert not made.kept
        return error

    return asyncio.run(asyncio.wait_for(play(), LIMIT))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ((pack_facts(Kind.BEGIN, {"ids": 0}),), f"1 to {LARGEST_SET:,} ids. Found 0"),
        ((pack_facts(Kind.BEGIN, {"ids": 1 << 40}),), f"1 to {LARGEST_SET:,} ids. Found {1 << 40:,}"),
        ((pack_facts(Kind.BEGIN, {"ids": "2"}),), "ids. Found {'ids': '2'}"),
        ((pack(Kind.BEGIN, b"\xff" * 100),), "JSON"),
        ((pack(Kind.BEGIN, b"{" * 9000),), "8,192 bytes. Found 9,000"),
        ((BEGIN, POINTS, POINTS), "RESULT or AGAIN. Found POINTS"),
        ((pack_facts(Kind.BEGIN, {"ids": 1}), POINTS), "POINTS of 1 ids. Found 2"),
        ((BEGIN, pack(Kind.POINTS, bytes(128))), "on the curve"),
        ((BEGIN, POINTS, result(own=4)), "4 of 2 rows for 3 ids"),
        ((BEGIN, POINTS, result(own=1)), "1 of 2 rows for 3 ids"),
        ((BEGIN, POINTS, result(rows=True)), "'rows': True"),
        ((BEGIN, POINTS, result(), rows([0, 3], [0, 1])), "Found 2 rows"),
        ((BEGIN, POINTS, result(), rows([1, 1], [0, 1])), "Found 2 rows"),
        ((BEGIN, POINTS, result(), rows([0, 1, 2], [0, 1, 2])), "Found 3 rows"),
        ((BEGIN, POINTS, result(), rows([0, 1], [0, 2])), "from 0 to 1"),
        ((BEGIN, POINTS, result(token="mine"), rows([0, 1], [0, 1])), "32 hex digits"),
        ((BEGIN, POINTS, AGAIN, BEGIN, POINTS, AGAIN), "RESULT. Found AGAIN"),
        ((BEGIN, POINTS, pack_facts(Kind.AGAIN, {"ids": 3})), "2 ids cannot become more"),
    ],
)
def test_what_a_server_must_not_say(script, message):
    error = told(*script)
    assert isinstance(error, InvalidMessage), error
    assert "the server broke the protocol" in str(error)
    assert message in str(error)


def test_a_server_has_no_more_rows_than_ids():
    """With labelled records, a client allocates memory for every announced row when it trains."""
    error = told(BEGIN, POINTS, result(rows=1 << 50), rows([0, 1], [0, 1]), records="labelled")
    assert isinstance(error, InvalidMessage), error
    assert "the server's 2 ids" in str(error)


def test_a_second_exchange_is_in_the_clients_log(caplog):
    with caplog.at_level("INFO", "vafl.client"):
        told(BEGIN, POINTS, AGAIN, BEGIN, POINTS, pack(Kind.FAILED, b"enough"))
    assert "the server has 2 ids" in caplog.messages
    assert "the server asks once more: it has 2 ids when forms are loosened" in caplog.messages


def test_a_server_that_says_why_it_stops_before_and_after_it_began():
    before = told(pack(Kind.FAILED, b"not\x1b[31m today"))
    assert isinstance(before, RunError)
    assert before.message == "the server ended the alignment: not[31m today"
    assert "\x1b" not in str(told(pack(Kind.BEGIN, b'"\\u001b[2J"')))
    after = told(BEGIN, pack(Kind.FAILED, b"later"))
    assert isinstance(after, RunError)
    assert after.message == "the server ended the alignment: later"


def test_a_status_is_shown_without_what_would_steer_a_terminal():
    async def refuse(context):
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "no\x1b[2J")

    error = served(refuse)
    assert isinstance(error, RemoteFault)
    assert error.message == "the server refused bank: no[2J"


@pytest.mark.parametrize(
    "script", [(), (BEGIN,), (BEGIN, POINTS), (BEGIN, POINTS, result(), rows([0, 1], [0, 1]))]
)
def test_a_server_that_falls_silent_is_not_waited_for_and_leaves_no_file(script, monkeypatch):
    monkeypatch.setattr(Alignments, "patience", 0.5)
    monkeypatch.setattr(Alignments, "heartbeat", 0.2)
    error = told(*script)
    assert isinstance(error, Stalled)
    assert error.code == "VFL-6062"
    assert "the server has sent nothing for 1 s" in str(error)


def test_a_server_that_hears_from_others_is_waited_for(monkeypatch):
    monkeypatch.setattr(Alignments, "patience", 0.5)
    monkeypatch.setattr(Alignments, "heartbeat", 0.2)
    progress = [pack(Kind.PROGRESS)] * 20

    async def stream(context):
        for content in progress:
            await asyncio.sleep(0.1)
            await context.write(content)
        await context.write(pack(Kind.FAILED, b"after 2 s"))
        await context.read()

    assert "after 2 s" in str(served(stream))
