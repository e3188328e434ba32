"""Views of runs that are active, wait, have ended or have crashed."""

import json
import math
import time
from contextlib import suppress
from dataclasses import asdict

import pytest

from tests.observe.dashboard.folders import BASELINES, written
from vafl.errors import RunFolderError
from vafl.observe.dashboard.exporter import as_prometheus
from vafl.observe.dashboard.views import MOST_RUNS, look, view
from vafl.observe.evaluation import Evaluation


@pytest.mark.parametrize(
    ("status", "summary", "state", "why"),
    [
        ({"share": 0.4}, None, "running", ""),
        ({"waiting": "bank, shop"}, None, "waiting", "bank, shop"),
        ({"at": time.time() - 60}, None, "silent", "stopped"),
        ({}, None, "silent", "stopped"),
        ({"share": 1.0}, {"ended": "80 updates were made"}, "ended", "80 updates were made"),
        ({"share": 0.5}, {"ended": "it was told to", "interrupted": True}, "interrupted", "it was told to"),
    ],
)
def test_the_state_of_a_run_follows_from_its_folder(tmp_path, status, summary, state, why):
    seen = view(written(tmp_path / "run", summary=summary, **status), "run")
    assert seen.state == state
    assert why in seen.why
    assert len(seen.evaluations) == 3


def test_a_line_that_is_being_written_and_a_status_of_another_version_are_left_out(tmp_path):
    run = written(tmp_path / "run", share=0.4)
    with (run / "history.jsonl").open("a") as file:
        file.write('{"seconds": 9')
    (run / "status.json").write_text('{"of": "another version"}')
    seen = view(run, "run")
    assert [point.updates for point in seen.evaluations] == [0, 40, 80]
    assert seen.status is None


@pytest.mark.parametrize(
    "content",
    [
        '{"share": NaN}',
        '{"at": "now"}',
        '{"at": 1e999}',
        '{"metric": 5}',
        '{"clients": [{"name": null, "activations": 0, "bytes_up": 0, "bytes_down": 0}]}',
        "[" * 100_000,
    ],
)
def test_of_a_status_that_no_run_wrote_nothing_is_shown_and_the_others_are(tmp_path, content):
    run = written(tmp_path / "run", share=0.4)
    with suppress(ValueError, RecursionError):
        content = json.dumps(json.loads((run / "status.json").read_bytes()) | json.loads(content))
    (run / "status.json").write_text(content)
    views, _ = look([tmp_path])
    assert views[0].status is None
    assert "vafl_metric" in as_prometheus(views)
    json.dumps([seen.as_json() for seen in views], allow_nan=False)


KEPT = {"validation": {"auc": 0.9, "log_loss": 0.3}, "test": {"auc": None, "log_loss": 0.4}}


def test_a_run_that_has_ended_shows_the_figures_of_the_models_it_has_kept(tmp_path):
    summary = {"metric": {"name": "auc"}, "watched": "validation", "kept": KEPT, "baselines": BASELINES}
    seen = view(written(tmp_path / "run", summary=summary), "run")
    assert (seen.metric, seen.rows, seen.kept, seen.baselines) == ("auc", "validation", KEPT, BASELINES)
    text = as_prometheus([seen])
    assert 'vafl_kept_metric{run="run",rows="validation",name="auc"} 0.9' in text
    assert 'vafl_kept_metric{run="run",rows="test",name="log_loss"} 0.4' in text
    assert 'rows="test",name="auc"' not in text  # undefined metrics are left out
    going_on = view(written(tmp_path / "other", share=0.4), "other")
    assert (going_on.metric, going_on.rows, going_on.kept) == ("accuracy", "validation", {})
    assert going_on.baselines == BASELINES


@pytest.mark.parametrize(
    "wrong",
    [
        {"kept": 5},
        {"kept": {"validation": None, "test": {"auc": "<b>"}}},
        {"kept": {"validation": None, "test": {"auc": math.nan}}},
        {"baselines": {"trivial": []}},
        {"baselines": {"trivial": {"test": {"auc": math.inf}}}},
        {"metric": 5},
    ],
)
def test_figures_that_no_run_wrote_are_left_out(tmp_path, wrong):
    summary = {"metric": {"name": "auc"}, "watched": "test", "kept": KEPT, "baselines": BASELINES, **wrong}
    run = written(tmp_path / "run", summary=summary)
    with (run / "history.jsonl").open("a") as file:
        file.write(
            json.dumps({**asdict(Evaluation(9.0, 9, 0, 0, None, 0.5)), "metrics": {"auc": "<b>"}}) + "\n"
        )
        file.write(json.dumps({**asdict(Evaluation(9.0, 9, 0, 0, None, 0.5)), "metrics": 5}) + "\n")
    seen = view(run, "run")
    json.dumps(seen.as_json(), allow_nan=False)
    assert "<b>" not in as_prometheus([seen])
    assert len(seen.evaluations) == 4


def test_runs_are_found_in_folders_of_folders_the_newest_first(tmp_path):
    written(tmp_path / "one", share=0.1, at=time.time())
    written(tmp_path / "more" / "one")
    written(tmp_path / "too" / "far" / "down" / "one")
    (tmp_path / "nothing").mkdir()
    views, others = look([tmp_path, tmp_path / "more"])
    assert sorted(each.name for each in views) == ["more/one", f"{tmp_path.name}/one"]
    assert others == 0


def test_of_many_runs_those_that_changed_last_are_shown(tmp_path):
    for number in range(MOST_RUNS + 2):
        written(tmp_path / str(number), points=1)
    views, others = look([tmp_path])
    assert (len(views), others) == (MOST_RUNS, 2)


def test_what_is_not_there_cannot_be_watched(tmp_path):
    with pytest.raises(RunFolderError, match="VFL-8011"):
        look([tmp_path / "missing"])


def test_a_page_gets_no_more_points_than_it_can_show_and_always_the_last(tmp_path):
    facts = view(written(tmp_path / "run", points=1801), "run").as_json()
    assert len(facts["evaluations"]) <= 400
    assert facts["evaluations"][-1]["updates"] == 40 * 1800


def test_json_has_no_word_for_what_is_not_a_number(tmp_path):
    run = written(tmp_path / "run", points=1, summary={"ended": ""})
    with (run / "history.jsonl").open("a") as file:
        file.write(json.dumps(asdict(Evaluation(1.0, 2, 0, 0, math.nan, math.inf))) + "\n")
    facts = view(run, "run").as_json()
    json.dumps(facts, allow_nan=False)
    assert facts["evaluations"][-1]["metric"] is None
