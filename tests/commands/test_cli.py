"""The command as a user starts it: real processes, real files, and error messages."""

import errno
import json
import os
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import version

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.waiting import LIMIT, until
from vafl.cli import main
from vafl.config import TABLE_DEFAULTS
from vafl.run.controller import Ending

SMALL = """
seed = 3
[data]
name = "iris"
[stop]
updates = 60
[evaluation]
every = 20
[schedule]
batch_size = 16
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def test_run_writes_the_whole_folder_and_says_what_protects_the_labels(config, tmp_path):
    settings = ("rule.name=t-sync", "rule.t=2", "labels.epsilon=2.0", "labels.gradient_clip=0.01")
    chosen = [word for setting in (*settings, "labels.file=drawn.safetensors") for word in ("--set", setting)]
    command = [sys.executable, "-m", "vafl.cli", "run", str(config), "--out", str(tmp_path / "run"), *chosen]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "run"
    resolved = tomllib.loads((folder / "config.toml").read_text())
    assert resolved["rule"]["name"] == "t-sync"
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [point["updates"] for point in history] == [0, 20, 40, 60]
    assert set(history[0]) == {
        "seconds",
        "updates",
        "bytes_up",
        "bytes_down",
        "train_loss",
        "metric",
        "metrics",
        "unanswered",
    }
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rule"] == "t-sync"
    assert summary["clients"] == 2
    assert summary["metric"] == {"name": "accuracy", "value": history[-1]["metric"]}
    kept = summary["kept"]
    assert (kept["updates"], kept["selected_by"], kept["validation"]) == (60, None, None)
    assert kept["test"] == history[-1]["metrics"]
    assert kept["test"].keys() == {"accuracy", "log_loss", "macro_f1"}
    assert sum(own["rows"] for own in kept["classes"].values()) == 38
    f1 = [own["f1"] for own in kept["classes"].values()]
    assert sum(f1) / 3 == pytest.approx(kept["test"]["macro_f1"])
    trivial, drawn = summary["baselines"]["trivial"]["test"], load_file(tmp_path / "drawn.safetensors")
    shares = np.bincount(drawn["labels"]) / len(drawn["labels"])  # not those of the true labels
    rows = np.array([own["rows"] for own in kept["classes"].values()])
    assert trivial["log_loss"] == pytest.approx(-np.log(shares) @ rows / rows.sum())
    for name, value in kept["test"].items():
        line = next(line.split() for line in result.stdout.splitlines() if line.split()[:1] == [name])
        assert line == [name, f"{value:.4f}", f"{trivial[name]:.4f}"]
    assert {"max", "mean", "p50", "p99"} <= set(summary["delays"]["client-1"])
    assert {"python", "torch", "vafl"} <= set(summary["versions"])
    for name in ("client-1", "client-2", "server"):
        assert load_file(folder / "models" / name / "model.safetensors")
    for ending in ("png", "svg"):
        assert (folder / f"progress.{ending}").stat().st_size > 1000
    assert "labels: epsilon 2 by randomised response, each kept with probability 0.787" in result.stdout
    assert "a heuristic without a guarantee" in result.stdout
    assert summary["labels"]["epsilon"] == 2.0
    assert (tmp_path / "drawn.safetensors").is_file()  # from where the config lies


def results(folder):
    """Return the files of a run that depend on its seed only."""
    files = ("history.jsonl", "models/client-1/model.safetensors", "models/server/model.safetensors")
    return [(folder / file).read_bytes() for file in files]


def test_without_out_runs_are_numbered_and_the_same_seed_gives_the_same_bytes(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(["run", str(config)]) == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["small", "small-2"]
    assert results(tmp_path / "runs" / "small") == results(tmp_path / "runs" / "small-2")
    assert main(["run", str(config), "--overwrite"]) == 0  # the last of them
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_resume_without_out_goes_on_with_the_last_run(config, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("small", "small-2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    security = ["--set", "network.security=plaintext"]
    assert main(["server", str(config), *security, "--resume"]) == 5
    assert 'Found none in "runs/small-2/state/server"' in capsys.readouterr().err


def test_a_taken_folder_is_left_alone_and_its_config_runs_again_to_the_same_result(config, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["run", str(config), "--out", str(out)]) == 0
    summary, before = (out / "summary.json").read_bytes(), results(out)
    assert main(["run", str(config), "--out", str(out)]) == 5
    assert "--overwrite" in capsys.readouterr().err
    assert (out / "summary.json").read_bytes() == summary
    resolved = (out / "config.toml").rename(tmp_path / "resolved.toml")
    assert main(["run", str(resolved), "--out", str(out), "--overwrite"]) == 0
    assert results(out) == before
    assert (out / "config.toml").exists()


BAD = {
    "typo in a key": ('[rule]\nnmae = "sync"', 2, 'Did you mean "name"?'),
    "typo in a section": ('[ruel]\nname = "sync"', 2, 'Did you mean "rule"?'),
    "bound below one": ("[rule]\ndelay_bound = -1", 2, "delay_bound must be at least 1"),
    "t beyond the clients": ('[rule]\nname = "t-sync"\nt = 5', 2, "at most the number of clients, 2"),
    "batch beyond the rows": ("[schedule]\nbatch_size = 5000", 2, "at most the number of training rows"),
    "missing file": ('[data]\nname = "csv"\npath = "none.csv"\nlabel = "y"', 3, "none.csv"),
    "missing public data": ('[data]\nname = "mnist"\nfolder = "nowhere"', 3, "--data or VAFL_DATA"),
    "an empty column": (
        '[data]\nname = "csv"\npath = "empty.csv"\nlabel = "y"',
        3,
        "client-2 needs at least one column",
    ),
    "one class": ('[data]\nname = "csv"\npath = "one.csv"\nlabel = "y"', 3, "2 to 1000 classes. Found 1"),
    "overlapping groups": (
        '[data]\nname = "csv"\npath = "good.csv"\nlabel = "y"\n[partition.groups]\nx = ["a"]\nz = ["a", "b"]',
        3,
        'claimed by both "x" and "z"',
    ),
    "seed beyond what streams can count": ("seed = 99999999999999999999", 2, "at most 2^53"),
    "not TOML": ("= what", 2, "must be a TOML file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_error_and_writes_nothing(case, tmp_path, capsys):
    text, code, words = BAD[case]
    rows = [f"{i},{i * i % 7},{i % 2}" for i in range(40)]
    (tmp_path / "good.csv").write_text("a,b,y\n" + "\n".join(rows))
    (tmp_path / "empty.csv").write_text("a,b,y\n" + "\n".join(f"{i % 9},,{i % 2}" for i in range(40)))
    (tmp_path / "one.csv").write_text("a,b,y\n" + "\n".join(f"{i},{i},0" for i in range(40)))
    (tmp_path / "bad.toml").write_text(text)
    out = tmp_path / "run"
    out.mkdir()
    (out / "summary.json").write_text("precious")
    assert main(["run", str(tmp_path / "bad.toml"), "--out", str(out), "--overwrite"]) == code
    error = " ".join(capsys.readouterr().err.split())
    assert words in error
    assert len(error) < 1200
    assert (out / "summary.json").read_text() == "precious"
    assert [path.name for path in out.iterdir()] == ["summary.json"]


def test_what_was_found_is_shown_as_it_is_even_if_it_looks_like_markup(tmp_path, capsys):
    for name in ("[/x].toml", "[bold].toml"):
        assert main(["run", name]) == 2
        assert name in capsys.readouterr().err


def test_names_in_brackets_are_shown_as_they_are(tmp_path, capsys):
    rows = [f"{i % 9},{i * i % 7},{'[/b]' if i % 2 else ':b:'}" for i in range(40)]
    (tmp_path / "own.csv").write_text("income [eur],b,y\n" + "\n".join(rows))
    settings = '[data]\nname = "csv"\npath = "own.csv"\nlabel = "y"\n[stop]\nupdates = 5\n'
    (tmp_path / "own.toml").write_text(f"{settings}[schedule]\nbatch_size = 8\n")
    for name in ("[bold]x", "a[/x]b"):
        out = tmp_path / name
        assert main(["run", str(tmp_path / "own.toml"), "--out", str(out)]) == 0
        assert f"the run is in {out}\n" in capsys.readouterr().out
    assert main(["inspect", str(out)]) == 0
    assert "[/b]" in (shown := capsys.readouterr().out)
    assert ":b:" in shown


def test_the_server_s_reason_is_shown_as_it_is_even_if_it_looks_like_markup(config, monkeypatch, capsys):
    monkeypatch.setattr("vafl.run.client.run_client", lambda *_, **__: "enough [/bold]")
    assert main(["client", str(config), "--party", "client-1", "--out", "o"]) == 0
    assert "the run is over: enough [/bold]; the model is in o/models" in capsys.readouterr().out


def test_a_path_out_of_reach_is_one_error_with_its_exit_code(config, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    beneath = tmp_path / "file" / "x"
    assert main(["run", str(config), "--out", str(tmp_path / "run")]) == 0
    for command, named in (
        (["init", "--out", str(tmp_path / "nodir" / "x.toml")], tmp_path / "nodir" / "x.toml"),
        (["compare", str(tmp_path / "run"), "--out", str(beneath / "k")], beneath),
    ):
        assert main(command) == 8
        error = capsys.readouterr().err
        assert f'Found "{named}": ' in error
        assert "Check that the folder exists" in error
    assert main(["run", str(config), "--out", str(beneath)]) == 5


def test_a_full_disk_is_one_error(config, tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("vafl.observe.record.RunFolder.append", full)
    assert main(["run", str(config), "--out", str(tmp_path / "run")]) == 8
    assert "Found No space left on device. Check" in capsys.readouterr().err


def test_a_configuration_with_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "run.toml").write_text(SMALL, encoding="utf-8-sig")
    assert main(["run", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")]) == 0


def test_overwrite_refuses_a_folder_that_is_no_run(config, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert main(["run", str(config), "--out", str(tmp_path), "--overwrite"]) == 5
    assert "which no run wrote" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "thesis.tex").exists()


def test_divergence_ends_the_run_with_a_remedy(config, tmp_path, capsys):
    options = [
        "--set",
        "optimiser.step_size=1e30",
        "--set",
        "model.loss=squared",
        "--set",
        "model.metric=loss",
    ]
    assert main(["run", str(config), "--out", str(tmp_path / "run"), *options]) == 4
    assert "Lower optimiser.step_size" in " ".join(capsys.readouterr().err.split())


def test_a_signal_ends_a_run_orderly_though_nobody_reads_what_it_prints(config, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "vafl.cli", "run", str(config), "--out", str(out)]
    process = subprocess.Popen(
        [*command, "--set", "stop.updates=100000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    history = out / "history.jsonl"
    until(lambda: history.exists() and history.stat().st_size, "the run's first point")
    process.send_signal(signal.SIGTERM)
    with process.stderr as words:
        errors = words.read()
    assert process.wait(timeout=LIMIT) == 130
    assert "interrupted: " in errors
    assert f"updates were made, and what they reached is in {out}" in errors
    assert json.loads((out / "summary.json").read_text())["interrupted"] is True


PRIVATE = """
[privacy]
clip = 1.0
noise = 1.0
gradient_clip = 1.0
gradient_noise = 1.0
"""


def test_whoever_will_not_wait_for_the_first_evaluation_interrupts_a_run_without_result(
    config, tmp_path, monkeypatch, capsys
):
    def impatient(evaluator):
        raise KeyboardInterrupt

    monkeypatch.setattr("vafl.run.evaluator.Evaluator.__call__", impatient)
    assert main(["run", str(config), "--out", str(tmp_path / "run")]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_run_says_why_it_ended_and_warns_of_budgets_that_are_spent(config, tmp_path, capsys):
    config.write_text(SMALL.replace('"iris"', '"iris"\nscale = "none"') + PRIVATE)
    for name, setting, code in (("full", "unlimited", 0), ("short", 6.0, 0), ("nothing", 0.5, 4)):
        chosen = ["--set", f"privacy.mu_max={setting}", "--out", str(tmp_path / name)]
        assert main(["run", str(config), *chosen]) == code
    shown, error = capsys.readouterr()
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("full", "short")]
    assert [summary["ending"] for summary in summaries] == [Ending.UPDATES.name, Ending.BUDGETS_SPENT.name]
    assert "it ended: 60 updates were made" in shown
    assert f"it ended early, after {summaries[1]['updates']} updates" in shown
    assert 0 < summaries[1]["updates"] < 60
    assert "privacy.mu_max must allow every client some uploads. Found 0.5" in error


def test_compare_shows_table_json_and_plots(config, tmp_path, capsys):
    for rule in ("async", "centralised"):
        main(["run", str(config), "--out", str(tmp_path / rule), "--set", f"rule.name={rule}"])
    runs = [str(tmp_path / rule) for rule in ("async", "centralised")]
    capsys.readouterr()
    assert main(["compare", *runs, "--out", str(tmp_path / "plots" / "all")]) == 0
    shown = capsys.readouterr().out
    assert "async" in shown
    assert "different data" not in shown
    assert (tmp_path / "plots" / "all.png").exists()
    main(["run", str(config), "--out", str(tmp_path / "wine"), "--set", "data.name=wine"])
    assert main(["compare", runs[0], str(tmp_path / "wine"), "--out", str(tmp_path / "two")]) == 0
    shown = capsys.readouterr().out
    assert "different data: iris, wine" in shown
    assert shown.count("trivial baseline, test accuracy: ") == 2  # one for each set of labels
    assert main(["compare", *runs, "--json", "--target", "0.5", "--out", str(tmp_path / "all")]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert (lines["metric"], lines["target"]) == ("accuracy", 0.5)
    assert lines["runs"][0]["kept"]["test"].keys() == {"accuracy", "log_loss", "macro_f1"}
    assert lines["runs"][0]["baselines"]["trivial"]["test"]["accuracy"] < 0.5
    assert [line["run"] for line in lines["runs"]] == ["async", "centralised"]


def test_runs_with_different_headlines_are_compared_by_a_metric_that_both_have(config, tmp_path, capsys):
    """Two different metrics on one axis would be meaningless."""
    runs = [str(tmp_path / name) for name in ("accuracy", "loss")]
    for run, metric in zip(runs, ("accuracy", "loss"), strict=True):
        assert main(["run", str(config), "--out", run, "--set", f"model.metric={metric}"]) == 0
    capsys.readouterr()
    compared = ["compare", *runs, "--out", str(tmp_path / "all")]
    assert main(compared) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "Found accuracy, log_loss" in error
    assert "--metric: accuracy, log_loss, macro_f1" in error
    assert not (tmp_path / "all.png").exists()
    assert main([*compared, "--metric", "r2"]) == 2
    assert 'Found none in "accuracy"' in " ".join(capsys.readouterr().err.split())
    assert main([*compared, "--metric", "log_loss", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["metric"] == "log_loss"
    first, second = document["runs"]
    assert first["test"] == second["test"] == first["kept"]["test"]["log_loss"]


def test_runs_of_one_name_are_told_apart_by_their_folders(config, tmp_path, capsys):
    for folder in ("first", "second"):
        assert main(["run", str(config), "--out", str(tmp_path / folder / "run")]) == 0
    runs = [str(tmp_path / folder / "run") for folder in ("first", "second")]
    capsys.readouterr()
    assert main(["compare", *runs, "--out", str(tmp_path / "both"), "--json"]) == 0
    assert [line["run"] for line in json.loads(capsys.readouterr().out)["runs"]] == [
        "first/run",
        "second/run",
    ]


def test_compare_shows_the_test_rows_figure_and_the_models_that_were_kept(config, tmp_path, capsys):
    chosen = [f"--set={setting}" for setting in ("data.validation_fraction=0.3", "stop.patience=2")]
    best = [*chosen, "--set=stop.updates=5000", "--set=evaluation.every=5"]
    assert main(["run", str(config), "--out", str(tmp_path / "best"), *best]) == 0
    assert main(["run", str(config), "--out", str(tmp_path / "plain")]) == 0
    summaries = [json.loads((tmp_path / run / "summary.json").read_text()) for run in ("best", "plain")]
    assert [summary["watched"] for summary in summaries] == ["validation", "test"]
    runs = [str(tmp_path / run) for run in ("best", "plain")]
    capsys.readouterr()
    assert main(["compare", *runs, "--json", "--out", str(tmp_path / "all")]) == 0
    lines = json.loads(capsys.readouterr().out)["runs"]
    assert [line["test"] for line in lines] == [summary["kept"]["test"]["accuracy"] for summary in summaries]
    assert [line["validation"] for line in lines] == [summaries[0]["metric"]["value"], None]
    assert main(["compare", *runs, "--out", str(tmp_path / "all")]) == 0
    shown = capsys.readouterr().out
    assert "validation" in shown
    assert f"{summaries[0]['kept']['test']['accuracy']:.4f}" in shown


def test_compare_names_what_is_missing(tmp_path, capsys):
    assert main(["compare", str(tmp_path)]) == 5
    assert "summary.json" in capsys.readouterr().err


def test_init_writes_a_config_that_runs(tmp_path, capsys):
    table = tmp_path / "people.csv"
    rows = [f"{i % 13},{(i * 7) % 11},{i % 5},word,{'yes' if i % 13 > 6 else 'no'}" for i in range(200)]
    table.write_text("age,income,visits,city,bought\n" + "\n".join(rows))
    out = tmp_path / "people.toml"
    assert main(["init", str(table), "--clients", "3", "--out", str(out)]) == 0
    text = out.read_text()
    assert text.count("#") > 5
    parsed = tomllib.loads(text)
    assert parsed["data"]["label"] == "bought"
    assert parsed["data"]["ignore"] == ["city"]
    assert len(parsed["partition"]["groups"]) == 3
    assert main(["run", str(out), "--out", str(tmp_path / "run"), "--set", "stop.updates=200"]) == 0
    assert main(["init", "--out", str(out)]) == 2
    assert "VFL-9092" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "none.csv"), "--out", str(tmp_path / "x.toml")]) == 3


PRICES = [(n % 7, n % 5, "ab"[n % 2], 1000 + n * n) for n in range(60)]


def written(path, header, rows, mark=","):
    path.write_text("\n".join(mark.join(map(str, row)) for row in (header, *rows)))
    return str(path)


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_init_says_what_it_decided_and_what_it_left_out(tmp_path, capsys, mark):
    rows = [(n, "CH", "NA" if n == 3 else row[0], *row[1:]) for n, row in enumerate(PRICES)]
    header = ("line", "country", "rooms", "floors", "street", "price")
    table = written(tmp_path / "houses.csv", header, rows, mark)
    assert main(["init", table, "--clients", "1", "--out", str(tmp_path / "h.toml")]) == 0
    said = capsys.readouterr().out
    assert "line is ignored: a different whole number in every row, as ids are" in said
    assert 'country is ignored: always "CH" in the training rows' in said
    assert '"price" is the label, for a regression: it has 60 different values' in said
    settings = tomllib.loads((tmp_path / "h.toml").read_text())
    assert (settings["data"]["task"], settings["data"]["ignore"]) == ("regression", ["line", "country"])
    assert settings["partition"]["groups"] == {"client-1": ["rooms", "floors", "street"]}
    assert all(settings[section].items() >= own.items() for section, own in TABLE_DEFAULTS.items())
    assert (
        main(["run", str(tmp_path / "h.toml"), "--out", str(tmp_path / "run"), "--set", "stop.updates=20"])
        == 0
    )
    assert main(["init", table, "--label", "prices", "--out", str(tmp_path / "two.toml")]) == 3
    assert 'no column "prices". Did you mean "price"?' in capsys.readouterr().err
    assert main(["init", table, "--clients", "4", "--out", str(tmp_path / "two.toml")]) == 3
    assert "has 3 feature columns" in capsys.readouterr().err
    assert (
        main(["init", table, "--label", "floors", "--clients", "1", "--out", str(tmp_path / "f.toml")]) == 0
    )
    assert tomllib.loads((tmp_path / "f.toml").read_text())["data"]["task"] == "classification"
    gap = written(tmp_path / "gap.csv", ("rooms", "price"), [("1", "NA"), *(row[::3] for row in PRICES)])
    assert main(["init", gap, "--clients", "1", "--out", str(tmp_path / "two.toml")]) == 3
    assert 'Found 1 of 61 lines without one in "price"' in capsys.readouterr().err


def test_init_refuses_a_file_that_is_not_utf_8(tmp_path, capsys):
    path = tmp_path / "old.csv"
    for content in ("größe,b,y\n1,2,0\n2,3,1\n", "a,b,y\n1,größe,0\n2,3,1\n"):
        path.write_bytes(content.encode("latin-1"))
        for given in ([str(path)], ["--table", f"bank={path}", "--id", "b"]):
            assert main(["init", *given, "--out", str(tmp_path / "new")]) == 3
            assert "UTF-8" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_init_without_a_file_runs_digits(tmp_path):
    out = tmp_path / "digits.toml"
    assert main(["init", "--out", str(out)]) == 0
    assert main(["run", str(out), "--out", str(tmp_path / "run"), "--set", "stop.updates=50"]) == 0


def test_run_refuses_label_privacy_for_a_regression(config, capsys):
    chosen = ["--set", "data.name=diabetes", "--set", "labels.epsilon=1"]
    assert main(["run", str(config), *chosen]) == 2
    assert "VFL-5110" in capsys.readouterr().err


LOADED = """
import sys
drawing = {"matplotlib", "pandas", "scipy", "sklearn"}
import vafl.commands.align, vafl.commands.watch, vafl.observe.plots
vafl.Config()
print(*sys.modules.keys() & {"torch", *drawing})
import vafl.run.client, vafl.run.up, vafl.run.launch
vafl.config.from_document({"optimiser": {"name": "Adam"}})
print(*sys.modules.keys() & {"torch._dynamo", *drawing})
"""


def test_a_process_loads_what_it_needs_and_no_more():
    """A federation on one machine starts a process for each party. `align` and `watch` need no torch, and
    plotting libraries load last."""
    found = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"vafl {version('vafl')}\n")


def test_help_names_every_command_and_exit_code(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for command in ("run", "server", "client", "up", "compare", "init", "demo", "certs", "audit", "privacy"):
        assert f"  {command} " in shown
    assert "exit codes" in shown
    assert "130" in shown
