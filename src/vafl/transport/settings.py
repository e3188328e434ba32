"""The [network] section: how the parties reach and trust each other."""

from dataclasses import dataclass
from typing import Literal

from vafl.errors import ConfigError
from vafl.scope import Scope, setting

Encoding = Literal["float32", "float16", "bfloat16", "int8"]
ENCODINGS: tuple[Encoding, ...] = ("float32", "float16", "bfloat16", "int8")


@dataclass(frozen=True)
class NetworkSettings:
    """How the parties reach and trust each other.

    Attributes:
        address: host:port the server listens on and clients dial.
        certificates: folder with ca.pem and this party's certificate and key (`vafl certs` makes them).
        security: `mtls`, or `plaintext` on a loopback address only.
        run_id: the name of the run. All parties must set the same one.
        encoding: encoding of embeddings and gradients: float32, float16, bfloat16 or int8.
        largest_message: the most bytes of a message. A larger one is refused before it is read.
        largest_norm: the largest norm of an embedding that the server accepts. 0 derives a limit from the
            run: embeddings 1000 times larger than the client's recent ones are refused.
        messages_per_second: how many messages a client may send per second, on average. 0 derives a limit
            from the run: a client that sends 50 times as many as any other is slowed down.
        heartbeat: seconds between two heartbeats. A client whose turn it is and that sends nothing for one
            heartbeat is shown as silent. A peer that answers no ping for three heartbeats is disconnected.
        join_timeout: seconds for which the server waits for all clients at the start. It then starts without
            those that are missing.
        patience: seconds a client tries to reach the server before it gives up.
        answer_timeout: seconds a client has to answer a request of the server. After that the server
            continues without the answer: an evaluation uses what the client sent last, and
            rule.when_unanswered decides for the delay bound. A late answer is still used.
        checkpoint_every: updates (for a client: activations) between checkpoints.
        real_delays: whether clients sleep between activations as [delays] says, in real seconds. For
            experiments.
    """

    address: str = "127.0.0.1:7443"
    certificates: str = setting("", is_path=True)
    security: Literal["mtls", "plaintext"] = "mtls"
    run_id: str = setting("vafl", scope=Scope.TRAINING)
    encoding: Encoding = setting("float32", scope=Scope.TRAINING, may_change=True)
    largest_message: int = 64 << 20
    largest_norm: float = 0.0
    messages_per_second: float = 0.0
    heartbeat: float = 10.0
    join_timeout: float = 300.0
    patience: float = 300.0
    answer_timeout: float = 60.0
    checkpoint_every: int = 500
    real_delays: bool = False

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError("VFL-6251", f'network.address must be host:port. Found "{self.address}".')
        positive = ("heartbeat", "join_timeout", "patience", "answer_timeout")
        for name in (*positive, "largest_message", "checkpoint_every"):
            if not getattr(self, name) > 0:
                raise ConfigError("VFL-6252", f"network.{name} must be above 0. Found {getattr(self, name)}.")
        for name in ("largest_norm", "messages_per_second"):
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    "VFL-6253", f"network.{name} must be 0 or more. Found {getattr(self, name)}."
                )
