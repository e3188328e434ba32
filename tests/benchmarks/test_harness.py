"""The harness with fake benchmarks: saved files, merged figures, exit codes. Nothing is timed."""

import io
import json

import pytest
from benchmarks.__main__ import main
from benchmarks.harness import Figure, benchmark, discover, interleave, ratios
from rich.console import Console


@benchmark(target=2.0)
def cheap_lower() -> Figure:
    return Figure([3.0, 1.0, 2.0, 1.0, 1.5], {"note": "five"})


@benchmark(target=10.0, unit="1/s", better="higher")
def cheap_higher() -> Figure:
    return Figure([9.0])


FAKES = {one.name: one for one in (cheap_lower, cheap_higher)}


def run(*arguments):
    output = io.StringIO()
    return main(arguments, FAKES, Console(file=output, width=120)), output.getvalue()


def test_figures_are_kept_with_targets_and_quartiles(tmp_path):
    code, shown = run("--out", str(tmp_path / "bench.json"))
    assert code == 1
    assert "missed: cheap_higher" in shown
    entries = json.loads((tmp_path / "bench.json").read_text())
    assert set(entries) == {"cheap_lower", "cheap_higher"}
    assert set(entries["cheap_lower"]) == {"value", "target", "unit", "better", "repeats", "detail"}
    assert entries["cheap_lower"]["value"] == 1.5
    assert entries["cheap_lower"]["repeats"] == 5
    assert entries["cheap_lower"]["detail"] == {"quartiles": [1.0, 2.0], "note": "five"}
    assert entries["cheap_higher"]["better"] == "higher"


def test_only_measures_one_and_keeps_the_others(tmp_path):
    out = tmp_path / "bench.json"
    out.write_text(json.dumps({"another": {"value": 1}}))
    code, shown = run("--only", "cheap_lower", "--out", str(out))
    assert code == 0
    assert "every target was met" in shown
    assert set(json.loads(out.read_text())) == {"another", "cheap_lower"}


def test_a_prefix_measures_several(tmp_path):
    code, _ = run("--only", "cheap", "--out", str(tmp_path / "bench.json"))
    assert code == 1
    assert len(json.loads((tmp_path / "bench.json").read_text())) == 2


def test_an_unknown_name_gets_a_suggestion(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        run("--only", "chaep_lower", "--out", str(tmp_path / "bench.json"))
    assert ended.value.code == 2
    assert 'Did you mean "cheap_lower"?' in capsys.readouterr().err


def test_times_are_taken_in_turn_after_a_warm_up():
    done, ticks = [], iter(range(100))
    taken = interleave(
        lambda: done.append("a"), lambda: done.append("b"), repeats=3, clock=lambda: next(ticks)
    )
    assert done == ["a", "b"] * 4
    assert taken == [[1, 1, 1], [1, 1, 1]]
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]


def test_the_projects_benchmarks_are_found():
    names = set(discover("benchmarks"))
    assert {
        "sim_overhead_lr",
        "sim_overhead_cnn",
        "server_step_growth_rows",
        "server_step_growth_clients",
    } <= names
