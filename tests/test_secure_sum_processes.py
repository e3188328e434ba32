"""The secure sum between real processes over mutual TLS, with keys signed by certificates."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.test_federation_processes import CONFIG, Machine
from vafl.cli import main

PARTIES = ("client-1", "client-2", "client-3")
SECURE = """
[partition]
clients = 3
[rule]
name = "sync"
[privacy]
secure_sum = true
"""
KILLED = CONFIG.replace("batch_size = 16", 'batch_size = 16\nrefresh = "none"').replace(
    "seconds = [0.02, 0.02]", "seconds = [0.02, 0.02, 0.02]"
)


@pytest.fixture
def machine(tmp_path):
    made = Machine(tmp_path, KILLED.replace("updates = 1000000", "updates = 400") + SECURE, PARTIES)
    yield made
    for process in made.processes.values():
        process.kill()
        process.wait()


def test_up_ends_in_the_parameters_of_plain_sync(tmp_path, monkeypatch):
    """And its certificates are found where --out is relative."""
    monkeypatch.chdir(tmp_path)
    config = f'[data]\nname = "iris"\n[schedule]\nrefresh = "none"\n[stop]\nupdates = 100\n{SECURE}'
    (tmp_path / "run.toml").write_text(config + '[network]\naddress = "127.0.0.1:0"\n')
    for command, out, secure in (("up", "masked", "true"), ("run", "plain", "false")):
        assert main([command, "run.toml", "--out", out, "--set", f"privacy.secure_sum={secure}"]) == 0
        assert json.loads((tmp_path / out / "summary.json").read_text())["updates"] == 100
    for name in (*PARTIES, "server"):
        masked = load_file(tmp_path / "masked" / "models" / name / "model.safetensors")
        plain = load_file(tmp_path / "plain" / "models" / name / "model.safetensors")
        for key, tensor in masked.items():  # the plain server also keeps clients' mean embeddings
            torch.testing.assert_close(tensor, plain[key], rtol=1e-5, atol=1e-6)
    kept = {path.name for path in (tmp_path / "masked" / "state" / "server").iterdir()}
    assert kept == {"checkpoint.safetensors"}, "no table of embeddings"


def test_a_killed_client_aborts_the_round_and_the_run_ends_once_it_is_back(machine):
    for party in ("server", *PARTIES):
        machine.start(party)
    machine.until(lambda: machine.updates() >= 50, "50 updates")
    machine.kill("client-2")
    machine.until(lambda: "client 1 left: what was under way" in machine.log("client-1"), "a new epoch")
    machine.start("client-2", "--resume")
    machine.until(lambda: machine.updates() >= 100, "updates after the client's return")
    machine.kill("server")
    machine.start("server", "--resume")
    for party in ("server", *PARTIES):
        assert machine.wait(party) == 0, machine.log(party)[-2000:]
    assert machine.history()[-1]["updates"] == 400
    assert machine.history()[-1]["metric"] > 0.7
    assert "nobody vouches" not in machine.log("client-1")
