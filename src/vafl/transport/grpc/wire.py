"""What both ends of a stream agree on before any message: method, options, terms; and process set-up."""

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
CLAIM = "vafl-party"  # metadata: who the client says it is
INSTANCE = "vafl-instance"  # metadata: a random number of the client's process
TAKES_OVER = "vafl-takes-over"  # metadata: "yes" if it may take the place of another process of its party
PROTOCOL = 6
LARGEST_TERMS = 16_384
_LONGEST_REASON = 1000
_LONGEST_SETTING = 120
MANY_VIOLATIONS = 100


@dataclass(frozen=True)
class Agreement:
    """What a joining party proves it agrees on.

    Attributes:
        settings: dotted name -> value, as `settled` writes them; none where `model` says it all.
        model: which trained model is used; empty while one is trained.
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
        """Raises InvalidMessage for anything but terms."""
        if len(content) > LARGEST_TERMS:
            raise InvalidMessage(
                "VFL-6131", f"terms have at most {LARGEST_TERMS} bytes. Found {len(content):,}."
            )
        try:
            values = json.loads(content)
            terms = cls(**values)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidMessage(
                "VFL-6132",
                f"a stream begins with the run's terms, as protocol {PROTOCOL} has them. Found something "
                "else. Use the same version of vafl at every party.",
            ) from error
        for name, hint in get_type_hints(cls).items():
            kind = get_origin(hint) or hint
            if type(getattr(terms, name)) is not kind:
                raise InvalidMessage("VFL-6133", f"{name} in the terms must be {kind.__name__}.")
        if not all(type(value) is str for value in terms.settings.values()):
            raise InvalidMessage("VFL-6134", "settings in the terms must be text.")
        return terms

    def entries(self) -> dict[str, str]:
        """Every term and setting by its name, as it is shown."""
        own = {name: repr(value) for name, value in vars(self).items() if name != "settings"}
        return own | self.settings

    def difference(self, other: "Agreement") -> str:
        """The terms that differ, in words; empty if none do. `self` are the server's."""
        found = differing(self.entries(), other.entries())
        return printable("; ".join(f"{name} {a} at the server, {b} at the client" for name, a, b in found))


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(name, value, other value) of the terms that are not equal; digests, which tell nobody what to do about
    it, only where nothing else shows why they differ."""
    names = dict.fromkeys([*ours, *theirs])
    found = [(name, ours.get(name, "nothing"), theirs.get(name, "nothing")) for name in names]
    found = [entry for entry in found if entry[1] != entry[2]]
    return [entry for entry in found if not entry[0].endswith("_digest")] or found


def settled(sections: Mapping[str, Any]) -> dict[str, str]:
    """Settings by dotted name, as text: of a long one its beginning, and a digest of the whole."""
    flat: dict[str, str] = {}
    for section, values in sections.items():
        for name, value in values.items() if isinstance(values, dict) else [("", values)]:
            text = json.dumps(value, sort_keys=True)
            if len(text) > _LONGEST_SETTING:
                text = f"{text[:_LONGEST_SETTING]}... ({hashlib.sha256(text.encode()).hexdigest()[:16]})"
            flat[f"{section}.{name}".removesuffix(".")] = text
    return flat


def schedule_digest(schedules: list[BatchSchedule]) -> str:
    """Tells schedules apart by what they deal out: seed, kind, batch size and library versions all show."""
    digest = hashlib.sha256()
    for schedule in schedules:
        digest.update(schedule.batch(0).tobytes() + schedule.batch(1).tobytes())
    return digest.hexdigest()[:16]


def printable(words: str) -> str:
    """Somebody else's words, fit for a terminal and a log: one line, and no control characters."""
    return "".join(filter(str.isprintable, words[:_LONGEST_REASON]))


def channel_options(settings: NetworkSettings) -> list[tuple[str, Any]]:
    """gRPC's limits and keepalive, the same on both sides."""
    period, largest = int(settings.heartbeat * 1000), max(settings.largest_message, LARGEST_TERMS)
    return [
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_send_message_length", largest),
        ("grpc.keepalive_time_ms", period),
        # A ping goes out after one heartbeat of silence, and its answer has two more to arrive. gRPC has two
        # timers for that answer and ends the connection at the later one; the second defaults to 60 s.
        ("grpc.keepalive_timeout_ms", 2 * period),
        ("grpc.http2.ping_timeout_ms", 2 * period),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", period // 2),
        ("grpc.http2.max_ping_strikes", 0),  # each party chooses its own heartbeat
        ("grpc.max_concurrent_streams", 4),
        ("grpc.enable_retries", 0),
        # A channel dials once and shares nothing: `Reconnect` decides when to dial again, and a closed one
        # goes on dialling for as long as something holds its stream.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_reconnect_backoff_ms", 3 * period),
        ("grpc.initial_reconnect_backoff_ms", 3 * period),
        ("grpc.min_reconnect_backoff_ms", 3 * period),  # also how long a handshake over a slow way may take
        ("grpc.so_reuseport", 0),
    ]


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs a party's event loop, with uvloop where it is installed."""
    prepare_process()
    try:
        import uvloop  # noqa: PLC0415

        factory = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


def prepare_process() -> None:
    """Settings of the whole process: large messages without page faults, and no forking."""
    _keep_large_blocks()
    multiprocessing.set_start_method("spawn", force=True)
    os.register_at_fork(after_in_child=_refuse_fork)


def _keep_large_blocks() -> None:
    """Tells glibc to keep freed memory: mapping it anew for each large message costs more than sending."""
    if not sys.platform.startswith("linux"):
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return  # another C library: nothing to tune
    for option, value in ((mmap_threshold, 32 << 20), (trim_threshold, 512 << 20), (top_pad, 64 << 20)):
        mallopt(option, value)


def _refuse_fork() -> None:
    """A forked child shares the stream's sockets and threads, and would die or corrupt them at random."""
    message = "vafl: a process with a live stream must not be forked; use subprocess or the spawn method\n"
    os.write(2, message.encode())
    os._exit(70)
