"""The conclusion of a run: calibrated probabilities, a threshold for a goal, and the scores."""

import io
import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import sklearn.metrics as sk
import torch
from rich.console import Console

from tests.run.test_prediction_driver import batch_of
from vafl.config import from_document
from vafl.errors import ConfigError
from vafl.models.decisions import DecisionSettings
from vafl.models.store import read_model
from vafl.run.assembly import build
from vafl.run.conclusion import conclude
from vafl.run.launch import launch
from vafl.run.plan import load_data

LOOPBACK = {"address": "127.0.0.1:0", "security": "plaintext", "join_timeout": 20.0}


def run_of(**sections):
    run = build(from_document({"schedule": {"batch_size": 4}, "stop": {"updates": 5}, **sections}))
    run.train()
    return run


def conclusion_of(run, **sections):
    config = replace(run.config, **sections)
    return conclude(config, run.task, run.data, run.evaluator.measured)


# --- scores ---


def test_several_classes_have_a_score_each():
    run = run_of(data={"name": "iris", "validation_fraction": 0.2})
    run.evaluator.test()
    table = conclusion_of(run).scores
    assert table.columns == ["part", "label", "score_0", "score_1", "score_2"]
    assert table["part"].to_list() == ["validation"] * 30 + ["test"] * 38
    assert table["label"].to_list() == [run.data.classes[label] for label in run.data.labels[82:].tolist()]
    assert table[:, 2:].to_numpy().sum(1) == pytest.approx(np.ones(68))
    expected = run.evaluator.measured["test"].double().softmax(1)
    assert torch.allclose(torch.from_numpy(table[30:, 2:].to_numpy()), expected)


def test_numbers_have_a_prediction():
    run = run_of(data={"name": "diabetes"}, optimiser={"step_size": 0.01})
    found = conclusion_of(run)
    assert found.scores.columns == ["part", "label", "score"]
    assert set(found.scores["part"]) == {"test"}
    assert found.scores["label"].to_list() == run.data.labels[run.data.test].tolist()
    assert found.scores["score"].to_list() == run.evaluator.measured["test"][:, 0].tolist()
    assert found.calibration is found.threshold is None


def test_rows_that_were_not_measured_have_no_scores():
    """For example, if no client answered for the test rows, or for any rows."""
    run = run_of(data={"name": "breast_cancer", "validation_fraction": 0.2})
    found = conclusion_of(run, decision=DecisionSettings(goal="recall", at_least=0.9))
    assert set(found.scores["part"]) == {"validation"}
    assert found.threshold["validation"]["recall"] >= 0.9
    assert found.threshold["test"] is None
    unknown = conclude(found_config := run.config, run.task, run.data, {})
    assert unknown.scores.is_empty()
    assert unknown.scores.columns == ["part", "label", "score"]
    assert unknown.threshold["threshold"] == 0.5
    asked = replace(found_config, decision=DecisionSettings(goal="recall", at_least=0.9))
    assert not conclude(asked, run.task, run.data, {}).threshold["reached"]


# --- calibration and threshold ---


def write_rare(path, rows=3000, seed=0):
    """A table with 4 % positive rows and four informative columns."""
    generator = np.random.default_rng(seed)
    columns = generator.normal(size=(rows, 4))
    chances = 1 / (1 + np.exp(5.2 - columns @ [2.0, 1.0, -1.0, 0.5]))
    fraud = np.where(generator.random(rows) < chances, "fraud", "fair")
    frame = pl.DataFrame(columns, schema=["a", "b", "c", "d"]).with_columns(kind=pl.Series(fraud))
    frame.write_csv(path)


def rare(folder, **sections):
    whole = {
        "data": {
            "name": "csv",
            "path": str(folder / "rare.csv"),
            "label": "kind",
            "validation_fraction": 0.3,
        },
        "schedule": {"batch_size": 64},
        "stop": {"updates": 300, "patience": 50},
        "evaluation": {"every": 50},
        "network": LOOPBACK,
    }
    for name, values in sections.items():
        whole[name] = {**whole.get(name, {}), **values}
    return from_document(whole)


@pytest.fixture(scope="module")
def balanced(tmp_path_factory):
    """A run with balanced class weights and default settings: its configuration, folder and summary."""
    folder = tmp_path_factory.mktemp("rare")
    write_rare(folder / "rare.csv")
    config = rare(folder, model={"class_weight": "balanced"})
    launch(config, folder / "run", Console(file=io.StringIO()))
    return config, folder / "run", json.loads((folder / "run" / "summary.json").read_text())


def test_weights_distort_probabilities_and_calibration_repairs_them(balanced):
    *_, summary = balanced
    calibration = summary["calibration"]
    assert calibration["method"] == "platt"
    for part in ("validation", "test"):
        before, after = calibration["before"][part], calibration["after"][part]
        assert after["log_loss"] < 0.5 * before["log_loss"]
        assert after["brier"] < 0.5 * before["brier"]
        assert after.items() <= summary["kept"][part].items()
        assert after["log_loss"] < summary["baselines"]["trivial"][part]["log_loss"]
    auc = summary["kept"]["validation"]["auc"]
    assert summary["metric"] == {"name": "auc", "value": auc}


