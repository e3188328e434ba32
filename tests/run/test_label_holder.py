"""A label holder with features: one party in the configuration, one more client in the run."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from sklearn.metrics import roc_auc_score

import vafl.run.launch
from tests.companies import add_own_columns, configuration, document, tables_in, write_companies
from tests.federation import parameters, same
from vafl.cli import main
from vafl.config import read_config
from vafl.data.aligned import join, load_tables
from vafl.errors import DataError, Unauthenticated
from vafl.names import LOCAL_CLIENT
from vafl.run.assembly import build
from vafl.run.launch import launch, train_alone
from vafl.run.local import keeps_pace
from vafl.transport.grpc.admission import identify
from vafl.transport.grpc.wire import CLAIM
from vafl.transport.traffic import Traffic


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("companies")
    write_companies(path)
    add_own_columns(path)
    return path


def explicit(folder, **sections):
    """Return the same federation with the label holder's features as a separate, third client."""
    tables = tables_in(folder)
    lender = {**tables["server"], "alignment": str(folder / "lender.alignment.parquet")}
    del lender["label"]
    tables = {**tables, "server": {**tables["server"], "ignore": ["*"]}, "lender": lender}
    data = {**sections.pop("data", {}), "parties": ["bank", "shop", "lender"]}
    return configuration(folder, data=data, tables=tables, **sections)


@pytest.mark.parametrize("records", ["common", "labelled"])
def test_a_simulation_is_that_of_an_explicit_third_client(folder, records):
    data = {"records": records}
    own, other = build(configuration(folder, data=data)), build(explicit(folder, data=data))
    assert [party.name for party in own.data.parties] == ["bank", "shop", LOCAL_CLIENT]
    assert torch.equal(own.data.parties[2].features, other.data.parties[2].features)
    assert own.data.parties[2].features.shape[1] >= 3, "rating, and a branch of two"
    assert own.train()[-1].metrics == other.train()[-1].metrics
    *network, local = own.runtime.traffic
    assert network == other.runtime.traffic[:2]
    assert local == Traffic()  # messages inside a process do not count as traffic
    assert same(parameters(own), parameters(other))


def test_ignoring_all_of_its_columns_leaves_the_label_holder_without_a_client(folder):
    tables = tables_in(folder)
    run = build(configuration(folder, tables={**tables, "server": {**tables["server"], "ignore": ["*"]}}))
    assert [party.name for party in run.data.parties] == ["bank", "shop"]


def test_each_party_learns_from_its_alignment_that_the_client_exists(folder, tmp_path):
    whole = configuration(folder)
    for name, own in join(whole.data, whole.sources).items():
        own.write(tmp_path / f"{name}.alignment.parquet")
    tables = {
        name: replace(own, alignment=str(tmp_path / f"{name}.alignment.parquet"))
        for name, own in whole.sources.items()
    }
    views = {party: load_tables(whole.data, {party: tables[party]}, whole.seed, party) for party in tables}
    assert {tuple(own.name for own in view.parties) for view in views.values()} == {
        ("bank", "shop", LOCAL_CLIENT)
    }
    assert len({view.record_digest for view in views.values()}) == 1
    known = {party: [own.features.numel() > 0 for own in view.parties] for party, view in views.items()}
    assert known == {
        "server": [False, False, True],
        "bank": [True, False, False],
        "shop": [False, True, False],
    }
    without = {"server": replace(tables["server"], ignore=("*",))}
    with pytest.raises(DataError, match=r"VFL-2001.*0.*with"):
        load_tables(whole.data, without, whole.seed, "server")


def test_columns_that_nothing_can_be_learnt_from_are_named_with_the_remedy(tmp_path):
    write_companies(tmp_path)
    labels = pl.read_csv(tmp_path / "labels.csv")
    labels.with_columns(country=pl.lit("NL")).write_csv(tmp_path / "labels.csv")
    with pytest.raises(DataError, match=r"VFL-2201.*server"):
        build(configuration(tmp_path))


