"""A label holder with features as real processes: one server command runs its client too."""

import asyncio
import json
import socket
import subprocess
import sys
import tomllib
from contextlib import suppress

import grpc.aio
import polars as pl
import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from tests.companies import add_own_columns, configuration, document, write_companies
from tests.federation import same
from tests.forgery import forge
from tests.machine import CONFIG, Machine
from tests.observe.report.test_report import Page
from tests.run.test_tables import _simulated
from tests.transport.grpc.parties import complete
from tests.waiting import LIMIT
from vafl.cli import main
from vafl.config import read_config
from vafl.models.probabilities import probabilities
from vafl.names import LOCAL_CLIENT
from vafl.privacy.ledger.ledger import read_ledger
from vafl.run.model_store import rebuild
from vafl.run.predict import Deployed
from vafl.transport.grpc.reconnect import dial
from vafl.transport.grpc.stream import status_of
from vafl.transport.grpc.wire import CLAIM, PATH

CLIENTS = ["bank", "shop", LOCAL_CLIENT]
PRIVATE = {
    "data": {"scale": "none"},
    "privacy": {
        **{"mode": "dp_train", "clip": 1.0, "noise": 0.05, "mu_max": "unlimited"},
        **{"gradient_clip": 1.0, "gradient_noise": 0.05},
    },
    "stop": {"updates": 500},
}


class Companies(Machine):
    """Three companies on one machine. Only the bank and the shop are processes beside the server."""

    def __init__(self, folder, **sections):
        super().__init__(folder, CONFIG, ("bank", "shop"))
        common = tomllib.loads((folder / "run.toml").read_text())
        seed, common["delays"]["seconds"] = common.pop("seed"), [0.01] * 3
        write_companies(folder)
        add_own_columns(folder)
        whole = document(folder, **{**common, **sections})
        for name, column in (("server", "branch"), ("bank", "job"), ("shop", "city")):
            whole["parties"][name]["source"]["ignore"] = [column]
        (folder / "run.toml").write_text(tomli_w.dumps({"seed": seed, **whole}))


@pytest.fixture
def machine(tmp_path):
    made = Companies(tmp_path, **PRIVATE)
    yield made
    made.end()


async def refused(config, credentials):
    """Dial as the label holder's client and return the status of the refusal."""
    async with dial(PATH, ((CLAIM, LOCAL_CLIENT),), config.network, credentials) as stream:
        with suppress(grpc.aio.AioRpcError):
            await stream.read()
        return await status_of(stream)


def test_killed_and_resumed_it_goes_on_and_nobody_else_can_take_its_place(machine):
    """The server's process is killed with its client inside; both go on from their checkpoints."""
    for party in ("server", "bank", "shop"):
        machine.start(party)
    machine.progress(100)
    config, forged = read_config(machine.folder / "run.toml"), forge(machine.folder / "certs", LOCAL_CLIENT)
    status = complete(asyncio.wait_for(refused(config, forged), 60))
    assert status.code().name == "FAILED_PRECONDITION"
    assert "inside the server's process" in status.details()
    machine.progress(50)
    machine.kill("server")
    ledger = machine.folder / f"{LOCAL_CLIENT}.ledger"
    spent = read_ledger(ledger).counts
    assert spent.sum() > 0
    machine.start("server", "--resume")
    for party in ("server", "bank", "shop"):
        assert machine.wait(party) == 0, machine.log(party)[-2000:]
    assert machine.log("server").count(f"{LOCAL_CLIENT} is here") == 2
    summary = machine.summary()
    assert summary["updates"] == 500
    assert set(summary["violations"]) <= {"(unadmitted)"}
    counts = summary["activations"]
    assert list(counts) == CLIENTS
    assert counts[LOCAL_CLIENT] > 100
    assert (read_ledger(ledger).counts >= spent).all()
    assert summary["kept"]["test"]["auc"] > summary["baselines"]["trivial"]["test"]["auc"]
    assert 0.6 < summary["baselines"]["label holder alone"]["test"]["auc"] < 1
    assert (machine.folder / "run" / "models" / LOCAL_CLIENT / "model.safetensors").is_file()


def predict(folder, run):
    """Run `vafl predict` at the server, the bank and the shop, on tables without labels."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    given = tomllib.loads((folder / "run.toml").read_text())
    del given["parties"]["server"]["source"]["label"]
    given["network"] |= {"address": address, "certificates": str(run / "certs")}
    (folder / "new.toml").write_text(tomli_w.dumps(given))
    command = [sys.executable, "-m", "vafl.cli", "predict", str(folder / "new.toml"), "--model", str(run)]
    processes = [
        subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
        for options in (["--out", str(folder / "scores.parquet")], ["--party", "bank"], ["--party", "shop"])
    ]
    try:
        for process in processes:
            said = process.communicate(timeout=LIMIT)[1]
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()


def test_up_ends_where_a_simulation_does_and_predict_answers_from_its_own_table(tmp_path):
    sections = {
        "data": {"records": "labelled", "validation_fraction": 0.2},
        "rule": {"name": "sync"},
        "stop": {"updates": 60},
        "evaluation": {"every": 20},
        "network": {"address": "127.0.0.1:0", "join_timeout": 100.0},
    }
    write_companies(tmp_path)
    add_own_columns(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(document(tmp_path, **sections)))
    assert main(["align", str(path), "--all"]) == 0
    run = tmp_path / "run"
    assert main(["up", str(path), "--out", str(run)]) == 0
    summary = json.loads((run / "summary.json").read_text())
    traffic = summary["traffic"]
    assert traffic[LOCAL_CLIENT] == {"bytes_up": 0, "bytes_down": 0}  # it does not use the network
    for way in ("bytes_up", "bytes_down"):
        assert summary[way] == sum(own[way] for own in traffic.values()) > 0
    alone = summary["baselines"]["label holder alone"]
    assert alone.keys() == {"validation", "test"}
    assert alone["test"].keys() == summary["kept"]["test"].keys()
    report = Page((run / "report.html").read_text(encoding="utf-8")).text
    for party, columns in (("label holder", summary["columns"]["label-holder"]), ("bank", 3), ("shop", 2)):
        assert f"{party} {columns} " in report  # the clients' models say how many columns they use
    assert "used no network" in report
    assert "other parties\N{RIGHT SINGLE QUOTATION MARK} data add" in report
    *models, head = [load_file(run / "models" / name / "model.safetensors") for name in (*CLIENTS, "server")]
    simulated = _simulated(configuration(tmp_path, **sections), 60)
    assert same(models, [dict(model.state_dict()) for model in simulated.models])
    assert torch.equal(head["bias"], simulated.head.bias)

    predict(tmp_path, run)
    scores = pl.read_parquet(tmp_path / "scores.parquet")
    assert (scores["missing"] == "").all()
    config = read_config(tmp_path / "new.toml")
    parts = [Deployed.load(config, party, run) for party in CLIENTS]
    said = sum(rebuild(own.model)(own.records.features) for own in parts)
    server = Deployed.load(config, "server", run)
    chances = probabilities(rebuild(server.model)(said).detach().double().numpy())[:, 1]
    expected = dict(zip(server.records.ids.to_list(), chances.tolist(), strict=True))
    assert scores["p(yes)"].to_list() == pytest.approx([expected[each] for each in scores["id"]], abs=1e-5)
