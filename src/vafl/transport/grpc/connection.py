"""One client's stream as the server of a run sees it: whose it is, its state, and for how long it was silent.

A `Connection` exists from a client's admission until its stream is closed:

    (admission: `identify`, `agree`, `arrival`)
           │
           v
         OPEN      joined = False    waits for Join; the only replies are Refused and Stop
           │ the protocol accepts Join
           v
        JOINED     joined = True     messages both ways
           │ `end()`, also from OPEN
           v
        ENDING     `_ending` is set  the writer sends what was in the outbox when `end` was called
           │ outbox empty, or `expire(grace)` returns
           v
        CLOSED     dropped by the server

A stream that its client closes, or whose network connection is lost, goes from OPEN or JOINED to CLOSED.

Invariants, besides those of `Stream`:

- The stream is full while more than `_OUTBOX` replies are queued.
- `joined` never goes back to False. A client that reconnects gets a new `Connection`.
- `joined` and `violations` are set by the worker; everything else is set on the event loop.
- Messages queued after `end` are never sent.
"""

import asyncio
import time
from dataclasses import dataclass, field

from vafl.protocol.settings import LARGEST_WINDOW
from vafl.transport.grpc.stream import Call, Stream

# Replies that may be queued for one client before the server stops reading its messages. A client, too,
# stops reading while too much of its own is unsent. If both ends stopped, they would wait for each other
# forever. So this limit exceeds the number of replies that an honest client in training can leave unread.
_OUTBOX = LARGEST_WINDOW + 16


class Connection(Stream):
    """One client's live stream. The module's docstring describes its states.

    Args:
        call: the server's end of the call.
        client: the client's number.
        party: the client's name.
        instance: the random id of the client's process, the same whenever that process reconnects.

    Attributes:
        violations: messages of this stream that were refused.
        joined: whether the protocol has accepted the client's Join on this stream.
        unhandled: messages that wait for the worker.
    """

    def __init__(self, call: Call, client: int, party: str, instance: str = "") -> None:
        super().__init__(call, largest_unsent=0)
        self.client, self.party, self.instance = client, party, instance
        self.violations, self.joined, self.unhandled = 0, False, 0
        self._ending = asyncio.Event()
        self._turn_since = time.monotonic()  # when it became the client's turn to send
        self._addressed = False  # whether anything was sent to the client since its last message

    @property
    def is_full(self) -> bool:
        return len(self._outbox) > _OUTBOX

    def note_heard(self) -> None:
        """Record that a message of the client has arrived."""
        self.unhandled += 1
        self._turn_since, self._addressed = time.monotonic(), False

    def note_handled(self) -> None:
        """Record that the worker has handled a message of the client."""
        self.unhandled -= 1
        self.give_credit(1)

    def send(self, content: bytes) -> None:
        """Queue a message. Only the first one after a message of the client restarts the clock of `silence`.

        So further messages give the client no more time to answer the first.
        """
        if not self._addressed:
            self._turn_since, self._addressed = time.monotonic(), True
        self.put(content)

    @property
    def silence(self) -> float:
        """Seconds for which the client could have sent a message and did not.

        0 while messages of the client wait for the worker: then it is the server that is slow.
        """
        return 0.0 if self.unhandled else time.monotonic() - self._turn_since

    def end(self) -> None:
        """Close the stream once everything queued is sent, or once `expire` returns."""
        self.end_outbox()
        self._ending.set()

    async def expire(self, grace: float) -> None:
        """Return `grace` seconds after `end` was called: the client has had its time to read."""
        await self._ending.wait()
        await asyncio.sleep(grace)


@dataclass
class Allowance:
    """A token bucket: allow `rate` actions per second on average, and bursts of one second's worth (or 10).

    The server keeps a client's allowance across its streams, so that reconnecting does not refill it.

    Attributes:
        rate: tokens per second.
        left: tokens now, as of `at`.
        at: when `left` was computed, on the monotonic clock.
    """

    rate: float
    left: float = 10.0
    at: float = field(default_factory=time.monotonic)

    def take(self) -> bool:
        """Use one token and return True, or return False if there is none."""
        now = time.monotonic()
        self.left = min(max(10.0, self.rate), self.left + self.rate * (now - self.at))
        self.at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True
