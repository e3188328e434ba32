"""Run one client of a federation over gRPC, and reconnect when the connection is lost.

The event loop moves bytes (`Session`). The worker decodes messages, passes them to the protocol's client and
encodes its answers. One connection after the other goes through these states:

               ┌──────────── pause, longer each time ─────────────┐
               v                                                  │ may retry
    run() ─> DIALLING ── the channel fails ──────────────────> DISCONNECTED
               │                                                  ^   │ refused, or unreachable for `patience`
               │ stream open: send the terms, then Join           │   └─────> raise RemoteFault or Stalled
               v                                                  │
            JOINING ── the stream ends ───────────────────────────┤
               │                                                  │
               │ Welcome: `session.welcome` is set                │
               v                                                  │
            WELCOMED ── the stream ends ──────────────────────────┘
               │
               ├── Stop ───────────────────────────> return the server's reason
               ├── Stop(failed=True) ──────────────> raise RunError
               ├── Refused ────────────────────────> raise RemoteFault
               └── invalid message, worker fails ──> raise

Stop, Refused and failures end a JOINING connection in the same way.

Invariants:

- There is at most one session at a time. The worker finishes all work of a session before the next one opens.
- A session starts with the terms and one Join. Until Welcome, the client begins no activation. A session has
  one Welcome; a second one is an error.
- All connections of a process carry the same random instance id. By that id the server tells a process that
  reconnects from a second process of the same party.
- A process that was welcomed once may take its own place again, even at a restarted server that does not know
  its id.
- After it has received messages and before it sends the answers, the worker calls `after`, which writes a
  checkpoint if one is due.
- The client stops reading while more than `largest_message` bytes are unsent, so a server that keeps asking
  and never reads cannot exhaust this party's memory.
"""

import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import grpc
import grpc.aio

from vafl.errors import Diverged, InvalidMessage, RemoteFault, RunError
from vafl.protocol.messages import (
    ClientMessage,
    Durable,
    Evaluate,
    Gradient,
    Refused,
    Rekey,
    Request,
    ServerMessage,
    Skipped,
    Stop,
    Welcome,
)
from vafl.protocol.prediction_client import PredictionClient
from vafl.protocol.schedule import Sleeper
from vafl.protocol.settings import LARGEST_COUNT
from vafl.transport.codec import Codec
from vafl.transport.encodings import Frame
from vafl.transport.grpc.connection import Allowance
from vafl.transport.grpc.local import ClientCall, LocalCall, Metadata
from vafl.transport.grpc.pace import Pace
from vafl.transport.grpc.reconnect import FIRST_PAUSE, LONGEST_PAUSE, Reconnect, dial
from vafl.transport.grpc.session import Session
from vafl.transport.grpc.terms import RunTerms
from vafl.transport.grpc.wire import CLAIM, INSTANCE, PATH, TAKES_OVER, printable
from vafl.transport.grpc.worker import HELD_BACK, Worker
from vafl.transport.identity import Credentials
from vafl.transport.settings import NetworkSettings

log = logging.getLogger("vafl.client")

Result = TypeVar("Result")