def test_evaluations_undo_the_weights_so_that_the_right_models_are_kept(balanced):
    """By the unadjusted outputs, models that favour the frequent class too much would look best."""
    _, run, summary = balanced
    points = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    best = next(point for point in points if point["updates"] == summary["kept"]["updates"])
    losses = [point["metrics"]["log_loss"] for point in points]
    assert best["metrics"]["log_loss"] == min(losses)
    before, after = (summary["calibration"][when]["validation"]["log_loss"] for when in ("before", "after"))
    assert after <= best["metrics"]["log_loss"] < 0.7 * before
    assert best["metrics"]["auc"] == pytest.approx(summary["metric"]["value"])


def test_the_decision_is_reported_as_it_turns_out(balanced):
    _, run, summary = balanced
    decision, scores = summary["decision"], pl.read_parquet(run / "scores.parquet")
    assert (decision["goal"], decision["positive"], decision["reached"]) == ("f1", "fraud", True)
    assert 0.05 < decision["threshold"] < 0.5, "few rows of a rare class are likelier than not"
    for part in ("validation", "test"):
        own = scores.filter(pl.col("part") == part)
        known, chosen = own["label"] == "fraud", own["score"] >= decision["threshold"]
        assert decision[part]["confusion"] == sk.confusion_matrix(known, chosen).tolist()
        assert decision[part]["f1"] == pytest.approx(sk.f1_score(known, chosen))
        assert sk.log_loss(known, own["score"]) == pytest.approx(summary["kept"][part]["log_loss"])
    assert decision["test"]["f1"] > sk.f1_score(known, own["score"] >= 0.5)


def test_predictions_are_calibrated_and_by_the_threshold(balanced, tmp_path):
    """Score the test rows again over the network, with only the model folders."""
    config, run, summary = balanced
    found, data = batch_of(config, run, tmp_path / "again.parquet"), load_data(config)
    records = pl.DataFrame({"id": data.record_numbers[data.test]}).cast(pl.String)
    found = records.join(found, on="id", how="left", maintain_order="left")
    scores = pl.read_parquet(run / "scores.parquet").filter(pl.col("part") == "test")
    assert found["p(fraud)"].to_list() == pytest.approx(scores["score"].to_list(), abs=1e-6)
    flagged = found["p(fraud)"] >= summary["decision"]["threshold"]
    assert (found["prediction"] == "fraud").to_list() == flagged.to_list()
    assert flagged.sum() == sum(row[1] for row in summary["decision"]["test"]["confusion"])


def test_a_head_keeps_its_decision_and_a_client_has_none(balanced):
    _, run, summary = balanced
    decision = read_model(run / "models" / "server").manifest.decision
    assert (decision.calibration.method, decision.threshold) == ("platt", summary["decision"]["threshold"])
    manifest = (run / "models" / "client-1" / "manifest.toml").read_text()
    assert "decision" not in manifest
    assert "class_weight" not in manifest


def test_without_weights_probabilities_stay_as_they_are(balanced):
    config, *_ = balanced
    plain = replace(config, model=replace(config.model, class_weight="none"))
    run = build(plain)
    run.train()
    found = conclude(plain, run.task, run.data, run.evaluator.measured)
    assert found.calibration is None
    isotonic = replace(plain, model=replace(plain.model, calibration="isotonic"))
    figures = conclude(isotonic, run.task, run.data, run.evaluator.measured).calibration
    assert figures["after"]["validation"]["log_loss"] <= figures["before"]["validation"]["log_loss"]
    strict = replace(plain, decision=DecisionSettings(goal="precision", at_least=1.0))
    decision = conclude(strict, run.task, run.data, run.evaluator.measured).threshold
    assert decision["reached"] == (decision["validation"]["precision"] == 1.0)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"model": {"calibration": "platt"}, "data": {"validation_fraction": 0.0}},
            "data.validation_fraction",
        ),
        ({"decision": {"goal": "f1"}, "data": {"validation_fraction": 0.0}}, "data.validation_fraction"),
        ({"decision": {"goal": "f1"}, "data": {"name": "iris"}}, r"VFL-3005.*3 classes"),
        ({"decision": {"goal": "f1"}, "data": {"name": "diabetes"}}, r"VFL-3005.*numbers"),
        ({"model": {"calibration": "isotonic"}, "data": {"name": "iris"}}, r'VFL-3036.*3 classes.*"platt"'),
        ({"model": {"calibration": "platt"}, "data": {"name": "diabetes"}}, r'VFL-3036.*numbers.*"none"'),
    ],
)
def test_what_the_labels_do_not_allow_is_refused_before_training(sections, said):
    data = {"name": "breast_cancer", "validation_fraction": 0.2, **sections["data"]}
    with pytest.raises(ConfigError, match=said):
        build(from_document({**sections, "data": data}))


def test_without_validation_rows_the_likelier_class_is_named():
    run = run_of(data={"name": "breast_cancer"}, model={"class_weight": "balanced"})
    found = conclusion_of(run)
    assert found.calibration["method"] == "shift"
    assert found.figures["test"] == run.evaluator()
    as_it_is = conclusion_of(run, model=replace(run.config.model, calibration="none"))
    assert as_it_is.calibration is None
    assert (found.threshold["goal"], found.threshold["threshold"]) == ("accuracy", 0.5)
    assert found.threshold["validation"] is None
    assert found.threshold["test"]["rows"] == 142
