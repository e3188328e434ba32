"""Measure `vafl align` as two processes over mutual TLS on loopback, and compare it with NVFlare's DH-PSI.

All processes share this machine's cores, so the figures contain the arithmetic of both parties.
"""

import functools
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.harness import Figure, benchmark
from benchmarks.peers.nvflare_psi.measure import measure_psi
from benchmarks.peers.processes import Process, hear, started
from vafl.transport.identity import SERVER, issue, make_authority

MILLION, PEER_IDS = 1_000_000, 50_000
CLIENT = "bank"
CONFIG = f"""
[data]
name = "parties"
parties = ["{CLIENT}"]
[parties.{SERVER}.source]
path = "{SERVER}.parquet"
id = "id"
label = "label"
[parties.{CLIENT}.source]
path = "{CLIENT}.parquet"
id = "id"
[network]
address = "127.0.0.1:0"
certificates = "certs"
"""


@dataclass(frozen=True)
class Alignment:
    """The time and memory of an alignment of two parties with equally many ids.

    Attributes:
        seconds: from the first process's start to the last one's end.
        exchange_seconds: from when both parties are connected to when both files are written.
        cpu_seconds: of all processes together. Two idle cores take half as long.
        memory: the peak of each party and its workers, in bytes.
    """

    seconds: float
    exchange_seconds: float
    cpu_seconds: float
    memory: dict[str, int]


@benchmark(target=200.0, unit="s")
def psi_million_seconds() -> Figure:
    """Time of 1,000,000 ids at each of two parties, half of them common, from the start to both files."""
    measured = _million()
    detail = {"exchange_seconds": measured.exchange_seconds, "cpu_seconds": measured.cpu_seconds}
    return Figure([measured.seconds], detail)


@benchmark(target=1000.0, unit="MB")
def psi_million_memory() -> Figure:
    """Peak memory of the same alignment: a party's process and its workers, as the kernel counts them."""
    memory = {party: round(held / 1e6) for party, held in _million().memory.items()}
    return Figure([max(memory.values())], {"megabytes": memory})


@benchmark(target=10.0, better="higher")
def psi_ratio_nvflare() -> Figure:
    """Time of NVFlare's DH-PSI over that of vafl align, with 50,000 ids at each of two parties.

    Both times are from when all parties are connected to when all results are written. vafl is measured
    before and after NVFlare, because a machine's speed drifts.
    """
    before = [align(PEER_IDS) for _ in range(2)]
    theirs = measure_psi(PEER_IDS)
    ours = before + [align(PEER_IDS) for _ in range(2)]
    detail = {
        "ids": PEER_IDS,
        "counted": "not the start of the parties (processes, imports, connections); vafl's server computes "
        "its own points from when it listens, NVFlare's sites theirs when they are asked to",
        "vafl_seconds": [each.exchange_seconds for each in ours],
        "vafl_from_start_seconds": [each.seconds for each in ours],
        "vafl_cpu_seconds": [each.cpu_seconds for each in ours],
        "nvflare_seconds": theirs.seconds,
        "nvflare_from_start_seconds": theirs.from_start_seconds,
        "nvflare": theirs.detail,
    }
    return Figure([theirs.seconds / each.exchange_seconds for each in ours], detail)


@functools.cache
def _million() -> Alignment:
    """Measure once, for both figures."""
    return align(MILLION)


def align(ids: int) -> Alignment:
    """Align two parties with this many ids each, and check that half of them are common."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _prepare(folder, ids)
        start, before, peaks = time.perf_counter(), _children(), dict[str, int]()
        with _party(folder, SERVER) as server:
            address = hear(server).split()[-1]
            with (
                _party(folder, CLIENT, "--set", f"network.address={address}") as client,
                _watched({SERVER: server.pid, CLIENT: client.pid}, peaks),
            ):
                hear(server)  # both are connected
                begin = time.perf_counter()
                _drain(server)
                _drain(client)
                exchanged = time.perf_counter() - begin
        seconds = time.perf_counter() - start
        for party in (SERVER, CLIENT):
            found = pl.read_parquet(folder / f"{party}.alignment.parquet").height
            if found != ids // 2:
                raise RuntimeError(f"{ids // 2} ids are common. {party} found {found}.")
    return Alignment(seconds, exchanged, _children() - before, peaks)


def _children() -> float:
    """Return the CPU seconds of the child processes that have ended."""
    spent = os.times()
    return spent.children_user + spent.children_system


def _prepare(folder: Path, ids: int) -> None:
    make_authority(folder / "certs")
    for party in (SERVER, CLIENT):
        issue(folder / "certs", party)
    (folder / "config.toml").write_text(CONFIG)
    generator = np.random.default_rng(0)
    for party, first in ((SERVER, 0), (CLIENT, ids // 2)):
        numbers = generator.permutation(np.arange(first, first + ids))
        table = pl.DataFrame({"id": pl.Series(numbers).cast(pl.String), "label": numbers % 2})
        table.write_parquet(folder / f"{party}.parquet")


def _party(folder: Path, name: str, *options: str) -> AbstractContextManager[Process]:
    return started("vafl.cli", "align", str(folder / "config.toml"), "--party", name, *options)


def _drain(process: Process) -> None:
    """Wait for the process, and raise if it failed."""
    assert process.stdout is not None
    process.stdout.read()
    if process.wait():
        raise RuntimeError(f"vafl align ended with exit status {process.returncode}; see its words above")


@contextmanager
def _watched(parties: dict[str, int], peaks: dict[str, int]) -> Iterator[None]:
    """Record each party's peak memory: the sum of the peaks of its process and its children."""
    over = threading.Event()

    def watch() -> None:
        held: dict[tuple[str, int], int] = {}
        while not over.wait(0.2):
            for party, process in parties.items():
                held |= {
                    (party, each): _peak(each) or held.get((party, each), 0) for each in _family(process)
                }
                peaks[party] = sum(value for (owner, _), value in held.items() if owner == party)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _family(process: int) -> list[int]:
    return [process, *map(int, _proc(process, f"task/{process}/children").split())]


def _peak(process: int) -> int:
    lines = [line for line in _proc(process, "status").splitlines() if line.startswith("VmHWM:")]
    return int(lines[0].split()[1]) * 1024 if lines else 0


def _proc(process: int, name: str) -> str:
    try:
        return Path("/proc", str(process), name).read_text(encoding="ascii")
    except OSError:
        return ""  # it has ended
