"""One client's stream as the server sees it: identity, queues, flow control and rate limits.

A `Connection` exists from a client's admission until its stream is closed:

    (admission: `identify`, `arrival`, the terms)
           │
           v
         OPEN      joined = False    waits for Join; the only replies are Refused and Stop
           │ the protocol accepts Join
           v
        JOINED     joined = True     messages both ways
           │ `end()`, also from OPEN
           v
        ENDING     ending is set     the writer sends the outbox up to the None that `end` has appended
           │ outbox empty, or `expire(grace)` returns
           v
        CLOSED     dropped by the server

A stream that its client closes, or whose network connection is lost, goes from OPEN or JOINED to CLOSED.

A message of the client spends one credit when it is read. The credit comes back in two steps:

    read: unhandled += 1 ──> worker ──> unhandled -= 1, handled += 1 ──> `give_credit`: credit += handled

Invariants:

- At most `_INBOX` messages of one client are unhandled.
- `give_credit` does nothing while more than `_OUTBOX` replies are queued, so a client that does not read its
  replies cannot make the server queue ever more of them.
- `joined` never goes back to False. A client that reconnects gets a new `Connection`.
- `joined` and `violations` are set by the worker; everything else is set on the event loop.
- Messages queued after `end` are never sent.
"""

import asyncio
import logging
import socket
import time
from dataclasses import dataclass, field

import grpc.aio

from vafl.errors import ConfigError, Unauthenticated
from vafl.names import LOCAL_CLIENT
from vafl.protocol.settings import LARGEST_WINDOW
from vafl.transport.grpc.flow_control import Credit, Outbox
from vafl.transport.grpc.local import LocalContext, ServerStream
from vafl.transport.grpc.wire import CLAIM, INSTANCE, TAKES_OVER
from vafl.transport.identity import Credentials, party_of, require_loopback
from vafl.transport.settings import NetworkSettings

log = logging.getLogger("vafl.server")

_LAST_PORT = 65535
_LONGEST_INSTANCE = 64
_INBOX = 4  # messages of one client that may wait for the worker
# Replies that may be queued for one client before the server stops reading its messages. A client, too,
# stops reading while too much of its own is unsent. If both ends stopped, they would wait for each other
# forever. So this limit exceeds the number of replies that an honest client in training can leave unread.
_OUTBOX = LARGEST_WINDOW + 16


@dataclass(eq=False)
class Connection:
    """One client's live stream. The module's docstring describes its states.

    Attributes:
        client: the client's number.
        party: the client's name.
        instance: the random id of the client's process, the same whenever that process reconnects.
        outbox: replies that wait to be written.
        credit: messages that may still be read before others are handled.
        handled: messages that the worker has handled and whose credit was not returned yet.
        violations: messages of this stream that were refused.
        joined: whether the protocol has accepted the client's Join on this stream.
        ending: set once the stream is to be closed.
        unhandled: messages that wait for the worker.
    """

    client: int
    party: str
    instance: str = ""
    outbox: Outbox = field(default_factory=Outbox)
    credit: Credit = field(default_factory=lambda: Credit(_INBOX))
    handled: int = 0
    violations: int = 0
    joined: bool = False
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    unhandled: int = 0
    _turn_since: float = field(default_factory=time.monotonic)  # when it became the client's turn to send
    _addressed: bool = False  # whether anything was sent to the client since its last message

    def note_heard(self) -> None:
        """Record that a message of the client has arrived."""
        self.unhandled += 1
        self._turn_since, self._addressed = time.monotonic(), False

    def note_sent(self) -> None:
        """Record that a message is sent. Only the first one after a message of the client restarts the clock.

        So further messages give the client no more time to answer the first.
        """
        if not self._addressed:
            self._turn_since, self._addressed = time.monotonic(), True

    @property
    def silence(self) -> float:
        """Seconds for which the client could have sent a message and did not.

        0 while messages of the client wait for the worker: then it is the server that is slow.
        """
        return 0.0 if self.unhandled else time.monotonic() - self._turn_since

    def give_credit(self) -> None:
        """Return the credit for handled messages, unless too many replies are queued."""
        if self.handled and len(self.outbox) <= _OUTBOX:
            self.credit.give(self.handled)
            self.handled = 0

    def end(self) -> None:
        """Close the stream once everything queued is sent, or once `expire` returns."""
        self.outbox.put(None)
        self.ending.set()

    async def expire(self, grace: float) -> None:
        """Return `grace` seconds after `end` was called: the client has had its time to read."""
        await self.ending.wait()
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


