"""The processes that compute: one for each core, since Python's arithmetic keeps to one."""

import asyncio
import multiprocessing
import os
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Self, TypeVar

from vafl.errors import RunError
from vafl.transport.alignment.worker import ready, serve_parent

_FEW = 10_000  # ids: starting processes would take longer
Chunk = TypeVar("Chunk")


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ComputePool:
    """Computes chunks in worker processes; few ids in a thread of this one. Use as a context manager.

    Args:
        workers: processes to start at most.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._thread = ThreadPoolExecutor(1)
        self._processes: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for executor in filter(None, (self._thread, self._processes)):
            executor.shutdown(wait=True, cancel_futures=True)

    def expect(self, ids: int) -> None:
        """Sets of so many ids will have to be computed: if that is worth it, the processes start now.

        A party says so when it knows its own ids, so that they start while it waits for the others."""
        if ids >= _FEW and self._processes is None:
            spawn = multiprocessing.get_context("spawn")  # forking would break the streams
            self._processes = ProcessPoolExecutor(self._workers, spawn, initializer=serve_parent)
            for _ in range(self._workers):
                self._processes.submit(ready)

    async def work(
        self, function: Callable[[bytes, Chunk], bytes], secret: bytes, chunks: AsyncIterable[Chunk]
    ) -> AsyncIterator[bytes]:
        """`function(secret, chunk)` for each chunk, in order; a few are under way at any time."""
        loop, waiting = asyncio.get_running_loop(), deque[asyncio.Future[bytes]]()
        try:
            async for chunk in chunks:
                executor = self._processes or self._thread
                waiting.append(loop.run_in_executor(executor, function, secret, chunk))
                if len(waiting) > self._workers + 1:  # while results are taken, nobody idles
                    yield await waiting.popleft()
            while waiting:
                yield await waiting.popleft()
        except BrokenExecutor as error:
            raise RunError(
                "VFL-6011", "a process that computed was killed. Is there too little memory?"
            ) from error
        finally:
            for each in waiting:
                each.cancel()
