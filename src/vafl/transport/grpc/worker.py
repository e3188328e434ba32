"""Run the protocol's work outside the event loop, so that arithmetic does not delay the streams.

The worker chooses between its thread and the event loop, because neither suits all models. On 2 cores,
medians of 9 rounds (`make bench ONLY=worker_choice`):

    work                              measured          thread      event loop   worker's choice
    4 clients, logistic regression    updates           3,000 / s   3,650 / s    3,370 / s
    2 clients, a deep head            longest block     4 ms        240 ms       7 ms

The choice cannot be made once, at the start of a run. How long a step takes depends on the machine and on
the model, which may be the user's. And the first messages tell little: under sync and t-sync most uploads
are only stored, and a secure sum begins with keys.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

# Seconds of work for which messages may wait so that they are sent together. With more, the peer would idle.
HELD_BACK = 0.001
BRIEF = 0.003  # CPU seconds per message below which a function in the thread counts as brief
BEARABLE = 0.02  # seconds per message below which a function on the event loop counts as brief
_PROVEN = 16  # brief functions in a row before work moves to the event loop
_MOST_CREDIT = 64  # limit of the credit that brief functions earn

Answer = TypeVar("Answer")
# A function returns how many messages it has handled. None counts as one. Return 0 to leave a brief call out
# of the timing statistics. A future is set once all work before it is done.
Work = Callable[[], int | None] | asyncio.Future[None]


class Worker:
    """Run one function at a time, in the order they were given. After one has failed, run no other.

    Functions run in a thread until they have proved to be brief. Handing a small model's step to another
    thread and back takes longer than the step itself. So once `_PROVEN` functions in a row were `BRIEF`, the
    next ones run directly on the event loop, until several have taken longer than is bearable there.

        THREAD ──── credit reaches _PROVEN: brief functions earn 1 each ─────> EVENT LOOP
          ^                                                                        │
          └──── credit falls below _PROVEN: a long function costs _PROVEN ─────────┘

    A rare long function, such as a checkpoint, may then block the event loop. That disconnects no peer, since
    gRPC answers keepalive pings in its own threads.

    Invariants:

    - The order of functions is kept across both places: nothing runs on the event loop while the thread still
      has work.
    - Functions report results by `tell`, and the event loop runs these calls in order. Futures would cost as
      much as sending a small message through gRPC.

    Args:
        failed: called on the event loop with the exception that a function raised.
        clock: wall-clock seconds, for work on the event loop.
        stopwatch: CPU seconds of the calling thread, for work in the thread. A call takes 10 us, too long for
            the event loop.
    """

    def __init__(
        self,
        failed: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
        stopwatch: Callable[[], float] = time.thread_time,
    ) -> None:
        self._failed, self._clock, self._stopwatch = failed, clock, stopwatch
        self._loop = asyncio.get_running_loop()
        self._pending: deque[Work] = deque()  # work that is assigned neither to the thread nor to the loop
        self._queue: SimpleQueue[Work | None] = SimpleQueue()  # work of the thread; None ends it
        self._handed = 0  # functions given to the thread whose end the event loop has not processed yet
        self._credit = 0  # see the class's docstring
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="vafl-torch", daemon=True)
        self._thread.start()
        self._ident = self._thread.ident

    @property
    def may_wait(self) -> bool:
        """Return whether the calling function may block on the event loop: it runs in the thread."""
        return threading.get_ident() == self._ident

    def worked(self) -> float:
        """Return the CPU seconds of the thread; always 0 on the event loop, where work is brief."""
        return self._stopwatch() if self.may_wait else 0.0

    def do(self, work: Work) -> None:
        """Run this after all work given before. Call this on the event loop, but not from within work."""
        self._pending.append(work)
        self._advance()

    def hand_over(self, work: Work) -> None:
        """Run this in the thread. A function on the event loop calls this last, when its rest has to wait."""
        self._handed += 1
        self._queue.put(work)

    def tell(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function on the event loop: at once if the caller runs there, soon otherwise.

        Drop the call if the event loop is closed.
        """
        if not self.may_wait:
            function(*arguments)
            return
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def wait_for(self, answer: Coroutine[Any, Any, Answer]) -> Answer:
        """Run a coroutine on the event loop and wait for its result. Only the thread may call this."""
        return asyncio.run_coroutine_threadsafe(answer, self._loop).result()

    async def settle(self) -> None:
        """Wait until all work given so far is done."""
        settled: asyncio.Future[None] = self._loop.create_future()
        self.do(settled)
        await settled

    async def stop(self) -> None:
        """Finish all work given so far, then end the thread. Later work is ignored."""
        await self.settle()
        self._ended = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        # Until a thread has called this, some kernels of torch ignore the configured number of threads in it
        # and use every core.
        torch.get_num_threads()
        while (work := self._queue.get()) is not None:
            self._attempt(work)
            self.tell(self._take_back)  # runs after everything that the function itself has told

    def _advance(self) -> None:
        """Run pending work, or give it to the thread. `_take_back` continues when the thread is done."""
        # Work moves to the event loop only when nothing is left in the thread, and to the thread at any time:
        # the loop has then finished what it did, because work does not call `do`.
        while self._pending:
            if self._credit < _PROVEN:
                self.hand_over(self._pending.popleft())
            elif self._handed:
                return  # keep the order: the thread's work comes first
            else:
                self._attempt(self._pending.popleft())

    def _take_back(self) -> None:
        self._handed -= 1
        self._advance()

    def _attempt(self, work: Work) -> None:
        if isinstance(work, asyncio.Future):
            self.tell(_release, work)
            return
        if self._ended:
            return
        clock, limit = (self._stopwatch, BRIEF) if self.may_wait else (self._clock, BEARABLE)
        begin, messages = clock(), None
        try:
            messages = work()
        except BaseException as error:  # includes SystemExit, which a thread would swallow
            self._ended = True
            failure = error if isinstance(error, Exception) else RuntimeError(f"ended by {error!r}")
            self.tell(self._failed, failure)
        # The limit is per message: a turn that has handled many at once is not a long one.
        if clock() >= begin + limit * (messages or 1):
            self._credit = max(self._credit - _PROVEN, 0)
        elif messages != 0:
            self._credit = min(self._credit + 1, _MOST_CREDIT)


def _release(settled: "asyncio.Future[None]") -> None:
    if not settled.done():  # the task that waited may have been cancelled
        settled.set_result(None)
