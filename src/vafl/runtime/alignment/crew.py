"""The processes that compute: one for each core, since Python's arithmetic keeps to one."""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.connection import wait
from typing import Self, TypeVar

from vafl.errors import RunError

_FEW = 10_000  # ids: starting processes would take longer
Chunk = TypeVar("Chunk")


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Crew:
    """Computes chunks in worker processes; few ids in a thread of this one. Use as a context manager.

    Args:
        ids: of the largest set that is to be computed.
        workers: processes to start at most.
    """

    def __init__(self, ids: int, workers: int) -> None:
        self._window = workers + 1  # while results are taken, nobody idles
        self._executor: Executor
        if ids < _FEW:
            self._executor = ThreadPoolExecutor(1)
        else:
            spawn = multiprocessing.get_context("spawn")  # forking would break the streams
            self._executor = ProcessPoolExecutor(workers, spawn, initializer=_serve_parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    async def work(
        self, function: Callable[[bytes, Chunk], bytes], secret: bytes, chunks: AsyncIterable[Chunk]
    ) -> AsyncIterator[bytes]:
        """`function(secret, chunk)` for each chunk, in order; a few are under way at any time."""
        loop, waiting = asyncio.get_running_loop(), deque[asyncio.Future[bytes]]()
        try:
            async for chunk in chunks:
                waiting.append(loop.run_in_executor(self._executor, function, secret, chunk))
                if len(waiting) > self._window:
                    yield await waiting.popleft()
            while waiting:
                yield await waiting.popleft()
        except BrokenExecutor as error:
            raise RunError("a process that computed was killed. Is there too little memory?") from error
        finally:
            for each in waiting:
                each.cancel()


def _serve_parent() -> None:
    """A worker leaves interrupts to its parent, and does not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