async def next_message(context: ServerStream) -> bytes:
    """Return the stream's next message, or b"" if the client has closed the stream."""
    content = await context.read()
    return content if isinstance(content, bytes) else b""


def listen(server: grpc.aio.Server, settings: NetworkSettings, credentials: Credentials | None) -> str:
    """Bind the server to `settings.address` and return host:port, with the actual port for port 0.

    Raises:
        ConfigError: the address cannot be used, or it is not loopback and there are no credentials.
    """
    if credentials is None:
        require_loopback(settings.address)
        log.warning("PLAINTEXT: no encryption and no identities; for trials on one machine only")
    try:
        if credentials is None:
            port = server.add_insecure_port(settings.address)
        else:
            port = server.add_secure_port(settings.address, credentials.server_credentials())
    except RuntimeError as error:
        require_free(settings.address)  # gRPC does not say why it failed; this usually finds out
        raise _cannot_listen(settings.address, "gRPC could not bind it") from error
    return f"{settings.address.rpartition(':')[0]}:{port}"


def require_free(address: str) -> None:
    """Raise ConfigError unless a server can listen on this address now.

    Commands call this before they create or change any file.
    """
    host, _, port = address.rpartition(":")
    if int(port) > _LAST_PORT:
        raise _cannot_listen(address, "no such port")
    why = ""
    try:
        for family, kind, _, _, endpoint in socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    trial.bind(endpoint)
                    trial.listen(1)
                    return  # one of the host's addresses is enough, as it is for gRPC
                except OSError as error:
                    why = why or error.strerror or str(error)
    except (OSError, UnicodeError) as error:
        why = str(error)
    raise _cannot_listen(address, why)


def _cannot_listen(address: str, why: str) -> ConfigError:
    return ConfigError(
        "VFL-6101",
        "network.address must be an address of this machine with a free port, so that the server can listen "
        f'on it. Found "{address}": {why}. Stop the process that listens there, or choose another port. If '
        "clients reach this machine through another address (NAT), start the server alone with "
        f"--set network.address=0.0.0.0:{address.rpartition(':')[2]}.",
    )


def arrival(context: ServerStream) -> tuple[str, bool]:
    """Return the instance id of the peer's process, and whether it may take another process's place."""
    metadata = dict(context.invocation_metadata() or ())
    return str(metadata.get(INSTANCE, ""))[:_LONGEST_INSTANCE], metadata.get(TAKES_OVER) == "yes"


def identify(context: ServerStream, credentials: Credentials | None) -> str:
    """Return the party at the other end of a connection.

    With TLS, the certificate names the party, and the name that the client claims must be the same. With
    plaintext there is only the claim. The label holder's own client always connects inside this process.

    Raises:
        Unauthenticated: the names differ, or a peer poses as the label holder's own client.
    """
    if isinstance(context, LocalContext):
        return context.party
    claimed = str(dict(context.invocation_metadata() or ()).get(CLAIM, ""))
    party = claimed if credentials is None else party_of(context.auth_context())
    if party == LOCAL_CLIENT:
        raise Unauthenticated(
            "VFL-6102",
            f'only the client inside the server\'s process may be called "{LOCAL_CLIENT}". Found a peer with '
            "that name. Start clients under the names in data.parties.",
        )
    if claimed not in ("", party):
        raise Unauthenticated(
            "VFL-6103",
            f'a party must use its own certificate. Found that of "{party}", shown by "{claimed}". Start '
            "each party with the files that were made for it.",
        )
    return party
