"""The report as a document: its content, its omissions, and that it is safe to open."""

import json
import re
import stat
from html.parser import HTMLParser

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import roc_auc_score

from tests.observe.report.folders import EVIL, IMPORTANCE, written
from vafl.errors import RunFolderError
from vafl.observe.compare import figures_table
from vafl.observe.record import read_run
from vafl.observe.report import write_report
from vafl.observe.report.words import share

_VOID = {"meta", "br"}


class Page(HTMLParser):
    """Collects the elements and the text of a page, and checks that elements are nested correctly."""

    def __init__(self, document):
        super().__init__()
        self.open, self.tags, self.attributes, self.ids, self.texts = [], [], [], [], []
        self.feed(document)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def read(folder, accounts=()):
    return Page(write_report(folder, accounts).read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", ["two", "several", "numbers"])
def test_the_page_needs_nothing_else_and_runs_nothing(tmp_path, kind):
    folder = written(tmp_path / "run", kind)
    (folder / "importance.json").write_text(json.dumps(IMPORTANCE))
    page = read(folder)
    assert not {"script", "link", "img", "iframe", "object", "form", "input"} & set(page.tags)
    assert not {"src", "href", "style"} & set(page.attributes)  # the policy forbids style attributes
    assert not [name for name in page.attributes if name.startswith("on")]
    assert len(page.ids) == len(set(page.ids))
    assert page.tags.count("svg") >= 3
    assert page.tags.count("svg") == page.tags.count("desc")
    document = (folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|url\(|@import", document)
    assert "default-src 'none'" in document.replace("&#x27;", "'")
    assert "nan" not in document.lower().replace("finance", "")


def test_only_its_owner_can_read_it(tmp_path):
    path = write_report(written(tmp_path / "run"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_names_from_files_are_text(tmp_path):
    folder = written(tmp_path / "run", classes=["no", EVIL], columns={EVIL: 3}, traffic={}, ended=EVIL)
    (folder / "config.toml").write_text(f'[data]\nname = "csv"\nlabel = "{EVIL}"\n')
    influence = {"loss_increase": 0.1, "sd": 0.0, "headline_drop": 0.1}
    importance = {
        "metric": "auc",
        "rows": 9,
        "parties": {EVIL: influence},
        "features": {EVIL: {EVIL: influence}},
    }
    (folder / "importance.json").write_text(json.dumps(importance))
    page = read(folder)
    assert "script" not in page.tags
    assert EVIL in page.text


def test_two_classes_the_figures_are_those_of_the_test_rows(tmp_path):
    folder = written(tmp_path / "run")
    (folder / "importance.json").write_text(json.dumps(IMPORTANCE))
    text = read(folder).text
    test = pl.read_parquet(folder / "scores.parquet").filter(pl.col("part") == "test")
    area = roc_auc_score(test["label"] == "yes", test["score"])
    assert f"ROC curve, area {area:.3f}" in text
    flagged = test.filter(pl.col("score") >= 0.5)
    for part, label in ((flagged, "yes"), (flagged, "no")):
        assert f" {part.filter(pl.col('label') == label).height} " in text
    assert "Predicting repaid" in text
    assert re.search(r"95% interval 0\.\d{3} to 0\.\d{3}", text)
    for words in ("3,000", "100", "300", "not shared", "1.5 MB", "2 MB", "12.5 s", "0.123", "income"):
        assert words in text, words


def test_the_metric_f1_is_told_from_the_f1_of_the_decision(tmp_path):
    folder = written(tmp_path / "run")
    assert "F1 (at 0.5)" in read(folder).text
    shown = figures_table(read_run(folder))
    assert "f1 (at 0.5)" in list(shown.columns[0].cells)


def test_the_threshold_is_the_one_that_the_run_chose(tmp_path):
    decision = {"threshold": 0.31, "goal": "precision", "at_least": 0.925, "reached": False}
    folder = written(tmp_path / "run", decision=decision, calibration={"method": "platt"})
    text = read(folder).text
    assert "precision of at least 92.5%" in text
    assert "goal was not reached" in text
    assert "Platt" in text
    assert "at least 0.31" in text
    test = pl.read_parquet(folder / "scores.parquet").filter(pl.col("part") == "test")
    assert f" {test.filter(pl.col('score') >= 0.31, pl.col('label') == 'yes').height} " in text


def test_several_classes_have_a_line_each_and_many_share_the_last_of_the_matrix(tmp_path):
    text = read(written(tmp_path / "few", "several")).text
    for name in ("red", "green", "blue"):
        assert f"actually {name}" in text
    many = [f"kind-{number}" for number in range(30)]
    text = read(written(tmp_path / "many", "several", rows=2000, classes=many)).text
    assert "18 others" in text
    assert all(name in text for name in many)


def test_merging_small_classes_in_the_matrix_makes_no_mistake_right(tmp_path):
    many = [f"kind-{number}" for number in range(30)]
    folder = written(tmp_path / "run", "several", rows=2000, classes=many)
    test = pl.read_parquet(folder / "scores.parquet").filter(pl.col("part") == "test")
    predicted = test.select(pl.exclude("part", "label")).to_numpy().argmax(axis=1)
    right = sum(many[place] == label for place, label in zip(predicted, test["label"], strict=True))
    assert f"For {share(right / 2000)} of the 2,000 test rows" in read(folder).text


def test_numbers_have_errors_by_tenth(tmp_path):
    page = read(written(tmp_path / "run", "numbers"))
    assert "density-title" in page.ids
    assert "error-tenths-title" in page.ids


@pytest.mark.parametrize("kind", ["two", "several", "numbers"])
@pytest.mark.parametrize("rows", [1, 2, 11])
def test_few_rows_make_a_report_too(tmp_path, kind, rows):
    assert "How good the model is" in read(written(tmp_path / "run", kind, rows=rows)).text


def test_what_is_missing_is_left_out_with_the_way_to_get_it(tmp_path):
    text = read(written(tmp_path / "run", scored=False)).text
    assert "scores.parquet" in text
    assert "vafl importance" in text
    assert not re.search(r"interval 0\.\d+ to", text)
    assert "0.800" in text  # the headline is in the summary


def test_labels_that_leak_are_told_and_protected_ones_too(tmp_path):
    assert "labels were not protected" in read(written(tmp_path / "open")).text
    protected = {"epsilon": 1.5, "kept_with_probability": 0.8176}
    text = read(written(tmp_path / "drawn", labels=protected)).text
    assert "not protected" not in text
    assert "81.8%" in text
    assert "epsilon 1.5" in text


def test_privacy_spent_is_told_where_the_ledgers_are(tmp_path):
    private = {"mode": "dp_train", "secure_sum": False}
    folder = written(tmp_path / "run", privacy=private)
    assert "vafl privacy" in read(folder).text
    account = {"party": "bank", "records": 5000, "mu_any_record": 0.42, "epsilon_any_record": float("inf")}
    text = read(folder, [account | {"delta": 1e-5, "mu_max": None}]).text
    for words in ("5,000", "0.42", "no limit", "none set", "delta 1e-05"):
        assert words in text


def test_validation_figures_are_flagged_as_such(tmp_path):
    metrics = {"auc": 0.8}
    kept = {"updates": 1, "selected_by": None, "validation": metrics, "test": None}
    folder = written(tmp_path / "run", kept=kept, scored=False)
    assert "validation rows" in read(folder).text


def test_baselines_are_compared_by_name(tmp_path):
    baselines = {"trivial": {"test": {"auc": 0.5}}, "label holder alone": {"test": {"auc": 0.72}}}
    text = read(written(tmp_path / "run", baselines=baselines)).text
    assert "0.300 better" in text
    assert "0.080 better" in text


@pytest.mark.parametrize("kind", ["two", "several", "numbers"])
def test_the_gain_over_the_label_holder_alone_has_an_interval(tmp_path, kind):
    baselines = {"label holder alone": {"test": {"auc": 0.7, "accuracy": 0.5, "r2": 0.2}}}
    folder = written(tmp_path / "run", kind, baselines=baselines)
    assert "95% interval of this gain" not in read(folder).text
    scores = pl.read_parquet(folder / "scores.parquet")
    names = [name for name in scores.columns if name.startswith("score")]
    beside = scores.with_columns(pl.col(name).shuffle(seed=1).alias(f"alone_{name}") for name in names)
    beside.write_parquet(folder / "scores.parquet")
    text = read(folder).text
    assert re.search(r"95% interval of this gain is [\d.]+( percentage points)? to [\d.]+", text)
    assert "may be due to chance" not in text
    nothing = scores.with_columns(pl.lit(None, pl.Float64).alias(f"alone_{name}") for name in names)
    nothing.write_parquet(folder / "scores.parquet")
    assert "95% interval of this gain" not in read(folder).text


def test_a_gain_whose_interval_includes_0_is_said_to_be_uncertain(tmp_path):
    folder = written(tmp_path / "run", baselines={"label holder alone": {"test": {"auc": 0.8}}})
    scores = pl.read_parquet(folder / "scores.parquet")
    noise = pl.Series(np.random.default_rng(0).normal(scale=0.05, size=scores.height))
    scores.with_columns(alone_score=pl.col("score") + noise).write_parquet(folder / "scores.parquet")
    assert "It includes 0" in read(folder).text


@pytest.mark.parametrize("content", [b"", b"PAR1 no"])
def test_damaged_scores_are_refused_by_name_and_the_old_report_stays(tmp_path, content):
    folder = written(tmp_path / "run")
    before = write_report(folder).read_bytes()
    (folder / "scores.parquet").write_bytes(content)
    with pytest.raises(RunFolderError, match="VFL-8031"):
        write_report(folder)
    assert (folder / "report.html").read_bytes() == before


def test_labels_of_no_class_and_damaged_importance_are_refused(tmp_path):
    with pytest.raises(RunFolderError, match="VFL-8031"):
        write_report(written(tmp_path / "classes", classes=["no", "yes", "maybe"]))
    folder = written(tmp_path / "importance")
    (folder / "importance.json").write_text('{"rows": 3}')
    with pytest.raises(RunFolderError, match="VFL-8031"):
        write_report(folder)


def test_only_parties_that_uploaded_are_credited_and_the_others_are_named(tmp_path):
    columns = {"bank": 5, "shop": 4}
    absent = {"activations": {"bank": 300, "shop": 0}, "unanswered": {"shop": "default", "bank": "last"}}
    folder = written(tmp_path / "run", columns=columns, **absent)
    text = read(folder).text
    assert "bank did not answer" in text
    assert "shop did not answer" not in text  # one warning is enough
    assert "from 5 columns of bank, " in text
    assert "Never uploaded: shop." in text
    assert 'class="notice bad"' in (folder / "report.html").read_text(encoding="utf-8")
    assert "Never uploaded" not in read(written(tmp_path / "all", columns=columns)).text
    nobody = read(written(tmp_path / "none", columns=columns, activations={"bank": 0, "shop": 0})).text
    assert "Never uploaded: bank and shop." in nobody


def test_a_party_that_came_after_the_start_is_named(tmp_path):
    text = read(written(tmp_path / "run", missing_at_start=["shop"])).text
    assert "Training began without shop." in text
