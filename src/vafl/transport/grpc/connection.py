"""One client's stream as the server sees it: whose it is, what waits on it, how much its client may say."""

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
_INBOX = 4  # of one client's messages that may wait for the worker
# Messages that may wait for one client to read them, before none of its own are taken: more than an honest
# one in training can let lie, so that the two ends, each of which stops reading, never wait for each other.
_OUTBOX = LARGEST_WINDOW + 16


@dataclass(eq=False)
class Connection:
    """One client's live stream.

    Attributes:
        instance: which process of the party it is: random, and the same when that process dials again.
        credit: messages it may have waiting for the worker.
        handled: messages the worker has handled and no credit was given back for yet.
        joined: whether the client has said where it stands: before, nothing else is said or heard.
        ending: whether the stream is to end.
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
    _turn_since: float = field(default_factory=time.monotonic)  # it has been the client's turn to speak
    _addressed: bool = False  # something was sent to the client since it was last heard

    def note_heard(self) -> None:
        """Note that a message of the client has arrived."""
        self.unhandled += 1
        self._turn_since, self._addressed = time.monotonic(), False

    def note_sent(self) -> None:
        """Note that a message goes to the client. Further ones give it no more time to answer the first."""
        if not self._addressed:
            self._turn_since, self._addressed = time.monotonic(), True

    @property
    def silence(self) -> float:
        """Seconds for which the client could have spoken and did not; 0 while its messages are handled."""
        return 0.0 if self.unhandled else time.monotonic() - self._turn_since

    def give_credit(self) -> None:
        """For what was handled, unless the client lets too many answers lie."""
        if self.handled and len(self.outbox) <= _OUTBOX:
            self.credit.give(self.handled)
            self.handled = 0

    def end(self) -> None:
        """End the stream as soon as the client has read everything queued for it, or `expire` has passed."""
        self.outbox.put(None)
        self.ending.set()

    async def expire(self, grace: float) -> None:
        """Wait until the stream is to end, and `grace` seconds more."""
        await self.ending.wait()
        await asyncio.sleep(grace)


@dataclass
class Allowance:
    """How often something may be done now: it grows with time, up to a second's worth (or 10).

    A client's allowance of messages outlasts its stream, so that dialling again buys nothing."""

    rate: float
    left: float = 10.0
    at: float = field(default_factory=time.monotonic)

    def take(self) -> bool:
        """Whether it may be done once more; that then counts."""
        now = time.monotonic()
        self.left = min(max(10.0, self.rate), self.left + self.rate * (now - self.at))
        self.at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True


async def next_message(context: ServerStream) -> bytes:
    """The stream's next message; empty when the client has closed the stream."""
    content = await context.read()
    return content if isinstance(content, bytes) else b""


def listen(server: grpc.aio.Server, settings: NetworkSettings, credentials: Credentials | None) -> str:
    """Binds the server to the address of the settings; gives host:port as it turned out."""
    if credentials is None:
        require_loopback(settings.address)
        log.warning("PLAINTEXT: no encryption and no identities; for trials on one machine only")
    try:
        if credentials is None:
            port = server.add_insecure_port(settings.address)
        else:
            port = server.add_secure_port(settings.address, credentials.server_credentials())
    except RuntimeError as error:  # gRPC does not say why
        require_free(settings.address)
        raise _taken(settings.address, "gRPC could not bind it") from error
    return f"{settings.address.rpartition(':')[0]}:{port}"


def require_free(address: str) -> None:
    """Raises ConfigError unless a server can listen there now: whoever asks first has changed nothing yet."""
    host, _, port = address.rpartition(":")
    if int(port) > _LAST_PORT:
        raise _taken(address, "no such port")
    why = ""
    try:
        for family, kind, _, _, place in socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    trial.bind(place)
                    trial.listen(1)
                    return  # one is enough, as for gRPC
                except OSError as error:
                    why = why or error.strerror or str(error)
    except (OSError, UnicodeError) as error:
        why = str(error)
    raise _taken(address, why)


def _taken(address: str, why: str) -> ConfigError:
    return ConfigError(
        "VFL-6101",
        "the server must be able to listen on network.address: an address of this machine, a port that is "
        f'free. Found "{address}": {why}. End what listens there, name another port, or, where clients reach '
        "this machine by an address that is not its own (NAT), give the server alone "
        f"--set network.address=0.0.0.0:{address.rpartition(':')[2]}.",
    )


def arrival(context: ServerStream) -> tuple[str, bool]:
    """Return which process of its party dials, and whether it may take another one's place."""
    metadata = dict(context.invocation_metadata() or ())
    return str(metadata.get(INSTANCE, ""))[:_LONGEST_INSTANCE], metadata.get(TAKES_OVER) == "yes"


def identify(context: ServerStream, credentials: Credentials | None) -> str:
    """Return the party at the other end of a connection.

    The certificate names it, and the client must claim the same name. Plaintext has only the claim. The label
    holder's own client connects inside this process and in no other way.

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
            f'"{LOCAL_CLIENT}" is the client inside the server\'s process. Found a peer with that name. '
            "Start clients under the names in data.parties.",
        )
    if claimed not in ("", party):
        raise Unauthenticated(
            "VFL-6103",
            f'a party must show its own certificate. Found that of "{party}", shown by "{claimed}".',
        )
    return party
