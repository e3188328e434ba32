"""A model trained on tables, used on later tables with other people and without labels."""

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import tomli_w
import torch
from rich.console import Console

from tests.companies import add_own_columns, configuration, document, write_companies
from tests.models.forged import read_document, write_document
from tests.run.test_prediction_driver import batch_of
from tests.waiting import LIMIT
from vafl.config import from_document, read_config
from vafl.data.aligned import join
from vafl.errors import ConfigError, DataError, RunFolderError
from vafl.run.launch import launch
from vafl.run.model_store import model_folder, open_model, read_deployed, rebuild
from vafl.run.plan import make_plan
from vafl.run.predict import Deployed
from vafl.run.prediction_records import load_records


@pytest.fixture
def console():
    return Console(file=io.StringIO())


LOOPBACK = {"network": {"address": "127.0.0.1:0", "security": "plaintext", "join_timeout": 20.0}}


def later(folder, records):
    """New files for the same parties: 60 people, no labels, and a column that the model does not know."""
    write_companies(folder, people=60, seed=1)
    labels = pl.read_csv(folder / "labels.csv")
    labels.drop("repaid").write_csv(folder / "labels.csv")
    bank = pl.read_csv(folder / "bank.csv")
    bank.with_columns(extra=pl.lit("?"), job=pl.lit("astronaut")).write_csv(folder / "bank.csv")
    tables = {"server": {"path": str(folder / "labels.csv"), "id": "person"}}
    config = configuration(folder, data={"records": records}, **LOOPBACK)
    without = configuration(
        folder,
        data={"records": records},
        tables={**tables, **{name: vars(config.sources[name]) for name in ("bank", "shop")}},
        **LOOPBACK,
    )
    return without, labels


@pytest.mark.parametrize("records", ["common", "labelled"])
def test_people_who_came_later_are_scored_as_the_training_encoded(tmp_path, console, records):
    write_companies(tmp_path / "then")
    before = configuration(tmp_path / "then", data={"records": records}, **LOOPBACK)
    launch(before, tmp_path / "run", console)
    config, labels = later(tmp_path / "now", records)
    scores = batch_of(config, tmp_path / "run", tmp_path / "scores[1].parquet", ["bank", "shop"])
    shared = (
        labels
        if records == "labelled"
        else labels.filter(
            *(pl.col("person").is_in(_people(config, name).implode()) for name in ("bank", "shop"))
        )
    )
    assert scores["id"].sort().to_list() == shared["person"].sort().to_list()
    assert scores["missing"].eq("").all()
    joined = scores.join(labels, left_on="id", right_on="person")
    assert (joined["prediction"] == joined["repaid"]).mean() > 0.75

    own = Deployed.load(config, "bank", tmp_path / "run").records.features
    embeddings = rebuild(open_model(tmp_path / "run", "bank"))(own)
    assert torch.isfinite(embeddings).all()
    lacking = int((own[:, -1] == 1).sum()) if records == "labelled" else 0
    assert lacking == (12 if records == "labelled" else 0), "a fifth of 60 are no customers of the bank"


@pytest.mark.parametrize("records", ["common", "labelled"])
@pytest.mark.parametrize("rule", ["async", "centralised"])
def test_what_was_learnt_for_people_it_does_not_know_stands_in_for_a_party(tmp_path, console, rule, records):
    write_companies(tmp_path)
    sections = {"data": {"records": records, "validation_fraction": 0.2}, "stop": {"patience": 3}, **LOOPBACK}
    config = configuration(tmp_path, rule={"name": rule}, **sections)
    launch(config, tmp_path / "run", console)
    model = rebuild(open_model(tmp_path / "run", "bank"))
    data = make_plan(config).data
    bank = data.parties[0]
    if records == "labelled":
        learnt = model(torch.from_numpy(bank.encoder.absent_row())[None])[0]
    else:
        learnt = model(bank.features[data.rows :]).mean(0)
    head = open_model(tmp_path / "run", "server")
    assert torch.allclose(head.defaults["bank"], learnt, atol=1e-6)

    scores = batch_of(impatient(config), tmp_path / "run", tmp_path / "scores.parquet", ["shop"])
    assert (scores["missing"] == "bank: absent").all()
    shop = Deployed.load(config, "shop", tmp_path / "run")
    said = rebuild(shop.model)(shop.records.features) + learnt
    chances = torch.sigmoid(rebuild(head)(said))[:, 0]
    number_of = dict(zip(_everyone(config), chances.tolist(), strict=True))
    assert scores["p(yes)"].to_list() == pytest.approx(
        [number_of[person] for person in scores["id"]], abs=1e-5
    )


@pytest.mark.parametrize("records", ["common", "labelled"])
def test_the_server_counts_its_records_without_a_score(tmp_path, console, records):
    write_companies(tmp_path)
    config = configuration(tmp_path, data={"records": records}, **LOOPBACK)
    launch(config, tmp_path / "run", console)
    own = Deployed.load(config, "server", tmp_path / "run").records
    assert own.unscored == 400 - own.rows
    assert (own.unscored > 0) == (records == "common")
    assert Deployed.load(config, "bank", tmp_path / "run").records.unscored == 0


