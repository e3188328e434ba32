"""The worker runs functions in order, on the event loop only if they are brief, and reports one failure."""

import asyncio
import os
import sys
import threading
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from vafl.transport.grpc.worker import BRIEF, Worker

STILL = {"clock": lambda: 0.0, "stopwatch": lambda: 0.0}


def test_functions_run_in_order_on_a_thread_of_their_own():
    done = []

    async def story():
        worker = Worker(done.append, stopwatch=count().__next__)  # nothing is brief
        for number in range(100):
            worker.do(lambda number=number: done.append((number, threading.current_thread().name)))
        await worker.settle()
        assert len(done) == 100
        await worker.stop()

    asyncio.run(story())
    assert done == [(number, "vafl-torch") for number in range(100)]


def test_what_has_been_brief_often_enough_runs_on_the_event_loop():
    where = []

    async def story():
        worker = Worker(where.append, **STILL)
        for _ in range(20):
            worker.do(lambda: where.append(worker.may_wait))
            await worker.settle()
        await worker.stop()

    asyncio.run(story())
    assert where == [True] * 16 + [False] * 4


def test_once_it_often_takes_long_it_is_the_threads_again():
    where, clock, worker = [], SimpleNamespace(now=0.0), None

    def take_long():
        where.append(worker.may_wait)
        clock.now += 10 * BRIEF

    async def story():
        nonlocal worker
        worker = Worker(where.append, lambda: clock.now, lambda: clock.now)

        async def do(function):
            worker.do(function)
            await worker.settle()

        for _ in range(80):
            await do(lambda: None)
        for _ in range(4):
            await do(take_long)
        for _ in range(17):
            await do(lambda: where.append(worker.may_wait))
        await worker.stop()

    asyncio.run(story())
    assert where == [False] * 4 + [True] * 16 + [False]


def test_many_messages_at_one_time_may_take_as_many_times_as_long():
    """The turns of a server that is behind are long, because each handles many brief messages."""
    where, clock = [], SimpleNamespace(now=0.0)

    def take_three():
        clock.now += 2 * BRIEF
        return 3

    async def story():
        worker = Worker(where.append, lambda: clock.now, lambda: clock.now)
        for _ in range(16):
            worker.do(take_three)
        await worker.settle()
        worker.do(lambda: where.append(worker.may_wait))
        await worker.stop()

    asyncio.run(story())
    assert where == [False]


def test_looking_at_the_clock_now_and_then_proves_nothing():
    """Between two long steps of a deep model, the server's tick runs many times."""
    where = []

    async def story():
        worker = Worker(where.append, **STILL)
        for _ in range(20):
            worker.do(lambda: 0)
        await worker.settle()
        worker.do(lambda: where.append(worker.may_wait))
        await worker.stop()

    asyncio.run(story())
    assert where == [True]


def test_what_the_thread_has_to_say_is_said_before_what_the_loop_does_next():
    """Otherwise a client's messages could be sent in another order than they were made."""
    said, go = [], threading.Event()

    async def story():
        worker = Worker(said.append, **STILL)
        for _ in range(16):
            worker.do(lambda: None)
        await worker.settle()
        worker.hand_over(lambda: go.wait() and worker.tell(said.append, "first"))
        go.set()
        worker._thread.join(0.2)  # it has ended, but the event loop does not know that yet
        worker.do(lambda: worker.tell(said.append, "second"))
        await worker.settle()
        worker.do(lambda: worker.tell(said.append, "third"))
        await worker.stop()

    asyncio.run(story())
    assert said == ["first", "second", "third"]


@pytest.mark.parametrize("brief", [0, 16], ids=["in the thread", "on the event loop"])
def test_after_a_failure_nothing_more_is_done_and_it_is_told_once(brief):
    done, told = [], []

    async def story():
        worker = Worker(told.append, **STILL)
        for _ in range(brief):
            worker.do(lambda: None)
        await worker.settle()
        worker.do(lambda: 1 / 0)
        worker.do(lambda: done.append("too late"))
        await worker.stop()

    asyncio.run(story())
    assert done == []
    assert [type(error) for error in told] == [ZeroDivisionError]


@pytest.mark.parametrize("brief", [0, 16])
def test_after_its_end_nothing_more_is_done(brief):
    """A stream that closes late must not resume the run."""
    done = []

    async def story():
        worker = Worker(done.append, **STILL)
        for _ in range(brief):
            worker.do(lambda: None)
        await worker.stop()
        worker.do(lambda: done.append("too late"))

    asyncio.run(story())
    assert done == []


def test_an_exit_does_not_end_the_thread_in_silence():
    """Regression: rich calls exit when its output is closed, and the main thread then waited forever."""
    told = []

    async def story():
        worker = Worker(told.append)
        worker.do(sys.exit)
        await asyncio.wait_for(worker.stop(), 10)

    asyncio.run(story())
    assert [str(error) for error in told] == ["ended by SystemExit()"]


def test_settling_may_be_given_up():
    go = threading.Event()

    async def story():
        worker = Worker(lambda error: None)
        worker.do(go.wait)
        settling = asyncio.create_task(worker.settle())
        await asyncio.sleep(0)
        settling.cancel()
        go.set()
        await worker.stop()

    asyncio.run(story())


def test_a_loop_that_was_torn_down_is_told_nothing():
    go, workers = threading.Event(), []

    async def story():
        worker = Worker(lambda error: None)
        workers.append(worker)
        worker.do(lambda: go.wait() and worker.tell(print))

    asyncio.run(story())
    go.set()
    workers[0]._queue.put(None)
    workers[0]._thread.join()  # an exception in it would fail this test


def test_torch_keeps_to_its_number_of_threads_in_the_worker():
    """Regression: in threads other than the first, small matrix products used every core."""
    started = []

    def multiply():
        before = set(os.listdir("/proc/self/task"))
        torch.ones(600, 10).t() @ torch.ones(600, 16)
        started.extend(set(os.listdir("/proc/self/task")) - before)

    async def story():
        worker = Worker(started.append)
        worker.do(multiply)
        await worker.stop()

    asyncio.run(story())
    assert not started
