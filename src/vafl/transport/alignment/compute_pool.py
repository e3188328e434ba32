"""Compute points in several processes, one per core, because one Python process uses a single core."""

import asyncio
import multiprocessing
import os
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Self, TypeVar

from vafl.errors import RunError
from vafl.transport.alignment.worker import ready, serve_parent

_FEW = 10_000  # ids; computing fewer takes less time than starting processes
Chunk = TypeVar("Chunk")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ComputePool:
    """Compute chunks in worker processes, or in a thread if there are few ids. Use as a context manager.

    Args:
        workers: the largest number of processes to start.
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
        """Start the processes now if a set of this many ids is worth it.

        A party calls this as soon as it has read its ids, so that processes start while it waits for others.
        """
        if ids >= _FEW and self._processes is None:
            spawn = multiprocessing.get_context("spawn")  # forking would break the streams
            self._processes = ProcessPoolExecutor(self._workers, spawn, initializer=serve_parent)
            for _ in range(self._workers):  # the executor starts a process only when it gets work
                self._processes.submit(ready)

    async def work(
        self, function: Callable[[bytes, Chunk], bytes], secret: bytes, chunks: AsyncIterable[Chunk]
    ) -> AsyncIterator[bytes]:
        """Yield `function(secret, chunk)` for each chunk, in order, with several chunks in progress."""
        loop, pending = asyncio.get_running_loop(), deque[asyncio.Future[bytes]]()
        try:
            async for chunk in chunks:
                executor = self._processes or self._thread
                pending.append(loop.run_in_executor(executor, function, secret, chunk))
                if len(pending) > self._workers + 1:  # one more than processes, so that none of them idles
                    yield await pending.popleft()
            while pending:
                yield await pending.popleft()
        except BrokenExecutor as error:
            raise RunError(
                "VFL-6011",
                "the processes of the alignment must run to the end. One of them was killed, perhaps for "
                "lack of memory. Free memory and start every party again.",
            ) from error
        finally:
            for future in pending:
                future.cancel()
