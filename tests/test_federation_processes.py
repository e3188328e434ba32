"""Server and clients as real processes over mutual TLS: killed, resumed, refused, interrupted."""

import json
import signal
import socket
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from tests.waiting import LIMIT, until
from vafl.runtime.identity import issue, make_authority

PARTIES = ("client-1", "client-2")

CONFIG = """
seed = 0
[data]
name = "iris"
[schedule]
batch_size = 16
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
seconds = [0.02, 0.02]
[labels]
epsilon = 5.0
"""


class Machine:
    """A folder, certificates, and the processes a test starts; none outlives the test."""

    def __init__(self, folder, config=CONFIG, parties=PARTIES):
        self.folder, self.processes = folder, {}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        make_authority(folder / "certs")
        for party in ("server", *parties):
            issue(folder / "certs", party)
        (folder / "run.toml").write_text(config.format(port=port))

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
        until(condition, what, self._check)

    def _check(self):
        dead = [party for party, process in self.processes.items() if process.poll() not in (None, 0, -9)]
        assert not dead, f"{dead} died: {[self.log(party)[-2000:] for party in dead]}"
        return self.log("server")[-2000:]

    def drawn_labels(self):
        return (self.folder / "run" / "state" / "server" / "labels.safetensors").read_bytes()

    def updates(self):
        return self.history()[-1]["updates"] if self.history() else 0


@pytest.fixture
def machine(tmp_path):
    made = Machine(tmp_path)
    yield made
    for process in made.processes.values():
        process.kill()
        process.wait()


def test_kill_and_resume_on_both_sides_and_an_orderly_end(machine):
    for party in ("server", *PARTIES):
        machine.start(party)
    machine.until(lambda: machine.updates() >= 50, "50 updates")
    machine.kill("client-1")
    machine.until(lambda: "client-1 is gone" in machine.log("server"), "the client's death noticed")
    machine.start("client-1", "--resume")
    machine.until(lambda: machine.log("server").count("client-1 is here") == 2, "the client back")
    machine.kill("server")
    before, drawn = machine.updates(), machine.drawn_labels()
    machine.start("server", "--resume")
    machine.until(lambda: machine.updates() >= before + 50, "progress after the server's death")
    machine.processes["server"].send_signal(signal.SIGTERM)
    assert machine.wait("server") == 130
    for party in PARTIES:
        assert machine.wait(party) == 0, machine.log(party)[-2000:]
        assert "told to stop" in machine.log(party)
        assert load_file(machine.folder / party / "models" / party / "model.safetensors")
    summary = json.loads((machine.folder / "run" / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert summary["metric"]["value"] > 0.7
    assert summary["violations"] == {}
    assert summary["labels"]["epsilon"] == 5.0
    assert machine.drawn_labels() == drawn  # drawing again would spend epsilon again
    for what in ("seconds", "updates", "bytes_up", "bytes_down"):
        values = [point[what] for point in machine.history()]
        assert values == sorted(values), what
    used = sum(delays["uses"] + delays["never"] for delays in summary["delays"].values())
    assert used == 16 * summary["updates"]  # of every life: each step uses the other client's 16 cells


def test_a_forked_process_with_a_live_stream_ends_at_once():
    code = (
        "import os\nfrom vafl.runtime.grpc.wire import prepare_process\nprepare_process()\npid = os.fork()\n"
    )
    code += "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else 'child lives')\n"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert result.stdout.strip() == "70"
    assert "must not be forked" in result.stderr
