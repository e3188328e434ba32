"""The end of a run over real sockets: after a signal, a failure or an interruption, and what is saved."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from tests.transport.grpc.parties import Federation, complete, configuration, dialled, served, until
from vafl.errors import RunError
from vafl.protocol.messages import Decline, Evaluate, Join


def test_a_client_that_comes_back_after_the_end_is_told():
    async def story():
        async with served(stop={"updates": 100_000}) as federation:
            running = [asyncio.create_task(federation.client(index).run()) for index in range(2)]
            await until(lambda: federation.server.iteration >= 10)
            running[0].cancel()
            await until(lambda: 0 in federation.server.absent)
            federation.end.finish("enough")
            await running[1]
            return await federation.client(0).run()

    assert complete(story()) == "enough"


def test_clients_hear_that_a_run_has_ended_without_a_result():
    async def story():
        async with served() as federation:
            running = asyncio.create_task(federation.client(0).run())
            await until(lambda: federation.end.seen)
            federation.end.finish("30 updates were made, but nothing was measured", failed=True)
            with pytest.raises(RunError, match="VFL-6091"):
                await running

    complete(story())


def test_the_server_s_words_are_one_line_without_control_characters():
    async def story():
        async with served(stop={"updates": 1_000_000}) as federation:
            running = [asyncio.create_task(federation.client(index).run()) for index in range(2)]
            await until(lambda: federation.server.iteration >= 10)
            federation.end.finish("enough\x1b[2J\x07\r\nerror: \u202eno")
            return await asyncio.gather(*running)

    assert complete(story()) == ["enough[2Jerror: no"] * 2


def test_clients_are_not_told_what_the_server_s_failure_says_of_its_files():
    def full():
        raise OSError(28, "No space left on device", "secret/head.part")

    async def story():
        federation = Federation(configuration())
        federation.driver.checkpoint = full
        serving = asyncio.create_task(federation.serve())
        await federation.listening.wait()
        clients = (federation.client(index).run() for index in range(2))
        ends = await asyncio.gather(*clients, return_exceptions=True)
        with pytest.raises(OSError, match="secret"):
            await serving
        return ends

    ends = complete(story())
    assert [end.message for end in ends] == [
        "the server ended the run without a result: the server failed; its log says why."
    ] * 2
    assert {end.exit_code for end in ends} == {4}


def test_what_fails_when_the_run_is_over_takes_no_result_away():
    async def story():
        async with served() as federation, dialled(federation, 0):
            await until(lambda: 0 in federation.end.seen)
            federation.end.finish("enough")
            await until(federation.end._over.is_set)
            federation.end.fail(OSError("too late"))

    complete(story())


def test_an_interrupt_before_everybody_has_joined_ends_the_run():
    async def story():
        federation = Federation(configuration(network={"join_timeout": 1000.0}))
        federation.driver.controller.interrupt()
        await federation.serve()
        return federation.points, federation.end._failed

    assert complete(story()) == ([], True)


def test_checkpoints_do_not_wait_for_an_evaluation():
    """A client that is slow to send its held-out rows must not delay checkpoints beyond their interval."""
    federation = Federation(configuration())
    server, driver, saved = federation.server, federation.driver, []
    server.absent = set()
    driver.checkpoint = lambda: saved.append(server.iteration) or server.uploads_done()
    end = SimpleNamespace(
        began=0.0, now=0.0, updates=0, server=server, traffic=[], finish=None, connections={}
    )
    assert [type(said) for said in driver(end)] == [Evaluate, Evaluate]
    server.iteration = end.updates = 10
    driver(end)
    assert saved == [10]
    assert federation.points == []


def test_no_step_follows_the_evaluation_that_turns_out_to_be_the_last():
    """The run is stopped during an evaluation. The saved models must be the evaluated ones."""
    federation = Federation(configuration())
    server, driver, ended = federation.server, federation.driver, []
    server.absent = set()
    end = SimpleNamespace(
        began=0.0, now=0.0, updates=7, server=server, traffic=[], parties=federation.names, connections={}
    )
    end.finish, server.iteration = lambda reason, *, failed: ended.append((reason, failed)), 7
    asked = driver(end)
    for request in asked:
        server.receive(Decline(request.client, 1, request.number, "not now"))
    driver.controller.interrupt()
    driver(end)
    assert ended == [("the run was told to stop, but nothing was measured", False)]
    assert server.last_iteration == 7


def test_a_client_that_is_told_to_end_ends_after_its_turn():
    """The client saves its state next. A turn that still runs would make that state inconsistent."""

    async def story():
        async with served() as federation, dialled(federation, 1) as other:
            await other.send(Join(1))
            client = federation.client(0)
            in_turn, over = threading.Event(), threading.Event()

            def slow():
                in_turn.set()
                threading.Event().wait(0.3)
                over.set()

            client._after = slow
            running = asyncio.create_task(client.run())
            await until(in_turn.is_set)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            return over.is_set()

    assert complete(story())
