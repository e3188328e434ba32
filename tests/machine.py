"""A server and its clients as real processes over mutual TLS, for tests that kill or freeze them."""

import json
import socket
import subprocess
import sys

from tests.waiting import LIMIT, until
from vafl.transport.identity import issue, make_authority

PARTIES = ("client-1", "client-2")

CONFIG = """
seed = 0
[schedule]
batch_size = 16
refresh = "none"
[stop]
updates = 1000000
[evaluation]
every = 25
[network]
address = "127.0.0.1:{port}"
certificates = "certs"
checkpoint_every = 20
heartbeat = 2.0
join_timeout = 100.0
real_delays = true
[delays]
kind = "fixed"
seconds = {seconds}
"""


class Machine:
    """A folder, certificates, and the processes a test starts; none outlives the test."""

    def __init__(self, folder, config, parties=PARTIES):
        self.folder, self.processes = folder, {}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        make_authority(folder / "certs")
        for party in ("server", *parties):
            issue(folder / "certs", party)
        seconds = [0.02] * len(parties)
        (folder / "run.toml").write_text(config.format(port=port, seconds=seconds))

    def start(self, party, *options):
        role = ["server"] if party == "server" else ["client", "--party", party]
        command = [
            sys.executable,
            "-m",
            "vafl.cli",
            role[0],
            str(self.folder / "run.toml"),
            *role[1:],
            *options,
        ]
        with (self.folder / f"{party}.log").open("ab") as log:
            self.processes[party] = subprocess.Popen(
                [*command, "--out", str(self.folder / ("run" if party == "server" else party))],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def kill(self, party):
        self.processes[party].kill()
        self.processes[party].wait()

    def wait(self, party):
        return self.processes[party].wait(LIMIT)

    def log(self, party):
        return (self.folder / f"{party}.log").read_text()

    def history(self):
        path = self.folder / "run" / "history.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, condition, what):
        return until(condition, what, self._check)

    def _check(self):
        dead = [party for party, process in self.processes.items() if process.poll() not in (None, 0, -9)]
        assert not dead, f"{dead} died: {[self.log(party)[-2000:] for party in dead]}"
        return self.log("server")[-2000:]

    def updates(self):
        return self.history()[-1]["updates"] if self.history() else 0

    def progress(self, updates):
        """Wait until this many more updates are recorded."""
        enough = self.updates() + updates
        self.until(lambda: self.updates() >= enough, f"{updates} updates more")

    def summary(self):
        return json.loads((self.folder / "run" / "summary.json").read_text())

    def end(self):
        for process in self.processes.values():
            process.kill()
            process.wait()