def test_predict_says_how_many_records_have_no_score_and_what_to_do(tmp_path, console):
    done = predict_alone(tmp_path, console, "common")
    assert done.returncode == 0, done.stderr
    rows = len(_everyone(read_config(tmp_path / "run.toml")))
    assert f"{rows:,} records are scored" in done.stdout
    assert f"{400 - rows:,} of the 400 records in your table have no score" in done.stdout
    assert 'data.records = "labelled"' in done.stdout
    assert pl.read_csv(tmp_path / "scores.csv").height == rows


def test_a_model_of_common_records_refuses_an_alignment_of_all_labelled_ones(tmp_path, console):
    """The server fails before it listens. Otherwise its own client alone would score all records."""
    assert predict_alone(tmp_path, console, "common").returncode == 0
    (tmp_path / "scores.csv").unlink()
    path = tmp_path / "run.toml"
    align(read_config(path, ["data.records=labelled"]))
    done = predict_again(tmp_path, "--set", "data.records=labelled")
    assert done.returncode == 3
    assert "listening" not in done.stdout
    said = " ".join(done.stderr.split())
    assert "bank has 320 of 400; shop has 320 of 400" in said
    assert 'trained with data.records = "common"' in said
    assert not (tmp_path / "scores.csv").exists()
    with pytest.raises(DataError, match="VFL-2012"):
        Deployed.load(read_config(path), "bank", tmp_path / "run")


def test_a_model_of_labelled_records_scores_an_alignment_of_common_ones(tmp_path, console):
    write_companies(tmp_path)
    config = configuration(tmp_path, data={"records": "labelled"}, **LOOPBACK)
    launch(config, tmp_path / "run", console)
    common = configuration(tmp_path, data={"records": "common"}, **LOOPBACK)
    align(common)
    scores = batch_of(common, tmp_path / "run", tmp_path / "scores.parquet", ["bank", "shop"])
    assert scores["id"].sort().to_list() == _everyone(common).sort().to_list()
    assert scores["missing"].eq("").all()
    assert Deployed.load(common, "server", tmp_path / "run").records.unscored == 400 - scores.height


def align(config):
    """Write the files that `vafl align` would write."""
    for name, own in join(config.data, config.sources).items():
        own.write(Path(config.sources[name].alignment))


def predict_alone(folder, console, records):
    """Train, then run `vafl predict` at a label holder with features: its own client is the only one."""
    write_companies(folder)
    add_own_columns(folder)
    network = {**LOOPBACK["network"], "join_timeout": 1.0}
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(document(folder, data={"records": records}, network=network)))
    launch(read_config(path), folder / "run", console)
    return predict_again(folder)


def predict_again(folder, *more):
    command = [sys.executable, "-m", "vafl.cli", "predict", str(folder / "run.toml")]
    options = ["--model", str(folder / "run"), "--out", str(folder / "scores.csv")]
    return subprocess.run(
        [*command, *options, *more], capture_output=True, text=True, timeout=LIMIT, check=False
    )


def impatient(config):
    """Return the configuration with short waits for missing clients."""
    return replace(
        config,
        network=replace(config.network, join_timeout=4.0),
        prediction=replace(config.prediction, patience=0.5),
    )


def _everyone(config):
    """Return the ids of a join, in the order of its rows."""
    return join(config.data, config.sources)["server"].ids


def _people(config, name):
    path = config.sources[name].path
    return (pl.read_parquet if path.endswith("parquet") else pl.read_csv)(path)["person"]


def test_tables_that_changed_are_refused(tmp_path, console):
    write_companies(tmp_path / "then")
    before = configuration(tmp_path / "then", **LOOPBACK)
    launch(before, tmp_path / "run", console)
    path = tmp_path / "then" / "bank.csv"
    bank, stored = pl.read_csv(path), open_model(tmp_path / "run", "bank")
    bank.drop("income").write_csv(path)
    with pytest.raises(DataError, match=r"VFL-2194.*income"):
        load_records(before, "bank", stored)
    bank.with_columns(income=pl.lit("a lot")).write_csv(path)
    with pytest.raises(DataError, match=r"VFL-2195.*income"):
        load_records(before, "bank", stored)


