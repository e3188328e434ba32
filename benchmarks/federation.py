"""A federation of real processes over mutual TLS, for benchmarks. It works only while it is measured.

`python -m benchmarks.federation server|client ...` is one party. Its data is random: only its shape matters.
Between two measurements the server's worker is blocked, and the clients wait for their answers.
"""

import asyncio
import contextlib
import json
import math
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.peers.processes import hear, started, tell
from vafl.config import from_document
from vafl.data.partition import Party, VerticalData
from vafl.data.split import Parts
from vafl.protocol.messages import ServerMessage
from vafl.protocol.server import Server
from vafl.run.agreement import make_terms, over_network
from vafl.run.assembly import limited_threads, make_client, make_server
from vafl.run.plan import Plan, make_plan
from vafl.transport.grpc import worker
from vafl.transport.grpc.client import FederationClient
from vafl.transport.grpc.server import FederationServer
from vafl.transport.grpc.wire import run
from vafl.transport.identity import SERVER, Credentials, issue, make_authority

MODULE = "benchmarks.federation"
ROWS, CLASSES = 12_000, 10
WARM_UP_SECONDS = 1.0
_WATCH_SECONDS = 0.005  # between two looks at the event loop
PATIENCE_SECONDS = 120  # for start-up; a process that lives longer than this and its measurements is killed


@dataclass(frozen=True)
class Workload:
    """The data and the configuration of the federation.

    Attributes:
        features: columns of each client.
        document: the run's configuration, as a TOML file would give it.
        place: where the workers of all parties run the protocol: on the event loop, in their thread, or where
            they choose.
    """

    clients: int
    features: int
    document: dict[str, Any]
    place: Literal["adaptive", "thread", "loop"] = "adaptive"

    def plan(self, address: str = "127.0.0.1:0") -> Plan:
        """Return the plan of the run, which every party makes separately."""
        config = over_network(from_document({**self.document, "stop": {"updates": 10**9}}))
        generator = torch.Generator().manual_seed(0)
        parties = [
            Party(f"client-{number}", features)
            for number in range(1, self.clients + 1)
            for features in [torch.rand(ROWS + 1, self.features, generator=generator)]
        ]
        labels = torch.randint(CLASSES, (ROWS + 1,), generator=generator)
        data = VerticalData(tuple(parties), labels, Parts(ROWS, test=1), tuple(map(str, range(CLASSES))))
        return make_plan(replace(config, network=replace(config.network, address=address)), data)


@dataclass(frozen=True)
class Measured:
    """What a federation did during one measurement.

    Attributes:
        blocked: the longest time, in seconds, in which the server's event loop did nothing else.
    """

    seconds: float
    updates: int
    bytes_up: int
    bytes_down: int
    blocked: float

    @property
    def rate(self) -> float:
        """Updates per second."""
        return self.updates / self.seconds


@contextlib.contextmanager
def federation(workload: Workload, limit: int) -> Iterator[Callable[[float], Measured]]:
    """Start a federation and warm it up; yield a function that measures it for a number of seconds.

    Args:
        limit: seconds that all measurements may take together.
    """
    shape = json.dumps(asdict(workload))
    lifetime = str(limit + PATIENCE_SECONDS)
    names = [f"client-{number}" for number in range(1, workload.clients + 1)]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as processes:
        make_authority(Path(folder))
        for name in (SERVER, *names):
            issue(Path(folder), name)
        server = processes.enter_context(started(MODULE, "server", folder, lifetime, shape))
        address = hear(server).strip()
        for name in names:
            processes.enter_context(started(MODULE, name, folder, lifetime, shape, address))

        def measure(seconds: float) -> Measured:
            tell(server, str(seconds))
            return Measured(**json.loads(hear(server)))

        measure(WARM_UP_SECONDS)
        yield measure


class Gate:
    """Blocks the server's worker except during a measurement."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._turns, self._blocked = 0, 0.0

    async def watch(self) -> None:
        """Note by how much the event loop returns too late to this coroutine."""
        while True:
            due = time.perf_counter() + _WATCH_SECONDS
            await asyncio.sleep(_WATCH_SECONDS)
            self._blocked = max(self._blocked, time.perf_counter() - due)
            self._turns += 1

    def __call__(self, server: FederationServer[Server]) -> list[ServerMessage]:
        self._open.wait()
        return []

    def measure(self, server: FederationServer[Server], seconds: float) -> Measured:
        """Let the worker run for this many seconds."""
        updates = server.updates
        self._open.set()
        turns = self._turns
        # The first time, clients are still connecting. This gate may have blocked the event loop until now.
        while server.updates == updates or self._turns < turns + 2:
            time.sleep(0.001)
        begin, before, self._blocked = time.perf_counter(), _counters(server), 0.0
        time.sleep(seconds)
        taken, after, blocked = time.perf_counter() - begin, _counters(server), self._blocked
        self._open.clear()
        updates, up, down = (late - early for late, early in zip(after, before, strict=True))
        return Measured(taken, updates, up, down, blocked)


def _counters(server: FederationServer[Server]) -> tuple[int, int, int]:
    traffic = server.traffic
    return server.updates, sum(own.bytes_up for own in traffic), sum(own.bytes_down for own in traffic)


def _serve(plan: Plan, credentials: Credentials) -> None:
    gate = Gate()
    names = [party.name for party in plan.data.parties]

    async def main() -> None:
        server = FederationServer(
            make_server(plan), names, make_terms(plan), plan.config.network, credentials, gate
        )
        threading.Thread(target=_answer, args=(server, gate), daemon=True).start()
        watching = asyncio.create_task(gate.watch())
        await server.serve(lambda address: print(address, flush=True))
        watching.cancel()

    run(main())


def _answer(server: FederationServer[Server], gate: Gate) -> None:
    """Measure for the number of seconds on each line of standard input."""
    for line in sys.stdin:
        print(json.dumps(asdict(gate.measure(server, float(line)))), flush=True)


def _work(plan: Plan, name: str, credentials: Credentials) -> None:
    index = [party.name for party in plan.data.parties].index(name)
    end = FederationClient(make_client(plan, index), name, make_terms(plan), plan.config.network, credentials)
    run(_until_the_end(end))


async def _until_the_end(end: FederationClient) -> None:
    await end.run()


def main(party: str, folder: str, limit: str, workload: str, *address: str) -> None:
    """Run one party."""
    signal.alarm(int(limit))
    credentials = Credentials.load(Path(folder) / party, party)
    described = Workload(**json.loads(workload))
    if described.place == "thread":
        worker.BRIEF = 0.0  # nothing is brief
    elif described.place == "loop":
        worker.BRIEF = worker.BEARABLE = math.inf
    plan = described.plan(*address)
    with limited_threads(plan.config.threads):
        if party == SERVER:
            _serve(plan, credentials)
        else:
            _work(plan, party, credentials)


if __name__ == "__main__":
    main(*sys.argv[1:])
