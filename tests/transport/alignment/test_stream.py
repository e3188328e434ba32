"""A stream never waits forever, whatever the other end does, and logs which party it waits for."""

import asyncio
from types import SimpleNamespace

import grpc.aio
import pytest

from vafl.errors import InvalidMessage, Stalled
from vafl.transport.alignment import stream as module
from vafl.transport.alignment.frames import Kind, pack
from vafl.transport.alignment.stream import AlignmentStream

PATIENCE = 0.2
LIMIT = 10.0
ROWS = pack(Kind.ROWS, bytes(8 * 2048))


async def never(*_):
    await asyncio.Event().wait()


async def take(_):
    pass


def saying(*contents, then=never):
    """Return a function that reads these messages, then whatever `then` returns."""
    unread = list(contents)

    async def read():
        return unread.pop(0) if unread else await then()

    return read


def played(story, read, write=take):
    """Run a story on a stream whose call has these two functions; return its result or error."""

    async def play():
        stream = AlignmentStream("shop", SimpleNamespace(read=read, write=write), PATIENCE)
        async with stream.exchanging():
            return await story(stream)

    return asyncio.run(asyncio.wait_for(play(), LIMIT))


def test_messages_arrive_in_order_and_each_must_be_expected():
    async def story(stream):
        first = await stream.receive(Kind.ROWS)
        second = await stream.receive(Kind.RECEIVED, Kind.DONE)
        with pytest.raises(InvalidMessage, match=r"VFL-6061.*RECEIVED.*DONE"):
            await stream.receive(Kind.RECEIVED)
        return first, second, stream.received

    heard = played(story, saying(ROWS, pack(Kind.DONE), pack(Kind.DONE)))
    assert heard == ((Kind.ROWS, ROWS[1:]), (Kind.DONE, b""), 3)


@pytest.mark.parametrize("unheard", range(4))
def test_what_lies_unheard_does_not_hide_that_the_other_end_reads_nothing(unheard):
    async def tell(stream):
        for _ in range(100):
            await stream.send(ROWS)

    with pytest.raises(Stalled, match=r"VFL-6065.*shop"):
        played(tell, saying(*[pack(Kind.RECEIVED)] * unheard), never)


def test_tasks_that_wait_for_room_are_released_when_the_stream_is_closed():
    """DONE may go to clients that have left: the server's alignment is complete without them."""

    async def play():
        stream = AlignmentStream("shop", SimpleNamespace(read=never, write=never), LIMIT)
        async with stream.exchanging():
            while not stream.is_full:
                await stream.send(ROWS)
            waiting = [asyncio.create_task(stream.send(ROWS)) for _ in range(2)]
            for _ in range(10):
                await asyncio.sleep(0)
            assert not any(task.done() for task in waiting)
        await asyncio.gather(*waiting, stream.send(ROWS))

    asyncio.run(asyncio.wait_for(play(), LIMIT))


def test_a_silent_end_is_named_in_the_log_and_given_up(monkeypatch, caplog):
    monkeypatch.setattr(module, "TOLD_EVERY", PATIENCE / 4)
    with caplog.at_level("INFO", "vafl.alignment"), pytest.raises(Stalled, match="VFL-6062"):
        played(lambda stream: stream.receive(Kind.RECEIVED), never)
    assert len(caplog.messages) >= 3
    assert {text.split(",")[0] for text in caplog.messages} == {"waiting for shop"}


def test_every_call_after_the_end_of_the_stream_raises():
    async def end():
        return grpc.aio.EOF

    async def story(stream):
        for _ in range(2):
            with pytest.raises(Stalled, match=r"VFL-6063.*shop"):
                await stream.receive(Kind.RECEIVED)

    played(story, saying(then=end))


def test_what_is_queued_is_sent_before_a_flush_returns():
    sent = []

    async def write(content):
        await asyncio.sleep(0)
        sent.append(content)

    async def story(stream):
        for kind in (Kind.RESULT, Kind.DONE):
            await stream.send(pack(kind))
        await stream.flush()

    played(story, never, write)
    assert sent == [pack(Kind.RESULT), pack(Kind.DONE)]
