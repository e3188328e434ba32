"""Reports of real runs on made-up tables."""

import json
import re

import numpy as np
import polars as pl
import pytest

from tests.observe.report.test_report import Page
from vafl.cli import main

CONFIG = """
[data]
name = "csv"
path = "people.csv"
label = "outcome"
task = "{task}"
test_fraction = 0.25
validation_fraction = 0.2
[partition.groups]
bank = ["bank_*"]
shop = ["shop_*"]
[schedule]
batch_size = 32
[stop]
updates = 60
"""


def make_table(folder, kind, rows=400):
    """Write people.csv, whose labels depend on both parties' columns."""
    generator = np.random.default_rng(0)
    columns = {f"{party}_{n}": generator.normal(size=rows) for party in ("bank", "shop") for n in range(2)}
    score = columns["bank_0"] - columns["shop_0"]
    labels = {
        "two": np.where(score > 0.5, "yes", "no"),
        "several": np.array(["low", "middle", "high"])[np.digitize(score, (-0.7, 0.7))],
        "numbers": np.round(score, 6),
    }
    pl.DataFrame({**columns, "outcome": labels[kind]}).write_csv(folder / "people.csv")
    task = "regression" if kind == "numbers" else "classification"
    (folder / "run.toml").write_text(CONFIG.format(task=task))


def page_of(run):
    return Page((run / "report.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("kind", "drawn"),
    [
        ("two", {"roc", "precision-recall", "gains", "lift", "calibration"}),
        ("several", {"roc"}),
        ("numbers", {"density", "errors", "means"}),
    ],
)
def test_every_run_ends_in_a_report_of_its_test_rows(tmp_path, capsys, kind, drawn):
    make_table(tmp_path, kind)
    run = tmp_path / "run"
    assert main(["run", str(tmp_path / "run.toml"), "--out", str(run)]) == 0
    assert f"report: {run / 'report.html'}" in capsys.readouterr().out
    page = page_of(run)
    assert {f"{name}-title" for name in drawn} <= set(page.ids)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["rows"] == {"train": 220, "validation": 80, "test": 100}
    assert summary["columns"] == {"bank": 2, "shop": 2}
    sent = sum(own["bytes_up"] for own in summary["traffic"].values())
    assert sent == summary["bytes_up"]
    if kind == "two":
        for counts in summary["decision"]["test"]["confusion"]:
            assert re.search(r"actually \w+ {} [\d.]+% {} ".format(*counts), page.text)
    headline = summary["kept"]["test"][summary["metric"]["name"]]
    low, high = map(float, re.search(r"95% interval (\S+?)%? to (\S+?)%? ", page.text).groups())
    scale = 100 if summary["metric"]["name"] == "accuracy" else 1
    assert low - 0.1 <= scale * headline <= high + 0.1


def test_a_report_is_written_again_with_what_has_come_since(tmp_path, capsys):
    make_table(tmp_path, "two")
    for name in ("one", "other"):
        assert main(["run", str(tmp_path / "run.toml"), "--out", str(tmp_path / name)]) == 0
    one = str(tmp_path / "one")
    assert main(["importance", str(tmp_path / "run.toml"), "--model", one]) == 0
    found = json.loads((tmp_path / "one" / "importance.json").read_text())
    reached = json.loads((tmp_path / "one" / "summary.json").read_text())["kept"]["test"]
    assert found["baseline"]["auc"] == pytest.approx(reached["auc"], abs=1e-3)  # the same rows and labels
    (tmp_path / "other" / "scores.parquet").unlink()
    capsys.readouterr()
    assert main(["report", str(tmp_path / "one"), str(tmp_path / "other")]) == 0
    assert capsys.readouterr().out.count("report.html") == 2
    page = page_of(tmp_path / "one")
    assert {"party-importance-title", "column-importance-title"} <= set(page.ids)
    assert f"{max(own['headline_drop'] for own in found['parties'].values()):.3f} worse" in page.text
    assert "scores.parquet" in page_of(tmp_path / "other").text
    assert main(["run", str(tmp_path / "run.toml"), "--out", one, "--overwrite"]) == 0


def test_a_folder_of_no_finished_run_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 5
    assert "finished run" in capsys.readouterr().err


def test_private_runs_tell_what_they_spent(tmp_path):
    make_table(tmp_path, "two")
    private = {"clip": 1.0, "noise": 5.0, "gradient_clip": 1.0, "gradient_noise": 5.0, "mu_max": 50.0}
    settings = [f"privacy.{name}={value}" for name, value in private.items()]
    changes = [*settings, "data.scale=none", "labels.epsilon=2.0"]
    options = [word for change in changes for word in ("--set", change)]
    assert main(["run", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run"), *options]) == 0
    text = page_of(tmp_path / "run").text
    assert re.search(r"bank 400 [\d.]+ [\d.]+ 50 ", text)
    assert "not protected" not in text
    assert "epsilon 2" in text


def test_pooled_runs_have_a_report_without_traffic(tmp_path):
    make_table(tmp_path, "two")
    pooled = ["--set", "rule.name=centralised"]
    assert main(["run", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run"), *pooled]) == 0
    text = page_of(tmp_path / "run").text
    assert "in one place" in text
    assert " MB" not in text
