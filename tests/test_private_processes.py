"""Private clients as real processes: killed, their ledgers count on; spent, their limits end the run."""

import json

import pytest

from tests.test_federation_processes import PARTIES, Machine
from vafl.cli import main
from vafl.privacy.accounts import KINDS
from vafl.privacy.ledger import read_ledger

CONFIG = """
seed = 0
[data]
name = "digits"
[schedule]
batch_size = 100
refresh = "none"
[privacy]
clip = 1.0
noise = 1.0
gradient_clip = 1.0
gradient_noise = 1.0
mu_max = 4.0
[stop]
updates = 1000000
[evaluation]
every = 10
[network]
address = "127.0.0.1:{port}"
certificates = "certs"
checkpoint_every = 5
heartbeat = 2.0
join_timeout = 100.0
real_delays = true
[delays]
kind = "fixed"
seconds = [0.05, 0.05]
"""


@pytest.fixture
def machine(tmp_path):
    made = Machine(tmp_path, CONFIG)
    yield made
    for process in made.processes.values():
        process.kill()
        process.wait()


def test_a_killed_client_s_ledger_counts_on_and_its_limit_ends_the_run(machine, capsys):
    for party in ("server", *PARTIES):
        machine.start(party)
    machine.until(lambda: machine.updates() >= 20, "20 updates")
    machine.kill("client-1")
    path = machine.folder / "client-1" / "privacy" / "client-1.ledger"
    before = read_ledger(path).counts
    machine.start("client-1", "--resume")
    assert machine.wait("server") == 0, machine.log("server")[-2000:]
    summary = json.loads((machine.folder / "run" / "summary.json").read_text())
    for party in PARTIES:
        assert machine.wait(party) == 0, machine.log(party)[-2000:]
        assert "too few clients may still upload" in machine.log(party)
        ledger = read_ledger(machine.folder / party / "privacy" / f"{party}.ledger")
        sent = int(ledger.counts[KINDS.index("batch")].sum())
        rows = 1348  # 13 whole batches and one of 48 an epoch
        least = summary["activations"][party] * rows / 14
        assert sent >= least * 0.9, (sent, least)
        assert ledger.spent.max() <= 16.0 * (1 + 1e-9)
    assert (read_ledger(path).counts >= before).all()
    assert (machine.folder / "client-1" / "config.toml").is_file()
    assert main(["privacy", str(machine.folder / "client-1")]) == 0
    assert "mu, any record" in capsys.readouterr().out
