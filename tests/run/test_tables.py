"""Runs on tables: simulated under every rule and mode, and with processes that share no folder."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from sklearn.metrics import log_loss

from tests.companies import configuration, document, tables_in, write_companies
from tests.federation import same
from tests.waiting import LIMIT
from vafl.cli import main
from vafl.config import from_document
from vafl.config.run_settings import StopSettings
from vafl.data.aligned import join
from vafl.errors import ConfigError
from vafl.run.assembly import build
from vafl.run.plan import load_data
from vafl.transport.identity import issue, make_authority

NUMBERS = {"bank": {"ignore": ["job"]}, "shop": {"ignore": ["city"]}}
DP = {"clip": 1.0, "noise": 0.01, "mu_max": "unlimited"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("companies")
    write_companies(path)
    return path


def numbers_only(folder):
    tables = tables_in(folder)
    return {name: {**own, **NUMBERS.get(name, {})} for name, own in tables.items()}


@pytest.mark.parametrize(
    "sections",
    [
        {"rule": {"name": "async"}},
        {"rule": {"name": "t-sync", "t": 2, "delay_bound": 5}},
        {
            "rule": {"name": "sync"},
            "embedding": {"model": "mlp"},
            "model": {"head": "mlp", "combine": "concat"},
        },
        {"rule": {"name": "async"}, "privacy": {"mode": "embed_only", "noise": 0.01, "clip": 5.0}},
        {"rule": {"name": "async"}, "privacy": {"mode": "release_once", **DP}},
        {"rule": {"name": "sync"}, "privacy": {"mode": "frozen", **DP}, "model": {"head": "mlp"}},
        {
            "rule": {"name": "async"},
            "privacy": {"mode": "dp_train", "gradient_clip": 1.0, "gradient_noise": 0.01, **DP},
        },
    ],
    ids=lambda sections: "-".join(str(own.get("mode", own.get("name", ""))) for own in sections.values()),
)
def test_records_that_some_parties_lack_are_trained_on(folder, sections):
    private = "mode" in sections.get("privacy", {})
    data = {"records": "labelled", "scale": "none" if private else "auto"}
    tables = numbers_only(folder) if private else {}
    run = build(configuration(folder, data=data, tables=tables, **sections))
    assert run.data.rows == 300
    first = run.measure().metric
    assert run.train()[-1].metric > max(first, 0.6)
    for model, party in zip(run.models, run.data.parties, strict=True):
        absent = torch.from_numpy(party.encoder.absent_row())
        assert (party.features[run.data.train] == absent).all(1).sum() > 40
        if sections.get("privacy", {}).get("mode") != "frozen":  # the embedding of missing records is learnt
            fresh = build(run.config).models[run.models.index(model)]
            assert not torch.equal(model(absent[None]), fresh(absent[None]))


def test_a_guaranteed_mode_refuses_what_would_pass_by_the_noise(folder):
    private = {"privacy": {"mode": "frozen", **DP}, "model": {"head": "mlp"}}
    with pytest.raises(ConfigError, match=r"VFL-7155.*auto"):
        build(configuration(folder, **private))


def test_patience_ends_a_simulated_run_and_the_test_rows_are_measured_once(folder, tmp_path):
    with pytest.raises(ConfigError, match="VFL-1013"):
        configuration(folder, stop={"patience": 2})
    patient = document(folder, data={"validation_fraction": 0.2}, stop={"patience": 2, "updates": 100_000})
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(patient))
    assert main(["run", str(path), "--out", str(tmp_path / "run")]) == 0
    history = (tmp_path / "run" / "history.jsonl").read_text().splitlines()
    points = [json.loads(line) for line in history]
    losses = [point["metrics"]["log_loss"] for point in points]
    assert points[-1]["updates"] < 100_000
    assert min(losses[-2:]) >= min(losses[:-2])
    assert len(losses) == 3 or min(losses[-3:-1]) < min(
        losses[:-3]
    )  # the run stops as soon as patience allows
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    kept, best = summary["kept"], points[losses.index(min(losses))]
    assert (kept["updates"], kept["selected_by"]) == (best["updates"], "log_loss")
    assert kept["validation"] == best["metrics"]
    assert summary["metric"] == {"name": "auc", "value": best["metric"]}
    assert kept["test"]["auc"] > 0.7
    assert_scores_of_kept_models(tmp_path / "run", kept)


def test_one_extreme_label_does_not_spoil_a_regression(tmp_path):
    """Heavy-tailed labels, one of them a million times too large, with the default settings for tables."""
    generator, rows = np.random.default_rng(0), 1500
    columns = generator.normal(size=(rows, 4))
    cost = np.exp(columns @ [0.6, -0.5, 0.4, 0.0] + 0.3 * generator.normal(size=rows))
    tables = {"server": {"cost": cost}, "bank": {"a": columns[:, 0], "b": columns[:, 1]}}
    tables["shop"] = {"c": columns[:, 2], "d": columns[:, 3]}
    sections = {}
    for name, own in tables.items():
        pl.DataFrame({"id": np.arange(rows), **own}).write_csv(tmp_path / f"{name}.csv")
        source = {"path": str(tmp_path / f"{name}.csv"), "id": "id", "alignment": str(tmp_path / name)}
        sections[name] = {"source": source}
    sections["server"]["source"]["label"] = "cost"
    data = {"name": "parties", "parties": ["bank", "shop"], "task": "regression"}
    config = from_document({"data": data, "parties": sections})
    whole = load_data(config)
    labels = whole.labels.clone()
    labels[17] = 1e6
    run = build(config, replace(whole, labels=labels))
    run.train()
    figures, trivial = (
        run.evaluator.test(),
        run.task.metrics.trivial(whole.labels[whole.train], whole.labels[whole.test]),
    )
    assert figures["r2"] > 0.6
    assert figures["mae"] < 0.6 * trivial["mae"]


def test_companies_that_share_no_folder_end_where_a_simulation_does(folder, tmp_path):
    """As in the guide: every party has its own folder, file and configuration. Patience ends the run."""
    sections = {
        "data": {"records": "labelled", "validation_fraction": 0.2},
        "rule": {"name": "sync"},
        "stop": {"patience": 3, "updates": 5000},
        "evaluation": {"every": 20},
    }
    whole = configuration(folder, **sections)
    alignments = join(whole.data, whole.sources)
    make_authority(tmp_path / "certs")
    network = {"address": "127.0.0.1:0", "certificates": str(tmp_path / "certs")}
    for party, file in (("server", "labels.csv"), ("bank", "bank.csv"), ("shop", "shop.parquet")):
        own = tmp_path / party
        own.mkdir()
        shutil.copy(folder / file, own / file)
        alignments[party].write(own / f"{party}.alignment.parquet")
        issue(tmp_path / "certs", party)
        (own / "run.toml").write_text(tomli_w.dumps(document(own, party, network=network, **sections)))
    processes = {"server": _start(tmp_path, "server")}
    try:
        address = _address(processes["server"])
        for party in ("bank", "shop"):
            processes[party] = _start(tmp_path, "client", "--party", party, address=address)
        said = {party: process.communicate(timeout=LIMIT)[0] for party, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
    assert {process.returncode for process in processes.values()} == {0}, said
    assert "log_loss has not been better for 3 evaluations" in " ".join(said["bank"].split())
    summary = json.loads((tmp_path / "server" / "out" / "summary.json").read_text())
    kept = summary["kept"]["updates"]
    assert kept + 60 <= summary["updates"] < 5000
    files = [tmp_path / party / "out" / "models" / party for party in ("bank", "shop", "server")]
    *models, head = [load_file(path / "model.safetensors") for path in files]
    before, run = _simulated(whole, kept - 1), _simulated(whole, kept)
    assert torch.equal(head["bias"], run.head.bias)
    ends = [[dict(model.state_dict()) for model in each.models] for each in (before, run)]
    assert any(same(models, end) for end in ends)  # the head may step while they answer
    for model, state in zip(run.models, models, strict=True):
        model.load_state_dict(state)
    found = summary["kept"]
    assert (found["validation"], found["test"]) == (run.evaluator(), run.evaluator.test())
    assert found["test"]["auc"] > summary["baselines"]["trivial"]["test"]["auc"] == 0.5
    assert_scores_of_kept_models(tmp_path / "server" / "out", found)
    for model, party in zip(run.models, run.data.parties, strict=True):  # the kept models
        learnt = model(torch.from_numpy(party.encoder.absent_row())[None])[0]
        assert torch.allclose(head[f"default.{party.name}"], learnt, atol=1e-6)


def assert_scores_of_kept_models(run, kept):
    """The scores belong to the kept models, not to the last evaluation."""
    path = run / "scores.parquet"
    assert path.stat().st_mode & 0o777 == 0o600
    scores = pl.read_parquet(path)
    assert scores.columns == ["part", "label", "score"]
    for part in ("validation", "test"):
        own = scores.filter(pl.col("part") == part)
        assert log_loss(own["label"] == "yes", own["score"]) == pytest.approx(kept[part]["log_loss"])


def _simulated(config, updates):
    run = build(replace(config, stop=StopSettings(updates=updates)))
    run.train()
    return run


def _start(folder, role, *options, address=""):
    command = [sys.executable, "-m", "vafl.cli", role, "run.toml", "--out", "out", *options]
    command += ["--set", f"network.address={address}"] if address else []
    return subprocess.Popen(command, cwd=folder / (options or [role])[-1], stdout=subprocess.PIPE, text=True)


def _address(server):
    """Return the address from the server's output."""
    for line in server.stdout:
        if line.startswith("listening on "):
            return json.dumps(line.split()[-1])
    raise AssertionError("the server never listened")
