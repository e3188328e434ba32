"""What a stream's two tasks wait for: something to write, leave to read on.

asyncio's queues and semaphores do as much, for any number of tasks, in twenty calls a message; here each has
one task that waits, and it shows in a small message's way.
"""

import asyncio
from collections import deque


class _Awaited:
    """Something that one task at a time waits for."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Outbox(_Awaited):
    """Contents that wait to be written, in order; None is the last."""

    def __init__(self) -> None:
        super().__init__()
        self._contents: deque[bytes | None] = deque()

    def __len__(self) -> int:
        return len(self._contents)

    def put(self, content: bytes | None) -> None:
        self._contents.append(content)
        self._wake()

    async def take(self) -> bytes | None:
        """The oldest, once there is one."""
        while not self._contents:
            await self._wait()
        return self._contents.popleft()

    def clear(self) -> None:
        self._contents.clear()


class Credit(_Awaited):
    """How many messages may be read before others are done with."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    async def take(self) -> None:
        """Uses one up, once there is one."""
        while not self._count:
            await self._wait()
        self._count -= 1

    def give(self, count: int) -> None:
        self._count += count
        self._wake()
