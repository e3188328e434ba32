"""A ledger and its head restored from a backup, with a live server and live clients."""

import json
import shutil

import pytest

from tests.machine import CONFIG, PARTIES, Machine
from vafl.errors import LedgerError
from vafl.privacy.ledger.ledger import read_ledger

PRIVATE = """
[data]
name = "iris"
scale = "none"
[privacy]
clip = 1.0
noise = 50.0
gradient_clip = 1.0
gradient_noise = 50.0
mu_max = "unlimited"
"""


@pytest.fixture
def machine(tmp_path):
    made = Machine(tmp_path, CONFIG + PRIVATE)
    yield made
    made.end()


def test_a_client_whose_ledger_was_restored_from_a_backup_stops_and_can_be_told_to_go_on(machine):
    own = machine.folder / "client-1" / "privacy"
    ledger, backup = own / "client-1.ledger", machine.folder / "backup"
    remembered = machine.folder / "run" / "state" / "server.marks"

    def mark():
        return json.loads(remembered.read_text())["marks"].get("client-1") if remembered.exists() else None

    for party in ("server", *PARTIES):
        machine.start(party)
    machine.until(mark, "the client's first mark")
    machine.kill("client-1")
    shutil.copytree(own, backup)
    older = read_ledger(backup / ledger.name)
    before = older.counts.sum()
    machine.start("client-1", "--resume")
    machine.until(lambda: read_ledger(ledger).counts.sum() > before, "uploads")
    machine.until(lambda: not older.knows(bytes.fromhex(mark())), "a mark that the backup lacks")
    machine.kill("client-1")
    machine.kill("server")  # what it remembers is on disk
    newest = mark()
    shutil.rmtree(own)
    shutil.copytree(backup, own)
    machine.start("server", "--resume")
    machine.start("client-1", "--resume")
    assert machine.wait("client-1") == LedgerError.exit_code, machine.log("client-1")[-2000:]
    assert "client-1.ledger" in machine.log("client-1")
    assert "--accept-ledger" in machine.log("client-1")
    assert read_ledger(ledger).counts.sum() == before, "it charged, so it sent, nothing"
    assert mark() == newest

    del machine.processes["client-1"]
    machine.start("client-1", "--resume", "--accept-ledger")
    machine.until(lambda: mark() != newest, "a mark of the ledger that was accepted")
    assert len(read_ledger(ledger).accepted) == 1
    machine.kill("client-1")
    machine.start("client-1", "--resume")
    machine.progress(20)
