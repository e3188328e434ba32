"""Where the protocol's work is done, so that the event loop never waits long for arithmetic."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import torch

HELD_BACK = 0.001  # seconds of work that may wait to be said together with more: longer, and the peer idles
BRIEF = 0.003  # seconds of work for a message, in the thread
_BEARABLE = 0.02  # seconds of any kind, on the event loop
_PROVEN, _MOST_CREDIT = 16, 64  # functions

# A function may say how many messages it was for (none: that it was brief proves nothing); a future is told
# that all before it is done.
Work = Callable[[], int | None] | asyncio.Future[None]


class Worker:
    """Does one function at a time, in the order they come; after one has failed, no other.

    In a thread of its own, unless work has shown to be brief: to hand a small model's step to another thread
    and back takes longer than to make it. So once `_PROVEN` functions in a row took less than `BRIEF`, the
    next ones run on the event loop, as they come, until more than a few take longer than is bearable. What is
    long and rare, a checkpoint say, may keep the loop waiting then, but cuts nobody off: gRPC's own threads
    answer keepalives.

    What a function has to say it says by `tell`. Futures would cost as much as a small message's way through
    gRPC.

    Args:
        failed: called on the event loop with what a function raised.
        clock, stopwatch: seconds that went by, and that the thread has worked. To ask how long a thread has
            worked takes 10 us, so the event loop does without.
    """

    def __init__(
        self,
        failed: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
        stopwatch: Callable[[], float] = time.thread_time,
    ) -> None:
        self._failed, self._clock, self._stopwatch = failed, clock, stopwatch
        self._loop = asyncio.get_running_loop()
        self._given: deque[Work] = deque()
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._handed = 0  # functions that the thread has yet to be done with, as far as the loop has heard
        self._credit = 0  # grows with each brief function; a long one costs as much as it takes to prove that
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="vafl-torch", daemon=True)
        self._thread.start()
        self._ident = self._thread.ident

    @property
    def may_wait(self) -> bool:
        """Whether the function that asks may wait for the event loop: it does not run there."""
        return threading.get_ident() == self._ident

    def worked(self) -> float:
        """Seconds that the thread has worked; always the same on the event loop, where work is brief."""
        return self._stopwatch() if self.may_wait else 0.0

    def do(self, work: Work) -> None:
        """Has this done after everything given before; called on the event loop, by no function it runs."""
        self._given.append(work)
        self._advance()

    def hand_over(self, work: Work) -> None:
        """Has the thread do this; called on the event loop, last by a function that may not wait there."""
        self._handed += 1
        self._queue.put(work)

    def tell(self, function: Callable[..., object], *arguments: object) -> None:
        """Has the event loop run this, if it still runs; at once where that is where we are."""
        if not self.may_wait:
            function(*arguments)
            return
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    async def settle(self) -> None:
        """Waits until all that was given is done."""
        settled: asyncio.Future[None] = self._loop.create_future()
        self.do(settled)
        await settled

    async def stop(self) -> None:
        """Ends the thread once it is done with all it was given; what is given later is not done."""
        await self.settle()
        self._ended = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        torch.get_num_threads()  # until a thread has asked, some of torch's kernels take every core in it
        while (given := self._queue.get()) is not None:
            self._attempt(given)
            self.tell(self._take_back)  # after all that the function has told

    def _advance(self) -> None:
        """Does what may be done now; what the thread was given comes before what follows on the loop."""
        while self._given:
            if self._credit < _PROVEN:
                self.hand_over(self._given.popleft())
            elif self._handed:
                return
            else:
                self._attempt(self._given.popleft())

    def _take_back(self) -> None:
        self._handed -= 1
        self._advance()

    def _attempt(self, work: Work) -> None:
        if isinstance(work, asyncio.Future):
            self.tell(_release, work)
            return
        if self._ended:
            return
        clock, limit = (self._stopwatch, BRIEF) if self.may_wait else (self._clock, _BEARABLE)
        begin, messages = clock(), None
        try:
            messages = work()
        except BaseException as error:  # whatever it is, an exit too, it ends the run
            self._ended = True
            loud = error if isinstance(error, Exception) else RuntimeError(f"ended by {error!r}")
            self.tell(self._failed, loud)
        if clock() >= begin + limit * (messages or 1):
            self._credit = max(self._credit - _PROVEN, 0)
        elif messages != 0:
            self._credit = min(self._credit + 1, _MOST_CREDIT)


def _release(settled: "asyncio.Future[None]") -> None:
    if not settled.done():  # whoever waited may have been cancelled
        settled.set_result(None)
