"""A client that is connected and answers pings, but no requests: the others continue without it."""

import asyncio

from tests.transport.grpc.parties import complete, dialled, served, until
from vafl.names import LOCAL_CLIENT
from vafl.protocol.messages import Evaluate, Join, Refresh, Skipped, Welcome

QUICK = {"answer_timeout": 0.3}


async def joined(hand, client):
    await hand.send(Join(client))
    await hand.receive(Welcome)


async def alone_with_a_silent_client(federation):
    """Run client 2 to the end of a run in which client 1 sends nothing after its Join."""
    async with dialled(federation, 0) as silent:
        running = asyncio.create_task(federation.client(1).run())
        await joined(silent, 0)
        return await running


def test_evaluations_go_on_and_the_run_ends_with_a_result():
    async def story():
        async with served(network=QUICK) as federation:
            reason = await alone_with_a_silent_client(federation)
            return reason, federation.points, federation.driver

    reason, points, driver = complete(story())
    assert reason == "60 updates were made"
    assert [point.updates for point in points][-1] == 60
    assert {frozenset(point.unanswered.items()) for point in points} == {frozenset({("client-1", "default")})}
    assert driver.controller.has_result


def test_a_delay_bound_uses_stale_cells_by_its_policy_after_the_deadline():
    rule = {"delay_bound": 2, "when_unanswered": "use"}

    async def story():
        async with served(network=QUICK, rule=rule) as federation:
            reason = await alone_with_a_silent_client(federation)
            return reason, federation.server.delays.summaries()[0]

    reason, delays = complete(story())
    assert reason == "60 updates were made"
    assert delays.over_bound > 0


def test_a_delay_bound_skips_uploads_by_its_policy_after_the_deadline():
    rule = {"delay_bound": 2, "when_unanswered": "skip"}

    async def story():
        async with (
            served(network=QUICK, rule=rule) as federation,
            dialled(federation, 0) as silent,
            dialled(federation, 1) as other,
        ):
            await joined(silent, 0)
            await joined(other, 1)
            client = federation.client(1).client
            await other.send(*client.wake())
            skipped = await other.receive(Skipped)
            return skipped.reason, set(federation.server.overdue)

    reason, overdue = complete(story())
    assert "clients [0]" in reason
    assert 0 in overdue


def test_a_late_answer_is_taken_and_its_client_is_asked_again():
    async def story():
        network = {"answer_timeout": 0.3}
        async with (
            served(network=network, stop={"updates": 1_000_000}) as federation,
            dialled(federation, 0) as slow,
        ):
            running = asyncio.create_task(federation.client(1).run())
            await joined(slow, 0)
            request = await slow.receive(Evaluate)
            await until(lambda: federation.server.overdue == {0})
            client = federation.client(0).client
            client.join()
            (answer,) = client.receive(request)
            assert isinstance(answer, Refresh)
            await slow.send(answer)
            await slow.receive(Evaluate)
            refusals = dict(federation.end.violations)
            federation.end.finish("enough")
            await running
            return refusals

    assert complete(story()) == {}


def test_a_stream_on_which_nobody_joins_is_closed():
    async def story():
        async with served(network=QUICK) as federation, dialled(federation, 0), dialled(federation, 1):
            await until(lambda: len(federation.end.connections) == 2)
            await until(lambda: not federation.end.connections)

    complete(story())


def test_a_client_is_silent_once_its_turn_has_lasted_a_heartbeat():
    async def story():
        async with (
            served(network={"heartbeat": 1.0}, stop={"updates": 1_000_000}) as federation,
            dialled(federation, 0) as silent,
            dialled(federation, 1) as other,
        ):
            await joined(silent, 0)
            await joined(other, 1)
            at_first = federation.end.silence(0)
            await until(lambda: federation.end.silence(0) > 1.0)
            federation.end.connections[1].party = LOCAL_CLIENT  # it runs in the server's process
            assert federation.end.silence(1) == 0.0
            await silent.send(*federation.client(0).client.wake())
            await until(lambda: federation.server.activations[0] == 1)
            return at_first, federation.end.silence(0)

    assert complete(story()) == (0.0, 0.0)


def test_a_client_whose_upload_waits_for_others_owes_nothing():
    async def story():
        async with (
            served(rule={"name": "sync"}) as federation,
            dialled(federation, 0) as waiting,
            dialled(federation, 1) as slow,
        ):
            await joined(waiting, 0)
            await joined(slow, 1)
            await waiting.send(*federation.client(0).client.wake())
            await until(lambda: federation.server.activations[0] == 1)
            return [federation.server.owes_reply(client) for client in (0, 1)]

    assert complete(story()) == [True, False]