class FederationClient:
    """Run one client until the server ends the run.

    Args:
        client: the protocol's client, or one that only answers requests.
        party: this party's name.
        terms: the run's terms as this party has configured them.
        settings: address, limits and timeouts.
        credentials: this party's certificate, or None for plaintext on loopback.
        sleeper: decides when the client wakes up next, for experiments; None wakes it as soon as possible.
        after: called by the worker after it has received messages and before it sends the answers; writes a
            checkpoint if one is due.
        takes_over: whether to take the place of another process of this party, because this one continues
            from its checkpoint or because the operator asked for it (--replace).
        connect: opens a connection to a server in this process; None dials `settings.address`.
        may_wake: returns whether the client may begin an activation now; the worker calls it often.

    Attributes:
        ended: the server's reason for ending the run; empty unless the run has ended normally.
        welcomed: whether the server has ever welcomed this process.
        durable: how many uploads of this client the server's checkpoint holds.
        reconnects: connections after the first one; -1 before the first.
        bytes_down: bytes received on all connections of this process.
    """

    def __init__(
        self,
        client: PredictionClient,
        party: str,
        terms: RunTerms,
        settings: NetworkSettings,
        credentials: Credentials | None,
        sleeper: Sleeper | None = None,
        after: Callable[[], None] = lambda: None,
        *,
        takes_over: bool = False,
        connect: Callable[[Metadata], LocalCall] | None = None,
        may_wake: Callable[[], bool] = lambda: True,
    ) -> None:
        self.client, self.party, self.ended, self.welcomed = client, party, "", False
        self._connect, self._may_wake = connect, may_wake
        self._instance, self._takes_over = secrets.token_hex(8), takes_over
        self.durable = 0
        self.reconnects = -1
        self.bytes_down, self._bytes_up = 0, 0
        self._current: Session | None = None
        self._terms, self._settings, self._credentials = terms, settings, credentials
        self._sleeper, self._after = sleeper, after
        self._codec = Codec(settings.encoding, settings.largest_message)
        self._reconnect = Reconnect(party, settings)
        self._began = time.monotonic()
        self._skips = 0  # uploads in a row that the server has skipped
        self._pace = Pace(client.rows) if client.noisy else None
        self._server_fault, self._warnings = "", Allowance(rate=0.1)
        self._failure: Exception | None = None

    @property
    def bytes_up(self) -> int:
        """Bytes sent on all connections of this process."""
        return self._bytes_up + (0 if self._current is None else self._current.sent)

    @property
    def is_connected(self) -> bool:
        """Return whether the server has welcomed this client on a connection that is still open."""
        return self._current is not None and self._current.welcome

    async def run(self) -> str:
        """Run until the run is over and return the server's reason for ending it.

        Raises:
            RemoteFault: the server refused this party, or broke the protocol.
            RunError: the server ended the run without a result.
            Stalled: the server could not be reached for `patience` seconds.
        """
        self._worker = Worker(self._fail)
        try:
            while True:
                try:
                    self.ended = await self._run_session()
                    return self.ended
                except grpc.aio.AioRpcError as error:
                    self._reconnect.judge(error)
                await self._reconnect.pause()
        finally:
            # The caller may save the client's state after this, so no turn may be under way any more.
            await self._worker.stop()

    async def _run_session(self) -> str:
        """Open one connection and use it until it is lost or the run ends; return the server's reason."""
        async with self._dial() as call:
            self._current = session = Session(call, self._settings.largest_message)
            session.send([self._terms.to_bytes()])
            self._worker.do(partial(self._join, session))
            self.reconnects += 1
            try:
                return await session.converse(partial(self._pass_on, session))
            except grpc.aio.AioRpcError:
                if session.welcome:
                    self._reconnect.welcomed = True
                    # The connection was alive until now, even if the server had nothing to send for long:
                    # `patience` counts from here.
                    self._reconnect.heard = time.monotonic()
                raise
            finally:
                # Finish the turns of this session before the next one sends its Join: the Join must describe
                # the client's final state.
                await self._worker.settle()
                self._bytes_up, self._current = self.bytes_up, None
                if self._failure:
                    raise self._failure

    @asynccontextmanager
    async def _dial(self) -> AsyncIterator[ClientCall]:
        if self._connect is not None:
            yield self._connect(self._metadata())
            return
        async with dial(PATH, self._metadata(), self._settings, self._credentials) as call:
            yield call

    def _metadata(self) -> Metadata:
        """Return the call's metadata: the party, its process, and whether that may take another's place.

        A process that was welcomed once may always take its own place again. A restarted server does not know
        its instance id, and would otherwise refuse it because of its earlier uploads.
        """
        takes_over = self._takes_over or self._reconnect.welcomed
        return (CLAIM, self.party), (INSTANCE, self._instance), (TAKES_OVER, "yes" if takes_over else "no")

    def _pass_on(self, session: Session, content: bytes) -> None:
        self._reconnect.heard = time.monotonic()
        self.bytes_down += len(content)
        self._worker.do(partial(self._receive, session, content))

    def _end_turn(self, session: Session, contents: list[bytes], may_wake: bool, handled: bool) -> None:
        """Send what the worker has made, and schedule its next activation. Runs on the event loop."""
        session.send(contents, handled=handled)
        if may_wake:
            awake = partial(self._worker.do, partial(self._turn, session, [], awake=True))
            session.wake_after(self._pause, awake)

    def _pause(self) -> float:
        """Return the seconds until the next activation, longer each time the server skips an upload."""
        if not self._may_wake():
            return FIRST_PAUSE / 10
        pause = min(FIRST_PAUSE * 2.0 ** min(self._skips, 10), LONGEST_PAUSE) if self._skips else 0.0
        if self._sleeper is None:
            return pause
        now = time.monotonic() - self._began
        return self._sleeper.wakes_at(now + pause) - now

    def _fail(self, error: Exception) -> None:
        self._failure = error
        if self._current is not None:
            self._current.fail(error)

    # --- the worker's part ---

    def _join(self, session: Session) -> None:
        self._worker.tell(session.send, [self._codec.encode(self.client.join())])

    def _receive(self, session: Session, content: bytes) -> None:
        """Handle one message of the stream, which may hold several frames."""
        self._take(session, self._codec.frames(content), [])

    def _take(self, session: Session, frames: Sequence[Frame], answers: list[ClientMessage]) -> None:
        """Handle frames in order and send the answers.

        Args:
            answers: made from earlier frames of the same message, and not sent yet.
        """
        for place, frame in enumerate(frames):
            # Two steps below wait: for room to send, and for the pace of a private client. Work that runs on
            # the event loop must not wait there, so it hands the remaining frames to the worker's thread.
            if session.answered > self._settings.largest_message:
                if not self._worker.may_wait:
                    self._worker.hand_over(partial(self._take, session, frames[place:], answers))
                    return
                if not self._wait_for_room(session, answers):
                    return
                answers, session.answered = [], 0
            message = self._codec.from_server(frame, self.client.index)
            if isinstance(message, Stop):
                if message.failed:
                    raise RunError(
                        "VFL-6091", f"the server ended the run without a result: {printable(message.reason)}."
                    )
                self._worker.tell(session.end, printable(message.reason))
                return
            if self._pace is not None and isinstance(message, Request | Evaluate):
                while wait := self._pace.wait(message.rows):
                    if not self._worker.may_wait:
                        self._worker.hand_over(partial(self._take, session, frames[place:], answers))
                        return
                    if not self._wait_for_pace(session, wait, answers):
                        return
                    answers = []
                self._pace.count(message.rows)
            self._note(session, message)
            made = self._act(partial(self.client.receive, message))
            session.answered += sum(map(self._codec.size, made))
            answers += made
        self._turn(session, answers, awake=False)

    def _note(self, session: Session, message: ServerMessage) -> None:
        """Check a message and update the state of the connection, before the protocol's client receives it.

        Raises:
            RemoteFault: the server refused a message of this party.
            InvalidMessage: the server broke a rule. The client's state is unchanged.
        """
        if isinstance(message, Refused):
            raise RemoteFault(
                "VFL-6092", f"the server refused a message of {self.party}: {printable(message.reason)}"
            )
        if isinstance(message, (Welcome, Gradient, Skipped)):
            self._check_counts(message.iteration, message.activations)
        if isinstance(message, Gradient) and message.stored:
            self._check_counts(message.iteration, message.stored)
        if isinstance(message, (Gradient, Skipped)):
            self._skips = self._skips + 1 if isinstance(message, Skipped) else 0
        elif isinstance(message, Welcome):
            if session.welcome:
                raise InvalidMessage(
                    "VFL-6093",
                    "the server must send one Welcome per stream. Found a second one. Report this to the "
                    "operator of the server.",
                )
            session.welcome = self.welcomed = True
            self.durable = message.durable
            log.info("%s joined the run at %s", self.party, self._settings.address)
        elif isinstance(message, Durable):
            self.durable = message.activation
        elif isinstance(message, Rekey):
            log.info("new keys: %s", printable(message.reason))

    def _wait_for_room(self, session: Session, answers: list[ClientMessage]) -> bool:
        """Send answers and wait until the server has read most of them.

        Otherwise a server that keeps asking and never reads could fill this party's memory. Return False if
        the connection ends first.
        """
        self._act(self._after)
        self._worker.tell(session.send, self._codec.contents(answers))
        return self._worker.wait_for(session.find_room())

    def _wait_for_pace(self, session: Session, seconds: float, answers: list[ClientMessage]) -> bool:
        """Send answers, then wait. Return False if the connection ends first.

        The client reads nothing in the meantime, so flow control makes the server wait as well.
        """
        self._act(self._after)
        self._worker.tell(session.send, self._codec.contents(answers))
        return self._worker.wait_for(session.pause(seconds))

    def _act(self, act: Callable[[], Result]) -> Result:
        """Call `act`, and blame the server for a failure that it has caused.

        Raises:
            RemoteFault: the model has diverged after the server sent gradients that no honest server sends.
            Diverged: the model has diverged for another reason.
        """
        try:
            result = act()
        except Diverged as error:
            if fault := self.client.server_fault:
                raise RemoteFault(
                    "VFL-6094",
                    f"the server at {self._settings.address} sent {fault}. The model of {self.party} is no "
                    "longer finite; its last good checkpoint is kept. Talk to the operator of the server "
                    "before you continue with --resume.",
                ) from error
            raise
        if (fault := self.client.server_fault) != self._server_fault:
            self._server_fault = fault
            if self._warnings.take():
                log.warning("the server sent %s: scaled down", fault)
        return result

    def _check_counts(self, iteration: int, activations: Sequence[int]) -> None:
        """Raise InvalidMessage for counts that no run can have.

        The client continues from these counts and derives from them which batches come next.
        """
        count = len(activations)
        if count != self._terms.clients or iteration < 0 or max(iteration, *activations) > LARGEST_COUNT:
            raise InvalidMessage(
                "VFL-6095",
                f"the server must count its steps and the uploads of {self._terms.clients} clients, each "
                f"from 0 to {LARGEST_COUNT}. Found step {iteration}, and {count} clients with at most "
                f"{max(activations, default=0)} uploads.",
            )

    def _turn(self, session: Session, messages: list[ClientMessage], awake: bool) -> None:
        """Begin activations if the client may, and send their uploads together with `messages`.

        A client without a sleeper and without skipped uploads begins as many activations as its window
        allows. Any other begins one each time its alarm rings.

        Args:
            messages: answers that are not sent yet.
            awake: whether the alarm has called this; otherwise a message of the server has.
        """
        self._act(self._after)  # write a checkpoint, if one is due, before the answers leave this process
        free, handled = self._sleeper is None and not self._skips, not awake
        goes_on = awake or (free and not self._waits_for_answers())
        begin = self._worker.worked()
        held_back = False
        while session.welcome and goes_on and not self.client.waiting:
            if held_back := not self._may_wake():
                break
            # Sending messages together is cheaper, but the server must not idle while they are made.
            if messages and self._worker.worked() > begin + HELD_BACK:
                self._worker.tell(session.send, self._codec.contents(messages))
                messages, begin = [], self._worker.worked()
            messages += self._act(self.client.wake)
            goes_on = free
        may_wake = session.welcome and (held_back or not free) and not self.client.waiting
        self._worker.tell(self._end_turn, session, self._codec.contents(messages), may_wake, handled)

    def _waits_for_answers(self) -> bool:
        """Return whether to begin no activation before the answers to all uploads have arrived.

        With a small model, sending an upload takes longer than computing it. Then it pays to send the uploads
        of a window together, and to receive their answers together. A server's only client does not wait: the
        two would only work in turns, never at the same time.
        """
        return self.client.owed > 0 and self._terms.clients > 1 and not self._worker.may_wait
