"""One end of a stream: bounded reading, bounded writing, and no wait that outlasts it."""

import asyncio
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest

from vafl.transport.grpc.stream import INBOX, Stream, status_of

LIMIT = 1000


async def never(*_):
    await asyncio.Event().wait()


def call(read=never, write=never):
    return SimpleNamespace(read=read, write=write)


async def settled():
    for _ in range(100):
        await asyncio.sleep(0)


def complete(story):
    return asyncio.run(asyncio.wait_for(story, 20))


def test_no_more_messages_are_read_than_may_be_unhandled():
    async def read():
        return b"?"

    async def story():
        stream, heard = Stream(call(read), LIMIT), []

        async def listen():
            while (content := await stream.read()) is not None:
                heard.append(content)

        listening = asyncio.create_task(listen())
        await settled()
        counts = [len(heard)]
        stream.give_credit(2)
        await settled()
        counts.append(len(heard))
        listening.cancel()
        return counts

    assert complete(story()) == [INBOX, INBOX + 2]


def test_a_full_stream_returns_no_credit_until_it_is_sent():
    takes = asyncio.Event()

    async def read():
        return b"?"

    async def write(content):
        await takes.wait()

    async def story():
        stream = Stream(call(read, write), LIMIT)
        async with stream.open():
            for _ in range(INBOX):
                await stream.read()
            stream.put(b"!" * (LIMIT + 1))
            stream.give_credit(INBOX)
            reading = asyncio.create_task(stream.read())
            await settled()
            assert (stream.is_full, reading.done()) == (True, False)
            takes.set()
            assert await reading == b"?"
            assert (stream.is_full, stream.sent) == (False, LIMIT + 1)

    complete(story())


@pytest.mark.parametrize("end", [grpc.aio.EOF, asyncio.InvalidStateError(), grpc.aio.UsageError("ended")])
def test_the_end_of_a_stream_is_none_however_it_shows(end):
    async def read():
        if isinstance(end, Exception):
            raise end
        return end

    assert complete(Stream(call(read), LIMIT).read()) is None


def test_an_empty_message_is_no_end():
    async def read():
        return b""

    assert complete(Stream(call(read), LIMIT).read()) == b""


def test_what_can_no_longer_be_sent_is_dropped_so_that_room_is_found():
    async def write(content):
        raise asyncio.InvalidStateError("RPC already finished.")

    async def story():
        stream = Stream(call(write=write), LIMIT)
        async with stream.open():
            for _ in range(10):
                stream.put(b"!" * LIMIT)
            assert await stream.find_room()
            return stream.sent

    assert complete(story()) == 0


def test_a_closed_end_releases_whatever_waits():
    async def story():
        stream = Stream(call(), LIMIT)
        async with stream.open():
            stream.put(b"!" * (LIMIT + 1))
            waiting = [asyncio.create_task(each) for each in (stream.find_room(), stream.pause(3600.0))]
            await settled()
            assert not any(task.done() for task in waiting)
        return [await task for task in waiting]

    assert complete(story()) == [False, False]


def test_a_pause_ends_by_itself():
    assert complete(Stream(call(), LIMIT).pause(0.0)) is True


def test_a_run_ends_with_its_first_part_and_raises_its_error():
    async def fail():
        raise ValueError("first")

    async def story():
        stream, other = Stream(call(), LIMIT), asyncio.get_running_loop().create_future()
        with pytest.raises(ValueError, match="first"):
            await stream.run(fail(), other)
        return other.cancelled()

    assert complete(story())


def test_what_is_queued_is_sent_before_the_outbox_ends_unless_it_is_cleared():
    sent = []

    async def write(content):
        sent.append(content)

    async def story():
        stream = Stream(call(write=write), LIMIT)
        stream.put(b"dropped" * LIMIT)
        stream.clear_outbox()
        assert (stream.queued, stream.is_full) == (0, False)
        stream.put(b"sent")
        stream.end_outbox()
        stream.put(b"late")
        await stream.run()

    complete(story())
    assert sent == [b"sent"]


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        (grpc.StatusCode.OK, "", (grpc.StatusCode.UNAVAILABLE, "the server closed the stream")),
        (grpc.StatusCode.ABORTED, "no\x1b[2J", (grpc.StatusCode.ABORTED, "no[2J")),
        (grpc.StatusCode.ABORTED, None, (grpc.StatusCode.ABORTED, "")),
    ],
)
def test_a_status_is_an_error_that_is_safe_to_show(code, details, expected):
    async def answer(value):
        return value

    ended = SimpleNamespace(
        code=lambda: answer(code),
        details=lambda: answer(details),
        initial_metadata=lambda: answer(()),
        trailing_metadata=lambda: answer(()),
    )
    error = complete(status_of(ended))
    assert (error.code(), error.details()) == expected
