"""The worker thread: in order, on one thread, and loud once."""

import asyncio
import os
import sys
import threading

import torch

from vafl.runtime.grpc.worker import Worker


def test_functions_run_in_order_on_a_thread_of_their_own():
    done = []

    async def story():
        worker = Worker(done.append)
        for number in range(100):
            worker.do(lambda number=number: done.append((number, threading.current_thread().name)))
        await worker.settle()
        assert len(done) == 100
        await worker.stop()

    asyncio.run(story())
    assert done == [(number, "vafl-torch") for number in range(100)]


def test_after_a_failure_nothing_more_is_done_and_it_is_told_once():
    done, told = [], []

    async def story():
        worker = Worker(told.append)
        worker.do(lambda: 1 / 0)
        worker.do(lambda: done.append("too late"))
        await worker.stop()

    asyncio.run(story())
    assert done == []
    assert [type(error) for error in told] == [ZeroDivisionError]


def test_an_exit_does_not_end_the_thread_in_silence():
    """Whoever waits for the thread would wait for ever: rich exits when nobody reads what it prints."""
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
    """Which another thread than the first does not do by itself: small products took every core there."""
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
