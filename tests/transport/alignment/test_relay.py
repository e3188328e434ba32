"""A hostile server relays each client's points to the other client as if they were its own."""

import asyncio

from tests.transport.alignment.parties import LIMIT, Alignments
from vafl.data.alignment.curve import TAG
from vafl.transport.alignment.frames import Kind, pack, pack_facts, unpack, unpack_count
from vafl.transport.grpc.wire import CLAIM

PEOPLE = {"bank": [f"p{n}" for n in range(30)], "shop": [f"p{n}" for n in range(20, 60)]}
OTHER = {"bank": "shop", "shop": "bank"}


def test_it_does_not_learn_how_many_people_two_clients_share():
    streams, tags = {}, dict.fromkeys(PEOPLE, b"")
    here = asyncio.Barrier(2)

    async def relay(context):
        party = dict(context.invocation_metadata())[CLAIM]
        streams[party] = context

        async def heard():
            while isinstance(content := await context.read(), bytes):
                yield unpack(content)

        await context.read()  # its terms
        messages = heard()
        _, count = await anext(messages)
        assert unpack_count(count) == len(PEOPLE[party])
        await here.wait()
        wanted = len(PEOPLE[OTHER[party]])
        await context.write(pack_facts(Kind.BEGIN, {"ids": wanted}))
        await here.wait()
        while len(tags[party]) < TAG * wanted:
            kind, body = await anext(messages)
            if kind is Kind.POINTS:
                await streams[OTHER[party]].write(pack(kind, body))
            elif kind is Kind.TAGS:
                tags[party] += body
        await here.wait()
        await context.write(pack(Kind.FAILED, b"thank you"))
        await anext(messages, None)

    async def play():
        made = Alignments(server=["x"], **PEOPLE)
        async with made.served_by(relay):
            return await asyncio.gather(*map(made.join, PEOPLE), return_exceptions=True)

    for error in asyncio.run(asyncio.wait_for(play(), LIMIT)):
        assert "thank you" in str(error)
    bank, shop = ({own[at : at + TAG] for at in range(0, len(own), TAG)} for own in tags.values())
    assert (len(bank), len(shop)) == (40, 30)
    assert not bank & shop  # of ten people who are in both
