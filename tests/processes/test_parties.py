"""Parties with their own folders, federation.toml and party.toml, as real processes over mutual TLS."""

import json
import shutil
import signal
import socket
import subprocess
import sys

import pytest
import tomli_w

from tests.kinds import MODELS, write_kinds
from tests.machine import Machine
from vafl.cli import main
from vafl.config import read_config
from vafl.data.aligned import join
from vafl.run.model_store import open_model
from vafl.run.plan import encoder_of
from vafl.transport.identity import issue, make_authority

FIRST = ("table", "series")
EVERYONE = (*FIRST, "images")
REFUSED, INTERRUPTED = 7, 130  # exit codes
SHARED = {
    "data": {"name": "parties", "records": "labelled"},
    "model": {"head": "gated", "combine": "concat", "width": {"table": 4}, "head_hidden": [8]},
    "schedule": {"batch_size": 16},
    "stop": {"updates": 60, "patience": 0},
    "evaluation": {"every": 20},
}


class Parties(Machine):
    """Each party has a folder with its data, its party.toml, its certificate and the shared file."""

    def __init__(self, folder):
        self.folder, self.processes = folder, {}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        sources = {
            party: {key: value for key, value in source.items() if key not in ("alignment", "cache")}
            for party, source in write_kinds(folder / "data").items()
        }
        make_authority(folder / "certs")
        for party in ("server", *EVERYONE):
            own = folder / party
            own.mkdir()
            issue(folder / "certs", party)
            shutil.copytree(folder / "certs" / party, own / "certs")
            network = {"address": self._address, "certificates": "certs", "checkpoint_every": 5}
            network |= {"join_timeout": 100.0, "heartbeat": 2.0}
            document = {"party": party, "federation": "federation.toml", "source": sources[party]}
            document |= {"network": network, "optimiser": {"step_size": 0.01}, "evaluation": {"every": 20}}
            if party in MODELS:
                document["embedding"] = MODELS[party]
                del document["evaluation"]
            (own / "party.toml").write_text(tomli_w.dumps(document))
        self._sources = sources

    def agree(self, *clients, **changes):
        """Give every party the same federation.toml and a new alignment."""
        shared = {**SHARED, **changes, "data": {**SHARED["data"], "parties": list(clients)}}
        for party in ("server", *clients):
            (self.folder / party / "federation.toml").write_text(tomli_w.dumps(shared))
        parties = {party: {"source": self._sources[party]} for party in ("server", *clients)}
        (self.folder / "all.toml").write_text(tomli_w.dumps({**shared, "parties": parties}))
        config = read_config(self.folder / "all.toml")
        for party, alignment in join(config.data, config.sources).items():
            alignment.write(self.folder / party / f"{party}.alignment.parquet")

    def start(self, party, *options, out="run"):
        role = "server" if party == "server" else "client"
        command = [sys.executable, "-m", "vafl.cli", role, "party.toml", "--out", out, *options]
        with (self.folder / f"{party}.log").open("ab") as log:
            self.processes[party] = subprocess.Popen(
                command, cwd=self.folder / party, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def log(self, party):
        return " ".join((self.folder / f"{party}.log").read_text().split())

    def history(self, out="later"):
        path = self.folder / "server" / out / "history.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def end_well(self, *parties):
        for party in parties:
            assert self.wait(party) == 0, self.log(party)[-3000:]


@pytest.fixture
def parties(tmp_path):
    made = Parties(tmp_path)
    yield made
    made.end()


def encoder(parties, party, out):
    return encoder_of(open_model(parties.folder / party / out, party))


def test_a_party_joins_a_trained_federation_and_another_one_resumes(parties, capsys):
    parties.agree(*FIRST)
    parties.start("server")
    own = parties.folder / "table" / "federation.toml"
    agreed = own.read_text()
    own.write_text(agreed.replace("table = 4", "table = 5"))
    parties.start("table")
    assert parties.wait("table") == REFUSED
    assert 'model.width {"table": 4} at the server, {"table": 5} at the client' in parties.log("table")
    own.write_text(agreed)
    for party in FIRST:
        parties.start(party)
    parties.end_well("server", *FIRST)
    assert {encoder(parties, party, "run").kind for party in FIRST} == set(FIRST)

    before = (parties.folder / "server" / "run" / "summary.json").read_text()
    parties.agree(*EVERYONE, stop={"updates": 1_000_000, "patience": 0})  # until the signal below
    assert main(["check", str(parties.folder / "images" / "party.toml")]) == 0
    parties.start("server", "--from", "run", out="later")
    for party in FIRST:
        parties.start(party, "--from", "run", out="later")
    parties.start("images", out="later")
    assert parties.wait("images") == REFUSED
    run = open_model(parties.folder / "server" / "run", "server").manifest.run
    assert f"from_earlier_run '{run}' at the server, '' at the client" in parties.log("images")
    parties.start("images", "--join", out="later")
    parties.progress(40)
    parties.kill("table")
    parties.until(lambda: "table is gone" in parties.log("server"), "the end of a process noticed")
    parties.start("table", "--resume", out="later")
    parties.until(lambda: parties.log("server").count("table is here") == 3, "it again")
    parties.progress(40)
    parties.processes["server"].send_signal(signal.SIGINT)
    assert parties.wait("server") == INTERRUPTED
    parties.end_well(*EVERYONE)

    assert "continues with its model" in parties.log("table")
    assert "the head continues with the one in" in parties.log("server")
    for party in FIRST:
        assert encoder(parties, party, "later") == encoder(parties, party, "run")
    summary = json.loads((parties.folder / "server" / "later" / "summary.json").read_text())
    assert summary["violations"] == {"images": 1}  # it came without --join
    assert min(summary["activations"].values()) > 0
    assert (parties.folder / "server" / "run" / "summary.json").read_text() == before
