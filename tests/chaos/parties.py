"""A federation of real processes over mutual TLS, started as a user would, for the scenarios."""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from vafl.transport.identity import SERVER, issue, make_authority

ROOT = Path(__file__).parents[2]


class Failed(Exception):
    """A scenario failed; the text says how."""


@dataclass(frozen=True)
class Place:
    """Where parties run: a prefix of their commands, and the address that the server listens on."""

    address: str
    prefixes: dict[str, list[str]]

    @classmethod
    def here(cls) -> "Place":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return cls(f"127.0.0.1:{free.getsockname()[1]}", {})


class Parties:
    """A folder with configuration and certificates, and the processes of its parties.

    Use as a context manager: no process outlives it.

    Args:
        document: the configuration, without the network's address and certificates.
        limit: seconds for any wait; a longer one counts as a hang.
        states: whether the server's trace records every change of its state.
    """

    def __init__(self, folder: Path, document: dict, place: Place, limit: float, *, states: bool = False):
        self.folder, self.limit, self.place = folder.resolve(), limit, place
        self.clients = [f"client-{number}" for number in range(1, document["partition"]["clients"] + 1)]
        self.trace = self.folder / "trace.jsonl"
        self.processes: dict[str, subprocess.Popen] = {}
        self._read, self._rest, self._updates = 0, b"", 0
        folder.mkdir(parents=True)
        make_authority(folder / "certs")
        for party in (SERVER, *self.clients):
            issue(folder / "certs", party)
        network = {**document.get("network", {}), "address": place.address, "certificates": "certs"}
        (folder / "run.toml").write_text(tomli_w.dumps({**document, "network": network}))
        traced = {"VAFL_TRACE": str(self.trace), **({"VAFL_TRACE_STATE": "1"} if states else {})}
        self._environment = {**os.environ, **traced, "OMP_NUM_THREADS": "1", "no_proxy": "*"}

    def __enter__(self) -> "Parties":
        return self

    def __exit__(self, *raised: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def start(self, party: str, *, resume: bool = False) -> None:
        with self._log(party).open("ab") as log:
            self.processes[party] = subprocess.Popen(
                [*self.command(party, self.folder / party), *["--resume"] * resume],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=self._environment,
            )

    def command(self, party: str, out: Path) -> list[str]:
        """Return the command that starts a party with the run folder `out`."""
        if party == SERVER:
            command = ["tests.chaos.traced", "server", str(self.folder / "run.toml")]
        else:
            command = ["vafl.cli", "client", str(self.folder / "run.toml"), "--party", party]
        prefix = self.place.prefixes.get(party, [])
        return [*prefix, sys.executable, "-m", *command, "--out", str(out)]

    def start_all(self) -> None:
        for party in (SERVER, *self.clients):
            self.start(party)

    def kill(self, party: str) -> None:
        """Kill a party with SIGKILL, without telling any other party."""
        self.processes[party].kill()
        self.processes[party].wait()

    def check_alive(self) -> None:
        """Raise Failed if a process has ended with an error by itself."""
        for party, process in self.processes.items():
            if process.poll():
                raise Failed(f"{party} ended with exit code {process.returncode}: {self.log(party)[-1500:]}")

    def until(self, condition, what: str) -> None:
        """Wait for a condition; raise Failed if a process fails meanwhile."""
        deadline = time.monotonic() + self.limit
        while not condition():
            self.check_alive()
            if time.monotonic() > deadline:
                raise Failed(f"hang: waited {self.limit:.0f} s for {what}; {self.state()}")
            time.sleep(0.05)

    def rest(self, seconds: float) -> None:
        """Wait for some time; raise Failed if a process fails meanwhile."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end, "time to pass")

    def until_over(self) -> None:
        """Wait until every party has ended by itself."""
        self.until(
            lambda: all(process.poll() == 0 for process in self.processes.values()), "the run's own end"
        )

    def over(self) -> bool:
        return self.processes[SERVER].poll() == 0

    def log(self, party: str) -> str:
        return self._log(party).read_text(errors="replace")

    def _log(self, party: str) -> Path:
        return self.folder / f"{party}.log"

    def updates(self) -> int:
        """Return the server's iteration, according to its trace."""
        if self.trace.exists():
            with self.trace.open("rb") as file:
                file.seek(self._read)
                content = self._rest + file.read()
                self._read = file.tell()
            *lines, self._rest = content.split(b"\n")
            for line in map(json.loads, lines):
                if line["what"] in ("life", "step"):
                    self._updates = line["iteration"] + (line["what"] == "step")
        return self._updates

    def state(self) -> str:
        """Return which parties are alive, how far the run is, and the end of the server's log."""
        running = [party for party, process in self.processes.items() if process.poll() is None]
        return (
            f"running: {', '.join(running)}; {self.updates()} updates; the server's log ends: "
            f"{self.log(SERVER)[-800:]}"
        )

    def metric(self) -> float:
        summary = json.loads((self.folder / SERVER / "summary.json").read_text())
        return float(summary["metric"]["value"])
