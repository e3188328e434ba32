"""The secure sum between real processes over mutual TLS, with keys signed by certificates."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from tests.machine import CONFIG, Machine
from vafl.cli import main

PARTIES = ("client-1", "client-2", "client-3")
SECURE = """
[data]
name = "iris"
[partition]
clients = 3
[rule]
name = "sync"
[privacy]
secure_sum = true
"""


@pytest.fixture
def machine(tmp_path):
    made = Machine(tmp_path, CONFIG + SECURE, PARTIES)
    yield made
    made.end()


def test_up_ends_in_the_parameters_of_plain_sync(tmp_path, monkeypatch):
    """This also checks that certificates are found if --out is relative."""
    monkeypatch.chdir(tmp_path)
    config = '[schedule]\nrefresh = "none"\n[stop]\nupdates = 100\n[network]\naddress = "127.0.0.1:0"\n'
    (tmp_path / "run.toml").write_text(config + SECURE)
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


def test_killed_on_both_sides_rounds_begin_anew_and_a_signal_ends_the_run_orderly(machine):
    for party in ("server", *PARTIES):
        machine.start(party)
    machine.progress(50)
    machine.kill("client-2")
    machine.until(lambda: "client 1 left: what was under way" in machine.log("client-1"), "a new epoch")
    machine.start("client-2", "--resume")
    machine.progress(50)
    machine.kill("server")
    machine.start("server", "--resume")
    machine.progress(100)
    machine.processes["server"].send_signal(signal.SIGTERM)
    assert machine.wait("server") == 130
    for party in PARTIES:
        assert machine.wait(party) == 0, machine.log(party)[-2000:]
        assert "told to stop" in machine.log(party)
        assert load_file(machine.folder / party / "models" / party / "model.safetensors")
    summary = machine.summary()
    assert summary["interrupted"] is True
    assert summary["metric"]["value"] > 0.7
    assert summary["violations"] == {}
    assert "secure sum without certificates" not in machine.log("client-1")
