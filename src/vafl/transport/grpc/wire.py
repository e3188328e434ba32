"""Names and gRPC options that both ends of a stream share, and the set-up of a party's process."""

import asyncio
import ctypes
import multiprocessing
import os
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from vafl.transport.settings import NetworkSettings

SERVICE = "vafl.Federation"
METHOD = "Stream"
PATH = f"/{SERVICE}/{METHOD}"
CLAIM = "vafl-party"  # metadata: the party that the client claims to be
INSTANCE = "vafl-instance"  # metadata: the random id of the client's process
TAKES_OVER = "vafl-takes-over"  # metadata: "yes" if it may take the place of another process of its party
# The version of the messages. It is one of the terms, so the server refuses a client of another version and
# says why. Raise it with every change of a message or of its layout, or the two would misread each other.
PROTOCOL = 7
LARGEST_TERMS = 16_384  # bytes
MANY_VIOLATIONS = 100  # refused messages after which the server closes a stream
_LONGEST_REASON = 1000  # characters of a peer's text that are shown
Result = TypeVar("Result")


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


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a party's event loop, with uvloop if it is installed, and return the result of `main`."""
    prepare_process()
    try:
        import uvloop  # noqa: PLC0415

        factory = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


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
