"""Private clients and their server as real processes over mutual TLS: kills, resumption, spent budgets."""

import subprocess
import sys

import pytest

from tests.machine import CONFIG, PARTIES, Machine
from tests.waiting import LIMIT
from vafl.cli import main
from vafl.privacy.ledger.accounts import KINDS
from vafl.privacy.ledger.ledger import read_ledger
from vafl.run.controller import Ending

PRIVATE = """
[data]
name = "iris"
scale = "none"
[labels]
epsilon = 5.0
[privacy]
clip = 1.0
noise = 1.0
gradient_clip = 1.0
gradient_noise = 1.0
mu_max = 12.0
"""


@pytest.fixture
def machine(tmp_path):
    made = Machine(tmp_path, CONFIG + PRIVATE)
    yield made
    made.end()


def test_killed_on_both_sides_they_count_on_until_their_limits_end_the_run(machine, capsys):
    for party in ("server", *PARTIES):
        machine.start(party)
    machine.progress(50)
    machine.kill("client-1")
    machine.until(lambda: "client-1 is gone" in machine.log("server"), "the client's death noticed")
    own = machine.folder / "client-1" / "privacy" / "client-1.ledger"
    before = read_ledger(own).counts
    machine.start("client-1", "--resume")
    machine.until(lambda: machine.log("server").count("client-1 is here") == 2, "the client back")
    machine.kill("server")
    labels = machine.folder / "run" / "state" / "server" / "labels.safetensors"
    drawn = labels.read_bytes()
    machine.start("server", "--resume")
    for party in ("server", *PARTIES):
        assert machine.wait(party) == 0, machine.log(party)[-2000:]
    assert labels.read_bytes() == drawn  # drawing again would spend epsilon again
    summary = machine.summary()
    assert summary["labels"]["epsilon"] == 5.0
    assert summary["violations"] == {}
    assert summary["ending"] == Ending.BUDGETS_SPENT.name
    assert "warning: it ended early, after" in machine.log("server")
    for what in ("seconds", "updates", "bytes_up", "bytes_down"):
        values = [point[what] for point in machine.history()]
        assert values == sorted(values), what
    used = sum(delays["uses"] + delays["never"] for delays in summary["delays"].values())
    steps = 16 * summary["updates"]  # of every life; each uses the other client's cells
    assert 0.9 * steps < used <= steps, "the last batches lack the rows that are spent"
    sent = 0
    for party in PARTIES:
        assert "too few clients may still upload" in machine.log(party)
        ledger = read_ledger(machine.folder / party / "privacy" / f"{party}.ledger")
        sent += int(ledger.counts[KINDS.index("batch")].sum())
        assert ledger.spent.max() <= 144.0 * (1 + 1e-9)
    assert sent >= used, "no row is stepped on that was not charged"
    assert (read_ledger(own).counts >= before).all()
    assert (machine.folder / "client-1" / "config.toml").is_file()
    assert main(["privacy", str(machine.folder / "client-1")]) == 0
    assert "mu, any record" in capsys.readouterr().out


def test_a_forked_process_with_a_live_stream_ends_at_once():
    code = "import os\nfrom vafl.transport.grpc.wire import prepare_process\n"
    code += "prepare_process()\npid = os.fork()\n"
    code += "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else 'child lives')\n"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert result.stdout.strip() == "70"
    assert "must not be forked" in result.stderr
