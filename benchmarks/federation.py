"""A federation of real processes over mutual TLS, for the benchmarks: works while asked for its rate.

`python -m benchmarks.federation server|client ...` is one party. Its data is random: only its shape matters.
Between two measurements the server's worker stands still, and the clients wait for their answers.
"""

import contextlib
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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
from vafl.transport.grpc.client import FederationClient
from vafl.transport.grpc.server import FederationServer
from vafl.transport.grpc.wire import run
from vafl.transport.identity import SERVER, Credentials, issue, make_authority

MODULE = "benchmarks.federation"
ROWS, CLASSES = 12_000, 10
WARM_UP_SECONDS = 1.0
PATIENCE_SECONDS = 120  # for start-up; a process older than this plus its measurement is killed


@dataclass(frozen=True)
class Workload:
    """What the federation trains.

    Attributes:
        features: columns of each client.
        document: the run's configuration, as a TOML file would give it.
    """

    clients: int
    features: int
    document: dict[str, Any]

    def plan(self, address: str = "127.0.0.1:0") -> Plan:
        """The run as every party works it out for itself."""
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
    """What a federation did while it was asked for its rate."""

    seconds: float
    updates: int
    bytes_up: int
    bytes_down: int

    @property
    def rate(self) -> float:
        """Updates per second."""
        return self.updates / self.seconds


@contextlib.contextmanager
def federation(workload: Workload, limit: int) -> Iterator[Callable[[float], Measured]]:
    """A federation that is up and warm, and idle except while it is asked for its rate.

    Args:
        limit: seconds it may take, beside its start.
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
    """Lets the server's worker thread through while a measurement is under way."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def __call__(self, server: FederationServer[Server]) -> list[ServerMessage]:
        self._open.wait()
        return []

    def measure(self, server: FederationServer[Server], seconds: float) -> Measured:
        """Opens it for so long."""
        begin, before = time.perf_counter(), _counters(server)
        self._open.set()
        while server.updates == before[0]:  # the first time, the clients have yet to come
            time.sleep(0.001)
            begin = time.perf_counter()
        time.sleep(seconds)
        taken, after = time.perf_counter() - begin, _counters(server)
        self._open.clear()
        return Measured(taken, *(late - early for late, early in zip(after, before, strict=True)))


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
        await server.serve(lambda address: print(address, flush=True))

    run(main())


def _answer(server: FederationServer[Server], gate: Gate) -> None:
    """Each line asks for a measurement of so many seconds."""
    for line in sys.stdin:
        print(json.dumps(asdict(gate.measure(server, float(line)))), flush=True)


def _work(plan: Plan, name: str, credentials: Credentials) -> None:
    index = [party.name for party in plan.data.parties].index(name)
    end = FederationClient(make_client(plan, index), name, make_terms(plan), plan.config.network, credentials)
    run(_until_the_end(end))


async def _until_the_end(end: FederationClient) -> None:
    await end.run()


def main(party: str, folder: str, limit: str, workload: str, *address: str) -> None:
    """Be one party."""
    signal.alarm(int(limit))
    credentials = Credentials.load(Path(folder) / party, party)
    plan = Workload(**json.loads(workload)).plan(*address)
    with limited_threads(plan.config.threads):
        if party == SERVER:
            _serve(plan, credentials)
        else:
            _work(plan, party, credentials)


if __name__ == "__main__":
    main(*sys.argv[1:])
