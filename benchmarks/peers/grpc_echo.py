"""The reference: a bare grpc.aio echo over mTLS on loopback, between a server process and client processes.

Each client keeps `window` messages of `up` bytes in flight on one bidirectional stream and gets `down` bytes
for each. There is no serialiser and no computation, so no runtime on the same transport can be faster. This
module imports nothing of vafl.
"""

import argparse
import asyncio
import contextlib
import ctypes
import json
import platform
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc

from benchmarks.peers.certificates import write_certificates
from benchmarks.peers.processes import hear, started, tell

METHOD = "Exchange"
SERVICE = "benchmark.Echo"
WARM_UP_SECONDS = 0.5
PATIENCE_SECONDS = (
    60  # for start and end; a process that lives longer than this and its measurements is killed
)
OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
MODULE = "benchmarks.peers.grpc_echo"


def measure_echo(
    up_bytes: int, down_bytes: int, clients: int = 4, window: int = 1, seconds: float = 5.0
) -> float:
    """Return the round trips per second of all clients together."""
    return sum(echo_rates(up_bytes, down_bytes, clients, window, seconds))


def echo_rates(up_bytes: int, down_bytes: int, clients: int, window: int, seconds: float) -> list[float]:
    """Return the round trips per second of each client, all measured at the same time."""
    with echo(up_bytes, down_bytes, clients, window, int(seconds)) as rates:
        return rates(seconds)


@contextlib.contextmanager
def echo(
    up_bytes: int, down_bytes: int, clients: int, window: int, limit: int
) -> Iterator[Callable[[float], list[float]]]:
    """Start an echo and warm it up; yield a function that measures its clients' rates.

    Args:
        limit: seconds that all measurements may take together.
    """
    lifetime = str(limit + PATIENCE_SECONDS)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as processes:
        write_certificates(Path(folder), ("server", "client"))
        server = processes.enter_context(started(MODULE, "serve", folder, lifetime, str(down_bytes)))
        arguments = (folder, lifetime, hear(server).strip(), str(up_bytes), str(window))
        senders = [processes.enter_context(started(MODULE, "send", *arguments)) for _ in range(clients)]
        for sender in senders:
            hear(sender)  # connected and warm

        def rates(seconds: float) -> list[float]:
            for sender in senders:
                tell(sender, str(seconds))  # all start together
            return [float(hear(sender)) for sender in senders]

        yield rates


async def _serve(folder: Path, down_bytes: int) -> None:
    reply = bytes(down_bytes)

    async def exchange(_: AsyncIterator[bytes], context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            await context.write(reply)

    handler = grpc.stream_stream_rpc_method_handler(exchange)
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    credentials = grpc.ssl_server_credentials(
        [((folder / "server.key").read_bytes(), (folder / "server.pem").read_bytes())],
        (folder / "ca.pem").read_bytes(),
        require_client_auth=True,
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def _send(folder: Path, port: int, up_bytes: int, window: int) -> None:
    credentials = grpc.ssl_channel_credentials(
        (folder / "ca.pem").read_bytes(),
        (folder / "client.key").read_bytes(),
        (folder / "client.pem").read_bytes(),
    )
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=OPTIONS) as channel:
        stream = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
        message = bytes(up_bytes)
        for _ in range(window):
            await stream.write(message)
        await _rate(stream, message, WARM_UP_SECONDS)
        print("ready", flush=True)
        while seconds := await asyncio.to_thread(sys.stdin.readline):
            print(await _rate(stream, message, float(seconds)), flush=True)


async def _rate(stream: Any, message: bytes, seconds: float) -> float:
    """Exchange messages for this many seconds; return the round trips per second."""
    read, write, clock = stream.read, stream.write, time.perf_counter
    begin = now = clock()
    count = 0
    while now < begin + seconds:
        if await read() is grpc.aio.EOF:
            raise ConnectionError("the echo server closed the stream")
        await write(message)
        count += 1
        now = clock()
    return count / (now - begin)


def _settle(limit: int) -> None:
    """Make this process end at its limit, and keep freed memory, as vafl does."""
    signal.alarm(limit)
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        for setting, value in ((-3, 32 << 20), (-1, 512 << 20), (-2, 64 << 20)):  # mmap, trim, top pad
            library.mallopt(setting, value)


def _runner() -> Callable[[Coroutine[Any, Any, None]], None]:
    try:
        import uvloop  # noqa: PLC0415 (optional: the plain loop is slower, not wrong)
    except ImportError:
        return asyncio.run
    return uvloop.run


def _end(arguments: list[str]) -> None:
    """Run one end of the echo: `serve FOLDER LIMIT DOWN` or `send FOLDER LIMIT PORT UP WINDOW`."""
    side, folder, limit, *rest = arguments
    _settle(int(limit))
    if side == "serve":
        _runner()(_serve(Path(folder), int(rest[0])))
    else:
        port, up_bytes, window = rest
        _runner()(_send(Path(folder), int(port), int(up_bytes), int(window)))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Round trips per second of a bare gRPC echo over mTLS.")
    parser.add_argument("--up", type=int, default=64 * 64 * 4, metavar="BYTES")
    parser.add_argument("--down", type=int, default=64 * 64 * 4, metavar="BYTES")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--window", type=int, default=1, help="messages in flight per client")
    parser.add_argument("--seconds", type=float, default=5.0)
    chosen = parser.parse_args(arguments)
    rates = echo_rates(chosen.up, chosen.down, chosen.clients, chosen.window, chosen.seconds)
    print(json.dumps({"round_trips_per_second": sum(rates), "per_client": rates}))


if __name__ == "__main__":
    if sys.argv[1:2] in (["serve"], ["send"]):
        _end(sys.argv[1:])
    else:
        main(sys.argv[1:])
