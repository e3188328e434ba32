"""Names, terms and gRPC options that both ends of a stream share, and the set-up of a party's process."""

import asyncio
import ctypes
import hashlib
import json
import multiprocessing
import os
import sys
from collections.abc import Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_origin, get_type_hints

from vafl.errors import InvalidMessage
from vafl.protocol.schedule import BatchSchedule
from vafl.transport.settings import NetworkSettings

SERVICE = "vafl.Federation"
METHOD = "Stream"
PATH = f"/{SERVICE}/{METHOD}"
CLAIM = "vafl-party"  # metadata: the party that the client claims to be
INSTANCE = "vafl-instance"  # metadata: the random id of the client's process
TAKES_OVER = "vafl-takes-over"  # metadata: "yes" if it may take the place of another process of its party
PROTOCOL = 6
LARGEST_TERMS = 16_384  # bytes
_LONGEST_REASON = 1000  # characters of a peer's text that are shown
_LONGEST_SETTING = 120  # characters of a setting; longer ones are cut and get a digest
MANY_VIOLATIONS = 100  # refused messages after which the server closes a stream


@dataclass(frozen=True)
class Agreement:
    """The terms of a run, which must be equal at every party. A client sends its terms when it joins.

    Attributes:
        protocol: version of the network protocol.
        run_id: network.run_id.
        records: number of records.
        record_digest: digest of the aligned records.
        width: values of the embeddings.
        clients: number of clients.
        schedule_digest: see `schedule_digest`.
        encoding: network.encoding.
        settings: dotted name -> value, as `settled` writes them; empty if `model` determines them.
        model: the trained model that is used; empty while one is trained.
    """

    protocol: int
    run_id: str
    records: int
    record_digest: str
    width: int
    clients: int
    schedule_digest: str
    encoding: str
    settings: dict[str, str] = field(default_factory=dict)
    model: str = ""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Agreement":
        """Read terms that another party has sent.

        Raises:
            InvalidMessage: the content is too long, not JSON, or has other fields or types.
        """
        if len(content) > LARGEST_TERMS:
            raise InvalidMessage(
                "VFL-6131",
                f"terms must have at most {LARGEST_TERMS} bytes. Found {len(content):,}. Use the same "
                "version of vafl at every party.",
            )
        try:
            values = json.loads(content)
            terms = cls(**values)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidMessage(
                "VFL-6132",
                f"a stream must begin with the run's terms in the form of protocol {PROTOCOL}. Found other "
                "content. Use the same version of vafl at every party.",
            ) from error
        for name, hint in get_type_hints(cls).items():
            kind = get_origin(hint) or hint
            value_kind = type(getattr(terms, name))
            if value_kind is not kind:
                raise InvalidMessage(
                    "VFL-6133", f"{name} in the terms must be {kind.__name__}. Found {value_kind.__name__}."
                )
        if not all(type(value) is str for value in terms.settings.values()):
            raise InvalidMessage("VFL-6134", "every setting in the terms must be text. Found another type.")
        return terms

    def entries(self) -> dict[str, str]:
        """Return every term and setting by its name, as text for people."""
        terms = {name: repr(value) for name, value in vars(self).items() if name != "settings"}
        return terms | self.settings

    def difference(self, other: "Agreement") -> str:
        """Describe the terms that differ; empty if none do. `self` are the server's, `other` a client's."""
        entries = differing(self.entries(), other.entries())
        return printable("; ".join(f"{name} {a} at the server, {b} at the client" for name, a, b in entries))


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return (name, our value, their value) of all terms that differ.

    Leave out digests if anything else differs: they do not tell people what to change.
    """
    names = dict.fromkeys([*ours, *theirs])
    entries = [(name, ours.get(name, "nothing"), theirs.get(name, "nothing")) for name in names]
    entries = [entry for entry in entries if entry[1] != entry[2]]
    return [entry for entry in entries if not entry[0].endswith("_digest")] or entries


def settled(sections: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as text, by dotted name. A long one is cut and followed by a digest of all of it."""
    flat: dict[str, str] = {}
    for section, values in sections.items():
        for name, value in values.items() if isinstance(values, dict) else [("", values)]:
            text = json.dumps(value, sort_keys=True)
            if len(text) > _LONGEST_SETTING:
                text = f"{text[:_LONGEST_SETTING]}... ({hashlib.sha256(text.encode()).hexdigest()[:16]})"
            flat[f"{section}.{name}".removesuffix(".")] = text
    return flat


def schedule_digest(schedules: list[BatchSchedule]) -> str:
    """Return a digest of the first two batches of each schedule.

    It changes with the seed, the kind of schedule, the batch size and versions of libraries that deal out
    other batches.
    """
    digest = hashlib.sha256()
    for schedule in schedules:
        digest.update(schedule.batch(0).tobytes() + schedule.batch(1).tobytes())
    return digest.hexdigest()[:16]


def printable(words: str) -> str:
    """Make a peer's text safe for terminals and logs: at most 1000 characters, no control characters."""
    return "".join(filter(str.isprintable, words[:_LONGEST_REASON]))


def channel_options(settings: NetworkSettings) -> list[tuple[str, Any]]:
    """Return gRPC's limits and keepalive options, the same for both ends."""
    period, largest = int(settings.heartbeat * 1000), max(settings.largest_message, LARGEST_TERMS)
    return [
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_send_message_length", largest),
        ("grpc.keepalive_time_ms", period),
        # gRPC sends a ping after one heartbeat of silence, and the answer has two more to arrive. gRPC has
        # two timers for that answer and closes the connection at the later one. The second defaults to 60 s.
        ("grpc.keepalive_timeout_ms", 2 * period),
        ("grpc.http2.ping_timeout_ms", 2 * period),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", period // 2),
        ("grpc.http2.max_ping_strikes", 0),  # allow pings at any rate: each party chooses its own heartbeat
        ("grpc.max_concurrent_streams", 4),
        ("grpc.enable_retries", 0),
        # Each channel makes one attempt to connect and shares nothing with other channels: `Reconnect`
        # decides when to try again. gRPC itself must not retry, because even a closed channel would keep
        # trying for as long as anything refers to its stream.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_reconnect_backoff_ms", 3 * period),
        ("grpc.initial_reconnect_backoff_ms", 3 * period),
        ("grpc.min_reconnect_backoff_ms", 3 * period),  # also the deadline of a TLS handshake
        ("grpc.so_reuseport", 0),
    ]


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a party's event loop, with uvloop if it is installed."""
    prepare_process()
    try:
        import uvloop  # noqa: PLC0415

        factory = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


def prepare_process() -> None:
    """Configure the process: keep memory for large messages, and forbid forking."""
    _keep_large_blocks()
    multiprocessing.set_start_method("spawn", force=True)
    os.register_at_fork(after_in_child=_refuse_fork)


def _keep_large_blocks() -> None:
    """Make glibc keep freed memory. Mapping it again for each large message costs more than sending it."""
    if not sys.platform.startswith("linux"):
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return  # another C library, without mallopt
    for option, value in ((mmap_threshold, 32 << 20), (trim_threshold, 512 << 20), (top_pad, 64 << 20)):
        mallopt(option, value)


def _refuse_fork() -> None:
    """End a forked child at once: it shares the sockets and threads of the stream, and may corrupt them."""
    message = "vafl: a process with a live stream must not be forked; use subprocess or the spawn method\n"
    os.write(2, message.encode())
    os._exit(70)