def test_the_label_holder_alone_is_a_baseline_of_every_metric(folder, tmp_path):
    sections = {"data": {"validation_fraction": 0.2}, "stop": {"patience": 3, "updates": 2000}}
    config, console = configuration(folder, **sections), Console(file=io.StringIO())
    recorded = launch(config, tmp_path / "run", console)
    alone = recorded.summary["baselines"]["label holder alone"]
    again = train_alone(config, build(config).data)
    assert alone == again.figures
    scores = pl.read_parquet(tmp_path / "run" / "scores.parquet")
    assert scores["alone_score"].to_list() == again.scores["score"].to_list()
    for part in ("validation", "test"):
        own = scores.filter(pl.col("part") == part)
        for column, reached in (("score", recorded.kept(part)), ("alone_score", alone[part])):
            assert roc_auc_score(own["label"] == "yes", own[column]) == pytest.approx(reached["auc"])
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "The 95% interval of this gain is" in page
    for part in ("validation", "test"):
        assert alone[part].keys() == recorded.summary["kept"][part].keys()
    assert 0.5 < alone["test"]["auc"] < recorded.kept("test")["auc"]
    pooled = build(replace(explicit(folder, **sections), rule=replace(config.rule, name="centralised")))
    assert {party.name for party in pooled.data.parties} == {"bank", "shop", "lender"}
    only = replace(pooled.data, parties=pooled.data.parties[2:])
    run = build(pooled.config, only)
    run.train()
    assert alone["test"] == pytest.approx(run.evaluator.test(), abs=0.05)


def test_ctrl_c_skips_the_baseline_and_the_run_is_whole(folder, tmp_path, monkeypatch):
    def interrupt(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(vafl.run.launch, "train_alone", interrupt)
    recorded = launch(configuration(folder), tmp_path / "run", Console(file=io.StringIO()))
    assert list(recorded.summary["baselines"]) == ["trivial"]
    assert recorded.kept("test")["auc"] > 0.9


def test_the_baseline_is_trained_on_the_labels_that_were_drawn(folder, tmp_path, monkeypatch):
    """True training labels must not reach the run folder."""
    seen = []

    def record_and_skip(config, data):
        seen.append(data)
        raise KeyboardInterrupt

    monkeypatch.setattr(vafl.run.launch, "train_alone", record_and_skip)
    config = configuration(folder, labels={"epsilon": 0.1})
    launch(config, tmp_path / "run", Console(file=io.StringIO()))
    true, drawn = build(configuration(folder)).data, seen[0]
    assert not torch.equal(drawn.labels[drawn.train], true.labels[true.train])


def test_init_and_data_show_the_features_of_the_label_holder(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table = ["--table", f"server={folder / 'labels.csv'}", "--label", "repaid", "--parties", "bank,shop"]
    assert main(["init", *table]) == 0
    assert "2: rating, branch" in " ".join(capsys.readouterr().out.split())
    assert read_config(Path("party.toml")).sources["server"].label == "repaid"
    assert main(["data", "party.toml", "--json"]) == 0
    (server,) = json.loads(capsys.readouterr().out)["parties"]
    assert server["labels"].keys() == {"no", "yes"}
    used = {column["name"]: column["use"] for column in server["columns"]}
    assert used == {"person": "dropped", "repaid": "dropped", "rating": "number", "branch": "category"}


@pytest.mark.parametrize("command", ["client", "predict", "serve"])
def test_no_command_starts_it_as_a_process(folder, tmp_path, command, capsys):
    (tmp_path / "run.toml").write_text(tomli_w.dumps(document(folder)))
    options = ["--out", str(tmp_path / "run")] if command == "client" else ["--model", str(tmp_path / "run")]
    assert main([command, str(tmp_path / "run.toml"), "--party", LOCAL_CLIENT, *options]) == 2
    assert "inside `vafl server`" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_a_peer_that_claims_its_name_without_certificates_is_refused():
    peer = SimpleNamespace(invocation_metadata=lambda: ((CLAIM, LOCAL_CLIENT),))
    with pytest.raises(Unauthenticated, match="VFL-6102"):
        identify(peer, None, [LOCAL_CLIENT])


@given(
    own=st.integers(0, 9),
    others=st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), min_size=1, max_size=4),
)
def test_it_never_runs_ahead_of_the_fastest_client_and_never_waits_for_one_that_is_away(own, others):
    index = len(others)
    server = SimpleNamespace(
        activations=[count for count, _, _ in others] + [own],
        absent={m for m, (_, absent, _) in enumerate(others) if absent},
        finished={m for m, (_, _, finished) in enumerate(others) if finished},
    )
    here = [count for count, absent, finished in others if not (absent or finished)]
    assert keeps_pace(SimpleNamespace(activation=own), server, index) == (not here or own <= max(here))
