"""A client that floods, lies or does not read costs the server little, and the other clients nothing."""

import asyncio
import logging

import grpc
import grpc.aio
import numpy as np
import pytest

from tests.transport.grpc.parties import Federation, complete, configuration, dialled, served, until, upload
from vafl.protocol.messages import Join, Refused, Upload, Welcome
from vafl.transport.codec import Codec
from vafl.transport.grpc.connection import Allowance
from vafl.transport.grpc.wire import PATH


async def raw_stream(federation, party, frames, refusals):
    """Send hand-made frames as a hostile client would; return the replies, up to this many refusals."""
    async with grpc.aio.insecure_channel(federation.address) as channel:
        stream = channel.stream_stream(PATH)(metadata=(("vafl-party", party),))
        await stream.write(federation.terms.to_bytes())
        for frame in frames:
            await stream.write(frame)
        answers = []
        while sum(isinstance(answer, Refused) for answer in answers) < refusals:
            frames = Codec().frames(await stream.read())
            answers += [Codec().from_server(frame, 0) for frame in frames]
        return answers


def test_bad_frames_are_answered_counted_and_change_nothing():
    async def story():
        federation = Federation(configuration(network={"join_timeout": 0.1, "largest_norm": 100.0}))
        serving = asyncio.create_task(federation.serve())
        await federation.listening.wait()
        codec = Codec()
        join = codec.encode(federation.client(0).client.join())
        rows = np.arange(16)
        upload = Upload(0, 1, 0, rows, np.zeros((16, 3), np.float32))
        bad = [
            b"junk",
            codec.encode(upload)[:-1],
            codec.encode(Upload(0, 1, 9, rows, np.zeros((16, 3), np.float32))),
            codec.encode(Upload(0, 1, 0, rows, np.zeros((16, 4), np.float32))),
            codec.encode(Upload(0, 1, 0, rows, np.full((16, 3), 1e6, np.float32))),
            codec.encode(Upload(0, 1, 0, rows, np.full((16, 3), 1e30, np.float32))),
            codec.encode(Upload(0, 1, 0, rows + 10_000, np.zeros((16, 3), np.float32))),
        ]
        answers = await raw_stream(federation, federation.names[0], [join, *bad], len(bad))
        table = federation.server.table
        untouched = bool((table.cells == 0).all()), federation.server.activations, federation.server.iteration
        federation.end.finish("enough")
        await serving
        return federation, answers, untouched

    federation, answers, untouched = complete(story())
    assert isinstance(answers[0], Welcome)
    assert untouched == (True, [0, 0], 0)
    assert federation.end.violations == {federation.names[0]: 7}


def test_a_first_join_that_claims_what_no_run_can_reach_is_refused_and_the_others_go_on():
    async def story():
        async with served(stop={"updates": 40}, network={"join_timeout": 0.1}) as federation:
            async with dialled(federation, 0) as hostile:
                await hostile.send(Join(0, 2**62, 2**62))
                refused = await hostile.receive(Refused)
            reason = await federation.client(1).run()
            return refused, reason, federation.server.activations, federation.server.uploads_done()

    refused, reason, activations, settled = complete(story())
    assert f"at most 0 uploads of client 0 can have been answered. Found {2**62}" in refused.reason
    assert reason == "40 updates were made"
    assert activations[0] == settled[0] == 0


def test_poisoned_embeddings_are_reported_in_log_and_alarms(caplog):
    """Embeddings of 1e6 are finite and have the right shape, so only an alarm can report them."""

    async def story():
        async with served(stop={"updates": 1_000_000}) as federation, dialled(federation, 0) as hostile:
            running = asyncio.create_task(federation.client(1).run())
            await hostile.send(Join(0))
            await hostile.receive(Welcome)
            await until(lambda: federation.server.activations[1] > 0)
            poison = np.full((16, 3), 1e6, np.float32)
            await hostile.send(Upload(0, 1, 0, np.arange(16), poison))
            await until(lambda: federation.end.vitals.alarms(0))
            kinds = [alarm.kind for alarm in federation.end.vitals.alarms(0)]
            federation.end.finish("enough")
            await running
            return kinds, federation.server.activations[0]

    kinds, taken = complete(story())
    assert (kinds, taken) == (["size"], 1)
    assert "alarm: client-1: embeddings of size 1e+06, where the other clients' are" in caplog.text


def test_more_frames_than_may_travel_together_are_refused_in_words():
    async def story():
        async with (
            served() as federation,
            dialled(federation, 1) as other,
            dialled(federation, 0) as hostile,
        ):
            await other.send(Join(1))
            await hostile.send(Join(0))
            await hostile._stream.write(Codec().encode(upload(0)) * 200)
            refused = await hostile.receive(Refused)
            return refused.reason, federation.server.activations

    reason, activations = complete(story())
    assert "VFL-6074" in reason
    assert activations == [0, 0]


def test_a_flood_is_answered_and_counted_but_does_not_fill_the_log(caplog):
    async def story():
        async with (
            served() as federation,
            dialled(federation, 1) as other,
            dialled(federation, 0) as hostile,
        ):
            await other.send(Join(1))
            await hostile.send(Join(0), *[upload(0, 99)] * 100)
            refused = [await hostile.receive(Refused) for _ in range(100)]
            await until(lambda: 0 not in federation.end.connections)  # it was shown the door
            return refused, federation.end.violations

    with caplog.at_level(logging.WARNING, "vafl.server"):
        refused, violations = complete(story())
    assert len(refused) == violations["client-1"] == 100
    assert 10 <= caplog.text.count("refused from client-1") <= 20


def test_dialling_again_buys_no_messages():
    async def story():
        async with served(network={"messages_per_second": 0.001}) as federation:
            async with dialled(federation, 1) as other:
                await other.send(Join(1))
                for _ in range(2):
                    async with dialled(federation, 0) as fast:
                        await fast.send(Join(0), *[upload(0, 99)] * 8)
                        refused = [await fast.receive(Refused) for _ in range(8)]
            return refused

    assert all("VFL-6126" in refusal.reason and "0.001" in refusal.reason for refusal in complete(story()))


def test_an_allowance_grows_with_time_up_to_a_second():
    allowance = Allowance(rate=100.0, left=0.0)
    assert not allowance.take()
    allowance.at -= 60.0
    assert sum(allowance.take() for _ in range(200)) in (100, 101)


async def write_all(stream, frames):
    """Write messages; raise TimeoutError as soon as one cannot be written."""
    for frame in frames:
        await asyncio.wait_for(stream.write(frame), 3.0)


def test_a_client_that_does_not_read_its_answers_is_not_heard_either():
    async def story():
        wide = {"head": "linear", "width": 300}  # 120 kB a message: what lies between is soon full
        federation = Federation(
            configuration(model=wide, network={"join_timeout": 0.1}, stop={"updates": 10**9})
        )
        serving = asyncio.create_task(federation.serve())
        await federation.listening.wait()
        codec, rows, embeddings = Codec(), np.arange(100), np.zeros((100, 300), np.float32)
        uploads = (Upload(0, number + 1, number, rows, embeddings) for number in range(10_000))
        async with grpc.aio.insecure_channel(federation.address) as channel:
            stream = channel.stream_stream(PATH)(metadata=(("vafl-party", federation.names[0]),))
            await stream.write(federation.terms.to_bytes())
            await stream.write(codec.encode(federation.client(0).client.join()))
            with pytest.raises(TimeoutError):
                await write_all(stream, map(codec.encode, uploads))
            waiting = federation.end.connections[0].queued
        federation.end.finish("enough")
        await serving
        return waiting

    assert complete(story()) <= 100
