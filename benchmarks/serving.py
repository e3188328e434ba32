"""Measure a served model under load: 100 callers over loopback, with clients that embed for every answer."""

import asyncio
import contextlib
import io
import json
import random
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.harness import Figure, benchmark
from benchmarks.peers.processes import hear, started
from vafl.config import from_document
from vafl.run.launch import launch
from vafl.transport.identity import SERVER, issue, make_authority

CALLERS = 100
SLICES, SLICE_SECONDS = 6, 10.0
CACHED_SECONDS = 5.0
WARM_UP_SECONDS = 2.0
IDS = 1797  # digits
CLIENTS = ("client-1", "client-2")


@benchmark(target=0.1, unit="s")
def serve_p99() -> Figure:
    """99th percentile of a request's time: 100 callers for 60 s, one id per request, two clients.

    An error or an incomplete answer fails the benchmark. The detail has the same with a cache, where the
    server does not ask the clients.
    """
    with served(cache=False) as port:
        asyncio.run(load(port, WARM_UP_SECONDS))
        slices = [asyncio.run(load(port, SLICE_SECONDS)) for _ in range(SLICES)]
    with served(cache=True) as port:
        asyncio.run(load(port, WARM_UP_SECONDS))
        kept = asyncio.run(load(port, CACHED_SECONDS))
    everything = [seconds for times in slices for seconds in times]
    detail = {
        **percentiles(everything, SLICES * SLICE_SECONDS),
        "cached": percentiles(kept, CACHED_SECONDS),
        "callers": CALLERS,
    }
    return Figure([float(np.quantile(times, 0.99)) for times in slices], detail)


def percentiles(times: list[float], seconds: float) -> dict[str, Any]:
    p50, p95, p99 = np.quantile(times, [0.5, 0.95, 0.99]).tolist()
    return {"p50": p50, "p95": p95, "p99": p99, "requests_per_second": len(times) / seconds, "errors": 0}


@contextlib.contextmanager
def served(*, cache: bool) -> Iterator[int]:
    """Train a model briefly and serve it with two clients as processes; yield the HTTP port."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as processes:
        folder = Path(name)
        make_authority(folder)
        for party in (SERVER, *CLIENTS):
            issue(folder, party)
        network = {"address": f"127.0.0.1:{_free_port()}", "certificates": str(folder)}
        models = {"embedding": {"model": "mlp"}, "model": {"head": "mlp"}}
        document = {**models, "stop": {"updates": 100}, "network": network}
        config = from_document({**document, "prediction": {"cache": cache}})
        launch(config, folder / "run", Console(file=io.StringIO()))
        command = ("vafl.cli", "serve", str(folder / "run" / "config.toml"), "--model", str(folder / "run"))
        server = processes.enter_context(started(*command, "--http", "127.0.0.1:0"))
        found = re.search(r"http://127\.0\.0\.1:(\d+)", hear(server))
        if found is None:
            raise RuntimeError("the server did not say where it listens")
        for party in CLIENTS:
            processes.enter_context(started(*command, "--party", party))
        port = int(found[1])
        asyncio.run(_ready(port))
        yield port


async def load(port: int, seconds: float) -> list[float]:
    """Return the seconds of all requests. Each caller sends its next request when it has its answer."""
    end = time.perf_counter() + seconds
    times = await asyncio.gather(*(_call(port, end, random.Random(caller)) for caller in range(CALLERS)))
    return [each for own in times for each in own]


async def _call(port: int, end: float, chance: random.Random) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    times = []
    while (began := time.perf_counter()) < end:
        status, answer = await _post(reader, writer, {"ids": [chance.randrange(IDS)]})
        times.append(time.perf_counter() - began)
        if status != 200 or not answer["complete"]:
            raise RuntimeError(f"a request failed with status {status}: {answer}")
    writer.close()
    return times


async def _post(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, document: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    body = json.dumps(document).encode()
    headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    head = f"POST /predict HTTP/1.1\r\n{headers}\r\n\r\n"
    writer.write(head.encode() + body)
    answered = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = re.search(r"content-length: (\d+)", answered)
    if length is None:
        raise RuntimeError(f"an answer without a length: {answered}")
    return int(answered.split()[1]), json.loads(await reader.readexactly(int(length[1])))


async def _ready(port: int) -> None:
    """Wait until the server has its clients."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        status, answer = await _post(reader, writer, {"ids": [0]})
        writer.close()
        if status == 200 and answer["complete"]:
            return
        await asyncio.sleep(0.1)
    raise RuntimeError("the clients did not come")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
