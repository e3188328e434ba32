"""A client's session on a fake stream: it reads on only after messages are handled and answered."""

import asyncio

import grpc
import grpc.aio
import pytest

from vafl.transport.grpc.session import Session
from vafl.transport.grpc.stream import INBOX

LIMIT = 1000


class Flood:
    """The stream of a server that always has a message to read, and that reads nothing until `takes`."""

    def __init__(self):
        self.read_so_far, self.takes, self.broken = 0, asyncio.Event(), False

    async def read(self):
        await asyncio.sleep(0)
        if self.broken:
            return grpc.aio.EOF
        self.read_so_far += 1
        return b"?"

    async def write(self, content):
        await self.takes.wait()
        if self.broken:
            raise asyncio.InvalidStateError("RPC already finished.")

    async def code(self):
        return grpc.StatusCode.UNAVAILABLE

    async def details(self):
        return "gone"

    async def initial_metadata(self):
        return ()

    trailing_metadata = initial_metadata

    def cancel(self):
        pass


def flooded(then, answer=b"!" * 300):
    """Run a session that answers every message, and call `then` once it has read all it will.

    An answer of None sends nothing and never completes the handling of a message.
    """

    async def story():
        stream = Flood()
        session = Session(stream, LIMIT)

        def receive(content):
            if answer is not None:
                session.send([answer], handled=True)

        running = asyncio.create_task(session.converse(receive))
        await settled()
        try:
            return await then(stream, session, running)
        finally:
            running.cancel()

    async def settled():
        for _ in range(1000):
            await asyncio.sleep(0)

    return asyncio.run(asyncio.wait_for(story(), 20))


async def reading(stream, session, running):
    return stream.read_so_far


def test_no_more_is_read_than_the_worker_can_handle():
    assert flooded(reading, answer=None) == INBOX


def test_no_more_is_read_while_answers_lie_unsent():
    assert flooded(reading) <= LIMIT // 300 + INBOX + 1


def test_reading_goes_on_when_answers_are_taken():
    async def then(stream, session, running):
        before = stream.read_so_far
        stream.takes.set()
        while stream.read_so_far < before + 100:
            await asyncio.sleep(0)

    flooded(then)


def test_a_stream_that_breaks_while_nothing_is_read_is_noticed():
    async def then(stream, session, running):
        stream.broken = True
        stream.takes.set()
        with pytest.raises(grpc.aio.AioRpcError, match="gone"):
            await running

    flooded(then)
