"""A stream never waits forever, whatever the other end does, and logs which party it waits for."""

import asyncio
import time

import pytest

from vafl.errors import Stalled
from vafl.transport.alignment import stream as module
from vafl.transport.alignment.frames import Kind, pack
from vafl.transport.alignment.stream import AlignmentStream
from vafl.transport.settings import NetworkSettings

PATIENCE = 0.2
SETTINGS = NetworkSettings(heartbeat=1.0, patience=PATIENCE)
LIMIT = 10.0


def played(story, read, write=None):
    """Run a story on a stream that uses these two functions; return its result or error."""

    async def take(_):
        pass

    async def play():
        async with AlignmentStream("shop", read, write or take, SETTINGS) as line:
            return await story(line)

    return asyncio.run(asyncio.wait_for(play(), LIMIT))


async def alive():
    await asyncio.sleep(PATIENCE / 20)
    return pack(Kind.BEAT)


@pytest.mark.parametrize("unheard", range(4))
def test_what_lies_unheard_does_not_hide_that_the_other_end_takes_nothing(unheard):
    sent = iter(range(unheard))

    async def read():
        return await alive() if next(sent, None) is None else pack(Kind.RECEIVED)

    async def never(_):
        await asyncio.Event().wait()

    async def tell(line):
        for _ in range(10):
            await line.say(pack(Kind.ROWS, bytes(8)))
        await line.hear(Kind.RECEIVED)

    with pytest.raises(Stalled, match=r"VFL-6065.*shop"):
        played(tell, read, never)


def test_whoever_is_speaking_when_the_line_is_closed_does_not_wait_for_ever():
    """DONE may go to clients that have left: the server's alignment is complete without them."""

    async def never(_):
        await asyncio.Event().wait()

    async def play():
        async with AlignmentStream("shop", alive, never, SETTINGS) as line:
            speaking = [asyncio.create_task(line.say(pack(Kind.DONE))) for _ in range(5)]
            await asyncio.sleep(0)
            assert not all(word.done() for word in speaking)
        await asyncio.gather(*speaking, line.say(pack(Kind.DONE)))

    asyncio.run(asyncio.wait_for(play(), LIMIT))


def test_signs_of_life_are_no_answer(monkeypatch, caplog):
    monkeypatch.setattr(module, "TOLD_EVERY", PATIENCE / 4)
    with caplog.at_level("INFO", "vafl.alignment"), pytest.raises(Stalled, match="VFL-6062"):
        played(lambda line: line.hear(Kind.RECEIVED), alive)
    assert len(caplog.messages) >= 3
    assert {text.split(",")[0] for text in caplog.messages} == {"waiting for shop"}


def test_whoever_gets_on_with_others_is_waited_for():
    begun = time.monotonic()

    async def read():
        return await alive() if time.monotonic() < begun + 3 * PATIENCE else pack(Kind.RECEIVED)

    async def story(line):
        excusing = asyncio.create_task(excuse(line))
        try:
            return await line.hear(Kind.RECEIVED)
        finally:
            excusing.cancel()

    async def excuse(line):
        while True:
            line.excuse()
            await asyncio.sleep(PATIENCE / 10)

    assert played(story, read)[0] is Kind.RECEIVED
