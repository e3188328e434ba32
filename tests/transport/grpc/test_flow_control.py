import asyncio

from vafl.transport.grpc.flow_control import Credit, Outbox


async def _settled():
    for _ in range(5):
        await asyncio.sleep(0)


def test_what_is_put_into_an_outbox_comes_out_in_order_also_to_whoever_waits():
    async def story():
        outbox, taken = Outbox(), []

        async def write():
            while (content := await outbox.take()) is not None:
                taken.append(content)

        outbox.put(b"1")
        writing = asyncio.create_task(write())
        await _settled()
        assert (taken, len(outbox)) == ([b"1"], 0)
        outbox.put(b"2")
        outbox.put(b"3")
        assert len(outbox) == 2
        await _settled()
        outbox.put(None)
        await asyncio.wait_for(writing, 10)
        assert taken == [b"1", b"2", b"3"]

    asyncio.run(story())


def test_a_cleared_outbox_keeps_its_taker_waiting():
    async def story():
        outbox = Outbox()
        taking = asyncio.create_task(outbox.take())
        await _settled()
        outbox.put(b"dropped")
        outbox.clear()
        await _settled()
        assert not taking.done()
        outbox.put(b"kept")
        assert await asyncio.wait_for(taking, 10) == b"kept"

    asyncio.run(story())


def test_credit_is_used_up_waited_for_and_given_back():
    async def story():
        credit = Credit(2)
        await credit.take()
        await credit.take()
        third = asyncio.create_task(credit.take())
        await _settled()
        assert not third.done()
        credit.give(2)
        await asyncio.wait_for(third, 10)
        await asyncio.wait_for(credit.take(), 10)

    asyncio.run(story())


def test_whoever_was_cancelled_while_it_waited_is_not_woken():
    async def story():
        outbox, credit = Outbox(), Credit(0)
        for task in [asyncio.create_task(outbox.take()), asyncio.create_task(credit.take())]:
            await _settled()
            task.cancel()
        await _settled()
        outbox.put(b"for the next")
        credit.give(1)
        assert await asyncio.wait_for(outbox.take(), 10) == b"for the next"
        await asyncio.wait_for(credit.take(), 10)

    asyncio.run(story())
