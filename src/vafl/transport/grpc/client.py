"""A client's end: dials out, says where it stands, works while it is welcome, dials again when cut off."""

import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
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
from vafl.transport.grpc.local import ClientStream, LocalCall, Metadata
from vafl.transport.grpc.pace import Pace
from vafl.transport.grpc.reconnect import FIRST_PAUSE, LONGEST_PAUSE, Reconnect, open_channel
from vafl.transport.grpc.session import Session
from vafl.transport.grpc.wire import CLAIM, INSTANCE, PATH, TAKES_OVER, Agreement, printable
from vafl.transport.grpc.worker import HELD_BACK, Worker
from vafl.transport.identity import Credentials
from vafl.transport.settings import NetworkSettings

log = logging.getLogger("vafl.client")

Result = TypeVar("Result")


class FederationClient:
    """Runs one client until the server says that the run is over.

    Args:
        client: the protocol's client, or one that only answers.
        party: this party's name.
        terms: what it thinks the run's terms are.
        settings: address, limits, patience.
        credentials: this party's certificate, or None for plaintext on loopback.
        sleeper: when to wake up next, for experiments; None is as soon as possible.
        after: called by the worker, for checkpoints, when messages were taken in and before anything
            is said.
        takes_over: whether it may take the place of another process of this party: it goes on from that
            one's checkpoint, or its operator has said so.
        connect: opens a connection to the server in this process; None dials the address of the settings.
        may_wake: whether the client may begin an activation now; asked often, from the worker.

    Attributes:
        ended: the server's reason for ending the run, once it has ended in order.
        welcomed: whether the server has ever admitted this process.
    """

    def __init__(
        self,
        client: PredictionClient,
        party: str,
        terms: Agreement,
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
        self._reach = Reconnect(party, settings)
        self._began = time.monotonic()
        self._skips = 0
        self._pace = Pace(client.rows) if client.noisy else None
        self._server_fault, self._warnings = "", Allowance(rate=0.1)
        self._failure: Exception | None = None

    @property
    def bytes_up(self) -> int:
        """Bytes sent on all connections of this process."""
        return self._bytes_up + (0 if self._current is None else self._current.sent)

    @property
    def is_connected(self) -> bool:
        """Whether the server has welcomed this client on a connection that is still open."""
        return self._current is not None and self._current.welcome

    async def run(self) -> str:
        """Works until the run is over; gives the server's reason for ending it.

        Raises:
            RemoteFault: the server refused this party, and why.
            RunError: it ended the run without a result, and why.
            Stalled: the server could not be reached for `patience` seconds.
        """
        self._worker = Worker(self._fail)
        try:
            self.ended = await self._persist()
            return self.ended
        finally:
            await self._worker.stop()  # whoever saves the client's state now must not do it amid a turn

    async def _persist(self) -> str:
        """Dials again whenever it is cut off."""
        while True:
            try:
                return await self._session()
            except grpc.aio.AioRpcError as error:
                self._reach.judge(error)
            await self._reach.pause()

    async def _session(self) -> str:
        """One connection, from joining to the run's end."""
        async with self._dial() as stream:
            self._current = session = Session(stream, self._settings.largest_message)
            session.say([self._terms.to_bytes()])
            self._worker.do(partial(self._join, session))
            self.reconnects += 1
            try:
                return await session.run(partial(self._hear, session))
            except grpc.aio.AioRpcError:
                if session.welcome:
                    self._reach.welcomed = True
                    self._reach.heard = time.monotonic()  # however long it had nothing to say, it was there
                raise
            finally:
                await self._worker.settle()
                self._bytes_up, self._current = self.bytes_up, None
                if self._failure:
                    raise self._failure

    @asynccontextmanager
    async def _dial(self) -> AsyncIterator[ClientStream]:
        if self._connect is not None:
            yield self._connect(self._introduction())
            return
        async with open_channel(self._settings, self._credentials) as channel:
            yield channel.stream_stream(PATH)(metadata=self._introduction())

    def _introduction(self) -> Metadata:
        """Say which party and process this is. Once welcomed, it may take its own place again: a server that
        was restarted does not know the process any more."""
        takes_over = self._takes_over or self._reach.welcomed
        return (CLAIM, self.party), (INSTANCE, self._instance), (TAKES_OVER, "yes" if takes_over else "no")

    def _hear(self, session: Session, content: bytes) -> None:
        self._reach.heard = time.monotonic()
        self.bytes_down += len(content)
        self._worker.do(partial(self._receive, session, content))

    def _end_turn(self, session: Session, contents: list[bytes], may_wake: bool, handled: bool) -> None:
        """On the event loop: says what the worker has to say, and sees to its next activation."""
        session.say(contents, handled=handled)
        if may_wake:
            awake = partial(self._worker.do, partial(self._turn, session, [], awake=True))
            session.wake_after(self._pause, awake)

    def _pause(self) -> float:
        """Seconds until the next activation; more and more while the server has to skip what comes."""
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
        self._worker.tell(session.say, [self._codec.encode(self.client.join())])

    def _receive(self, session: Session, content: bytes) -> None:
        """Takes what the server said at one time, and acts on it."""
        self._take(session, self._codec.frames(content), [])

    def _take(self, session: Session, frames: Sequence[Frame], said: list[ClientMessage]) -> None:
        for place, frame in enumerate(frames):
            if session.answered > self._settings.largest_message:
                if not self._worker.may_wait:
                    self._worker.hand_over(partial(self._take, session, frames[place:], said))
                    return
                if not self._has_room(session, said):
                    return
                said, session.answered = [], 0
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
                        self._worker.hand_over(partial(self._take, session, frames[place:], said))
                        return
                    if not self._pauses(session, wait, said):
                        return
                    said = []
                self._pace.count(message.rows)
            self._note(session, message)
            answer = self._act(partial(self.client.receive, message))
            session.answered += sum(map(self._codec.size, answer))
            said += answer
        self._turn(session, said, awake=False)

    def _note(self, session: Session, message: ServerMessage) -> None:
        """Take note of what a message says to this end of the connection, before the client takes it.

        Raises:
            RemoteFault: the server refused a message of this party.
            InvalidMessage: the server broke a rule; the client has not heard of it.
        """
        if isinstance(message, Refused):
            raise RemoteFault(
                "VFL-6092", f"the server refused a message of {self.party}: {printable(message.reason)}"
            )
        if isinstance(message, (Welcome, Gradient, Skipped)):
            self._check_counts(message.iteration, message.activations)
        if isinstance(message, (Gradient, Skipped)):
            self._skips = self._skips + 1 if isinstance(message, Skipped) else 0
        elif isinstance(message, Welcome):
            if session.welcome:
                raise InvalidMessage(
                    "VFL-6093", "a stream has one welcome. Found another one from the server."
                )
            session.welcome = self.welcomed = True
            self.durable = message.durable
            log.info("%s joined the run at %s", self.party, self._settings.address)
        elif isinstance(message, Durable):
            self.durable = message.activation
        elif isinstance(message, Rekey):
            log.info("new keys: %s", printable(message.reason))

    def _has_room(self, session: Session, said: list[ClientMessage]) -> bool:
        """Says this, and waits until the server has taken most of it: one that asks and asks and takes no
        answer must not fill this party's memory. False if the connection ends first."""
        self._act(self._after)
        room: Future[bool] = Future()
        self._worker.tell(session.say, self._codec.contents(said))
        self._worker.tell(session.find_room, room)
        return room.result()

    def _pauses(self, session: Session, seconds: float, said: list[ClientMessage]) -> bool:
        """Send this, then wait. Meanwhile nothing more is read: the server has to wait as well. Return False
        if the connection ends first."""
        self._act(self._after)
        over: Future[bool] = Future()
        self._worker.tell(session.say, self._codec.contents(said))
        self._worker.tell(session.pause, seconds, over)
        return over.result()

    def _act(self, act: Callable[[], Result]) -> Result:
        """Let the client act, and report what is the server's fault rather than this party's.

        Raises:
            RemoteFault: the model has diverged after the server sent gradients that no honest server sends.
        """
        try:
            result = act()
        except Diverged as error:
            if fault := self.client.server_fault:
                raise RemoteFault(
                    "VFL-6094",
                    f"the server at {self._settings.address} sent {fault}. The model of {self.party} is not "
                    "finite any more; its last good checkpoint is kept. Talk to the operator of the server "
                    "before you go on with --resume.",
                ) from error
            raise
        if (fault := self.client.server_fault) != self._server_fault:
            self._server_fault = fault
            if self._warnings.take():
                log.warning("the server sent %s: scaled down", fault)
        return result

    def _check_counts(self, iteration: int, activations: Sequence[int]) -> None:
        """The client will go on, and look ahead, from there: no run can stand elsewhere."""
        count = len(activations)
        if count != self._terms.clients or iteration < 0 or max(iteration, *activations) > LARGEST_COUNT:
            raise InvalidMessage(
                "VFL-6095",
                f"the server must count its steps and the uploads of {self._terms.clients} clients, each "
                f"from 0 to {LARGEST_COUNT}. Found {iteration} and {count}, {max(activations, default=0)} at "
                "most.",
            )

    def _turn(self, session: Session, said: list[ClientMessage], awake: bool) -> None:
        """Begins an activation if awake, or as many as may be if nothing holds it back; says all of it,
        together unless it takes long to make."""
        self._act(self._after)
        free, handled = self._sleeper is None and not self._skips, not awake
        goes_on = awake or (free and not self._waits_for_the_rest())
        begin = self._worker.worked()
        held_back = False
        while session.welcome and goes_on and not self.client.waiting:
            if held_back := not self._may_wake():
                break
            if said and self._worker.worked() > begin + HELD_BACK:
                self._worker.tell(session.say, self._codec.contents(said))
                said, begin = [], self._worker.worked()
            said += self._act(self.client.wake)
            goes_on = free
        may_wake = session.welcome and (held_back or not free) and not self.client.waiting
        self._worker.tell(self._end_turn, session, self._codec.contents(said), may_wake, handled)

    def _waits_for_the_rest(self) -> bool:
        """Whether to begin nothing before all answers are here. Where work is brief, to send it takes longer
        than to make it: the uploads of a window go together, and so do their answers. A client that has the
        server to itself would only take turns with it."""
        return self.client.owed > 0 and self._terms.clients > 1 and not self._worker.may_wait
