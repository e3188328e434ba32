"""Models of every kind of source, used on the records of people who came later."""

import io
import json
import shutil

import pytest
import torch
from rich.console import Console

from tests.kinds import KINDS, ids_of, kinds_configuration, write_kinds
from tests.run.test_prediction_driver import batch_of
from vafl.commands.inspect import table_of
from vafl.models.store import read_model
from vafl.observe.report.inputs import read_inputs
from vafl.run.assembly import build
from vafl.run.launch import launch, report_run
from vafl.run.model_store import feature_groups, model_folder, open_model, rebuild
from vafl.run.plan import encoder_of
from vafl.run.predict import Deployed

LOOPBACK = {"network": {"address": "127.0.0.1:0", "security": "plaintext", "join_timeout": 20.0}}


@pytest.fixture(scope="module", params=["labelled", "common"])
def trained(request, tmp_path_factory):
    """Return a configuration and the folder of its run."""
    folder = tmp_path_factory.mktemp("kinds")
    config = kinds_configuration(folder, data={"records": request.param}, **LOOPBACK)
    launch(config, folder / "run", Console(file=io.StringIO()))
    return config, folder / "run"


@pytest.mark.parametrize("party", KINDS)
def test_a_model_keeps_its_encoder(trained, party):
    config, run = trained
    fitted = {each.name: each.encoder for each in build(config).data.parties}
    stored = open_model(run, party)
    assert encoder_of(stored) == fitted[party]
    embeddings = rebuild(stored)(Deployed.load(config, party, run).records.features)
    assert embeddings.shape[1] == 4
    assert torch.isfinite(embeddings).all()


def test_people_who_came_later_are_scored(trained, tmp_path):
    _, run = trained
    records = trained[0].data.records
    later = write_kinds(tmp_path, people=60, seed=1)
    config = kinds_configuration(tmp_path, sources=later, data={"records": records}, **LOOPBACK)
    scores = batch_of(config, run, tmp_path / "scores.parquet", KINDS)
    everyone = ids_of(tmp_path)
    assert set(scores["id"]) <= set(everyone)
    assert (len(scores) == len(everyone)) == (records == "labelled")
    assert scores["missing"].eq("").all()


def test_only_columns_and_numbers_of_vectors_have_groups_of_their_own(trained):
    _, run = trained
    names = {kind: list(feature_groups(open_model(run, kind), {}, each=True)) for kind in KINDS}
    assert names["table"] == ["number", "word"]
    assert names["series"] == names["images"] == []
    assert names["arrays"] == names["python"] == ["feature 1", "feature 2"]


def test_inspect_shows_the_columns_or_the_kind(trained):
    _, run = trained
    models = [read_model(model_folder(run, kind)) for kind in KINDS]
    shown = io.StringIO()
    Console(file=shown, width=200).print(table_of(models))
    (line,) = [line for line in shown.getvalue().splitlines() if "raw columns" in line]
    for expected in ("number, word", "a, b", "none (images)", "none (arrays)", "none (python)"):
        assert expected in line


def test_a_report_counts_columns_that_the_server_did_not_know(trained, tmp_path):
    """In separate processes, only the manifests of the clients' models tell them."""
    config, run = trained
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "summary.json"
    summary = json.loads(path.read_text())
    assert summary["columns"] == {"table": 2, "series": 9, "images": 24, "arrays": 2, "python": 2}
    path.write_text(json.dumps({**summary, "columns": dict.fromkeys(KINDS)}))
    assert read_inputs(tmp_path / "run").columns == summary["columns"]
    assert report_run(config, tmp_path / "run").is_file()
