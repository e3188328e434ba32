"""The thread that torch runs in, so that the event loop never waits for arithmetic."""

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

HELD_BACK = 0.001  # seconds of work that may wait to be said together with more: longer, and the peer idles


class Worker:
    """One thread that runs functions in the order they come; after one has failed, no other.

    An executor does that too, but makes two futures a call, and those cost as much as a small message's
    way through gRPC. What a function has to say it says itself, by `tell`.

    Args:
        failed: called on the event loop with what a function raised.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[Callable[[], None] | asyncio.Future[None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="vafl-torch", daemon=True)
        self._thread.start()

    def do(self, function: Callable[[], None]) -> None:
        """Has the thread run this after everything it was given before."""
        self._queue.put(function)

    def tell(self, function: Callable[..., object], *arguments: object) -> None:
        """Has the event loop run this, if it still runs; may be called from any thread."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    async def settle(self) -> None:
        """Waits until the thread is done with all it was given."""
        settled: asyncio.Future[None] = self._loop.create_future()
        self._queue.put(settled)
        await settled

    async def stop(self) -> None:
        """Ends the thread once it is done with all it was given."""
        await self.settle()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        torch.get_num_threads()  # until a thread has asked, some of torch's kernels take every core in it
        failed = False
        while (given := self._queue.get()) is not None:
            if isinstance(given, asyncio.Future):
                self.tell(_release, given)
            elif not failed:
                try:
                    given()
                except BaseException as error:  # whatever it is, an exit too, it ends the run
                    failed = True
                    loud = error if isinstance(error, Exception) else RuntimeError(f"ended by {error!r}")
                    self.tell(self._failed, loud)


def _release(settled: "asyncio.Future[None]") -> None:
    if not settled.done():  # whoever waited may have been cancelled
        settled.set_result(None)
