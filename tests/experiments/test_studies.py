"""The harness: step sizes chosen on held-out rows, runs saved and not repeated, one report."""

import json

import numpy as np
import pytest
from experiments.__main__ import main
from experiments.drawings import draw
from experiments.harness import Found, best_step_size, by_step_size, level_of, mean_end
from experiments.measures import measure
from experiments.study import FOLDER, names, read_study
from experiments.timed_runs import Job, Timed, crossing, hold_out, train, was_made

from vafl.data.split import Parts, Split
from vafl.observe.evaluation import Evaluation
from vafl.observe.record import RecordedRun

pytestmark = pytest.mark.no_cover  # the parts of vafl that they use have other tests


def run(step_size, metrics, seed=0, diverged=False):
    points = [Evaluation(2.0 * i, i, 10**6 * i, 0, 0.5, value) for i, value in enumerate(metrics)]
    recorded = RecordedRun("run", None, {"metric": {"name": "accuracy"}}, points)
    return Timed(recorded, step_size, seed, np.arange(len(points)), diverged, 1.0, 2, 0.0)


def test_a_study_makes_its_runs_once_and_reports_them(tmp_path, mnist):
    arguments = ["mnist", "--quick", "--data", str(mnist), "--out", str(tmp_path)]
    assert main(arguments) == 0  # on so few rows, targets mean nothing
    study = read_study("mnist")
    found = json.loads((tmp_path / "results.json").read_text())["experiments"]["mnist"]
    assert list(found["variants"]) == [variant.name for variant in study.variants]
    for row in found["variants"].values():
        assert 0.5 < row["low"] <= row["metric"] <= row["high"] <= 1
    assert found["variants"]["async"]["seconds"] < found["variants"]["sync"]["seconds"]
    assert found["variants"]["sync"]["longest_delay"] == 0
    assert found["centralised"] == found["variants"]["centralised"]["metric"]
    assert {"claim", "measured", "target", "holds"} == set(found["verdicts"][0])
    page = (tmp_path / "index.html").read_text()
    assert "data:image/png;base64," in page
    assert "python -m experiments mnist" in page
    assert (tmp_path / "figures" / "mnist.svg").is_file()
    folders = sorted((tmp_path / "runs").rglob("history.jsonl"))
    made = {path: path.stat().st_mtime_ns for path in folders}
    lost = next(path for path in folders if path.parent.parent.name == "sync-private")
    (lost.parent / "summary.json").unlink()  # as if it had been interrupted
    main([*arguments, "--report"])
    found = json.loads((tmp_path / "results.json").read_text())["experiments"]["mnist"]
    assert {variant.name for variant in study.variants} - found["variants"].keys() == {"sync, private"}
    main(arguments)
    again = [path for path in folders if path.stat().st_mtime_ns != made[path]]
    assert again == [lost]


def test_a_run_on_other_rows_is_another_run(tmp_path, mnist):
    first, other = (
        Job(FOLDER / "mnist.toml", ("stop.updates=1",), str(mnist), tmp_path / "run", share, 1.0, 0)
        for share in (0.25, 0.5)
    )
    train(first)
    assert was_made(first)
    assert not was_made(other)
    config = first.out / "config.toml"
    config.write_text(config.read_text().replace("threads = 1\n", ""))  # as before there was such a setting
    assert was_made(first)
    assert train(other).run.summary["rows"] == 600


def test_every_study_can_be_read(tmp_path):
    for name in names():
        for study in (read_study(name), read_study(name).scaled_down()):
            for variant in study.variants:
                assert not variant.like or study.has(variant.like)
                changes = (*variant.set, *(study.quick if study.is_quick else ()))
                job = Job(FOLDER / f"{name}.toml", changes, "", tmp_path, 0.0, study.step_sizes[0], 0)
                assert job.config().optimiser.step_size == study.step_sizes[0]


@pytest.mark.parametrize("end", [0.2, 0.95])
def test_a_sweep_is_drawn_whether_its_level_is_reached_or_not(end, tmp_path):
    study = read_study("delay_bound")
    found = [Found(variant, [], [run(2.0, [0.1, end])]) for variant in study.variants]
    draw(measure(study, found), tmp_path / "sweep")
    assert (tmp_path / "sweep.png").is_file()


def test_missing_data_are_named(tmp_path, capsys):
    assert main(["mnist", "--quick", "--out", str(tmp_path), "--data", str(tmp_path)]) == 3
    assert "train-images" in capsys.readouterr().err


def test_the_fastest_step_size_of_those_that_end_high():
    slow, fast = run(1.0, [0.1, 0.8, 0.9, 0.95]), run(2.0, [0.1, 0.91, 0.92, 0.949])
    low, wild = run(3.0, [0.1, 0.92, 0.9, 0.9]), run(4.0, [0.9], diverged=True)
    assert best_step_size([slow, fast, low, wild], 0.9, as_good=0.0025) == 2.0
    assert best_step_size([slow, fast, low, wild], 0.99, as_good=0.0025) == 1.0
    assert best_step_size([slow, fast, low], 0.9, as_good=0) == 1.0


def test_the_level_is_below_the_mean_end_of_syncs_best_step_size():
    runs = [run(1.0, [0.80]), run(1.0, [0.82], seed=1), run(2.0, [0.90]), run(2.0, [0.70], seed=1)]
    assert [mean_end(own) for own in by_step_size(runs).values()] == pytest.approx([0.81, 0.80])
    assert level_of(read_study("mnist"), runs) == pytest.approx(0.805)
    assert level_of(read_study("refresh"), runs) == 0.90


def test_where_the_mean_over_the_seeds_crosses_a_level():
    runs = [run(1.0, [0.0, 1.0]), run(1.0, [0.0, 0.5], seed=1)]
    assert crossing(runs, "seconds", 0.375) == pytest.approx(1.0, abs=0.01)
    assert crossing(runs, "megabytes", 0.375) == pytest.approx(0.5, abs=0.01)
    assert crossing(runs, "seconds", 0.8) is None


def test_rows_that_belong_together_are_held_out_together():
    whole = Split(np.arange(39), Parts(36, test=3))
    held = hold_out(whole, 1 / 6, together=3)
    assert held.parts == Parts(30, test=6)
    people = held.order[30:] // 3
    assert sorted(np.unique(people, return_counts=True)[1].tolist()) == [3, 3]
    assert sorted(held.order.tolist()) == list(range(36))
