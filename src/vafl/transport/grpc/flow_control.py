"""A queue for a stream's writer and credit for its reader, each with one waiting task.

asyncio's Queue and Semaphore support any number of waiting tasks and take about twenty calls per message.
These classes need far fewer, which is measurable for small messages.
"""

import asyncio
from collections import deque


class _Awaited:
    """Base class for objects that one task at a time waits for. Not thread-safe."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Outbox(_Awaited):
    """Contents to write, in order. None marks the end."""

    def __init__(self) -> None:
        super().__init__()
        self._contents: deque[bytes | None] = deque()

    def __len__(self) -> int:
        return len(self._contents)

    def put(self, content: bytes | None) -> None:
        self._contents.append(content)
        self._wake()

    async def take(self) -> bytes | None:
        """Remove and return the oldest content; wait if there is none."""
        while not self._contents:  # again after a wait: `clear` may have run before this task did
            await self._wait()
        return self._contents.popleft()

    def clear(self) -> int:
        """Remove all contents and return their number of bytes."""
        dropped = sum(len(content) for content in self._contents if content is not None)
        self._contents.clear()
        return dropped


class Credit(_Awaited):
    """The number of messages that may be read before others have been handled."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    async def take(self) -> None:
        """Use one credit; wait if there is none."""
        while not self._count:
            await self._wait()
        self._count -= 1

    def give(self, count: int) -> None:
        self._count += count
        self._wake()