def test_a_model_is_used_as_it_was_trained_whatever_the_configuration_says_now(tmp_path, console, caplog):
    """The training used --set. The file lacks these settings, and every section was edited afterwards."""
    write_companies(tmp_path)
    bank = pl.read_csv(tmp_path / "bank.csv")
    bank.with_columns(pl.col("job").replace("cook", "unknown")).write_csv(tmp_path / "bank.csv")
    run, path = tmp_path / "run", tmp_path / "run.toml"
    base = document(tmp_path, **LOOPBACK)
    path.write_text(tomli_w.dumps(base))
    used = [
        *("embedding.model=mlp", "embedding.hidden=[5]", "model.head=linear", "model.combine=concat"),
        *("model.width=3", "seed=7", "data.records=labelled", "network.encoding=float16"),
        *('parties.bank.source.missing=["unknown"]', "rule.name=sync", "model.metric=accuracy"),
    ]
    trained = read_config(path, used)
    launch(trained, run, console)
    before = batch_of(trained, run, tmp_path / "before.parquet", ["bank", "shop"])
    assert before.height == 400

    edited = document(
        tmp_path,
        **LOOPBACK,
        embedding={"model": "tabular"},
        model={"width": 9},
        partition={"clients": 5},
        data={"records": "common", "test_fraction": 0.4, "scale": "none"},
        optimiser={"step_size": 9.0},
        rule={"delay_bound": 3},
    )
    for now in (base, edited):
        path.write_text(tomli_w.dumps(now))
        caplog.clear()
        config = read_deployed(path, [], run, "server")
        assert ("model.width is 3" in caplog.text) == (now is edited)
        assert (config.model.metric, config.seed, config.network.encoding) == ("accuracy", 7, "float16")
        scores = batch_of(config, run, tmp_path / "after.parquet", ["bank", "shop"])
        assert scores.sort("id").equals(before.sort("id"))


def test_a_file_that_is_valid_only_with_the_sets_of_the_training_still_predicts(tmp_path, console):
    path, run = tmp_path / "run.toml", tmp_path / "run"
    path.write_text(
        '[data]\nname = "iris"\n[stop]\nupdates = 5\n[privacy]\nmu_max = 50.0\n[partition]\nclients = 3\n'
    )
    with pytest.raises(ConfigError, match=r"VFL-5107.*privacy\.mu_max"):
        read_config(path)
    noise = ["privacy.mode=frozen", "privacy.clip=1", "privacy.noise=4", "data.scale=none"]
    launch(read_config(path, [*noise, "model.head=linear", "privacy.delta=1e-3"]), run, console)
    config = read_deployed(path, [], run, "client-1")
    assert (config.privacy.kind, config.privacy.noise, config.privacy.mu_max) == ("frozen", 4.0, 50.0)
    assert config.privacy.delta == 1e-3
    assert read_deployed(path, ["privacy.mu_max=60"], run, "client-1").privacy.mu_max == 60


def test_privacy_that_the_model_was_trained_without_is_refused_and_a_manifest_chooses_no_files(
    tmp_path, console
):
    path, run = tmp_path / "run.toml", tmp_path / "run"
    path.write_text('[data]\nname = "iris"\n[stop]\nupdates = 5\n')
    launch(read_config(path), run, console)
    for asked in ("mode=frozen", "noise=4.0", "secure_sum=true"):
        with pytest.raises(RunFolderError, match=rf"privacy\.{asked.partition('=')[0]}"):
            read_deployed(path, [f"privacy.{asked}"], run, "client-1")
    folder = model_folder(run, "client-1")
    forged = read_document(folder)
    forged["settings"]["privacy"] |= {"ledger": "/elsewhere", "mu_max": "unlimited"}
    forged["settings"]["data"]["path"] = "/elsewhere"
    forged["settings"]["network"] = {"encoding": "float32", "address": "elsewhere:1"}
    write_document(folder, forged)
    config = read_deployed(path, [], run, "client-1")
    assert "elsewhere" not in config.to_toml()
    assert config.privacy.mu_max is None


def test_a_model_of_one_csv_scores_new_lines_of_another(tmp_path, console):
    """The encoder depends only on the training data, not on the other rows in the file."""
    rows = pl.DataFrame(
        {
            "x": [n * 7 % 40 / 4 for n in range(40)],
            "z": [["red", "green", "blue"][n % 3] for n in range(40)],
            "y": [n % 2 for n in range(40)],
        }
    )
    rows.write_csv(tmp_path / "all.csv")
    data = {"name": "csv", "path": str(tmp_path / "all.csv"), "label": "y"}
    common = {"stop": {"updates": 5, "patience": 0}, "schedule": {"batch_size": 8}, **LOOPBACK}
    config = from_document({"data": data, **common})
    launch(config, tmp_path / "run", console)
    trained = load_records(config, "client-2", open_model(tmp_path / "run", "client-2"))
    assert len(trained.chosen) == 40
    new = rows.head(5).select(pl.lit("new").alias("extra"), "z", "x")
    new.write_csv(tmp_path / "new.csv")
    later = from_document({"data": {**data, "path": str(tmp_path / "new.csv")}, **common})
    stored = open_model(tmp_path / "run", "client-2")
    found = load_records(later, "client-2", stored)
    assert torch.equal(found.features, trained.features[:5])
    assert found.ids.to_list() == ["0", "1", "2", "3", "4"]
    assert found.source != trained.source  # the same line numbers in another file denote other people
    scores = batch_of(later, tmp_path / "run", tmp_path / "scores.csv", ["client-1", "client-2"])
    assert scores["id"].cast(pl.String).to_list() == ["0", "1", "2", "3", "4"]
    new.drop("z").write_csv(tmp_path / "new.csv")
    with pytest.raises(DataError, match=r"VFL-2194.*z"):
        load_records(later, "client-2", stored)
