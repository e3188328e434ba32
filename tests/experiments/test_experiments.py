"""Small versions of the experiments run, and write results in the common form."""

import gzip
import json
import math
import operator
import os
import subprocess
import sys
from pathlib import Path

import experiments
import numpy as np
import pytest
import torch
from experiments import (
    absent_records,
    convergence,
    gated_head,
    joining,
    privacy_curves,
    realtime_mnist,
    strongly_convex,
)
from experiments.jobs import in_groups, run_all
from experiments.objective import Objective
from experiments.people import adult
from experiments.rates import slope
from experiments.runs import make_run, point_of, visit
from experiments.strongly_convex import TOML as CONVEX

from tests.waiting import LIMIT

pytestmark = pytest.mark.no_cover  # the parts of vafl that they use have other tests


def read(folder):
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def assert_drawn(folder, name):
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / f"{name}.svg").read_text(encoding="utf-8")


def test_a_gated_head_learns_to_ignore_noise():
    """The third party sends noise for all records, or for half of them."""
    noise = gated_head.measure(gated_head.Trial("noise", "gated", 0))
    assert noise["3 lacking"] < 0.75 * min(noise["1"], noise["2"])
    found = {head: gated_head.measure(gated_head.Trial("broken", head, 0)) for head in gated_head.HEADS}
    assert found["gated"]["3 lacking"] < 0.25 * found["gated"]["3 intact"]
    assert all(
        found["gated"]["log loss"] < found[head]["log loss"] - 0.005 for head in ("linear", "mlp", "tabular")
    )


def test_privacy_curves_quick(tmp_path):
    assert privacy_curves.main(["--quick", "--workers", "1", "--out", str(tmp_path)]) == 0
    assert_drawn(tmp_path, "privacy_curves")
    assert set(read(tmp_path)["measured"]["digits"]) == {"none", *privacy_curves.MODES}


@pytest.mark.slow
def test_realtime_mnist_quick(tmp_path, mnist):
    """Real processes: on a busy machine, a test cannot decide whether async wins."""
    assert realtime_mnist.main(["--quick", "--data", str(mnist), "--out", str(tmp_path)]) in (0, 1)
    assert_drawn(tmp_path, "realtime_mnist")
    measured = read(tmp_path)["measured"]
    assert min(*measured["async"]["accuracy"], *measured["sync"]["accuracy"]) >= 0.7
    assert measured["share"][0] > 0


@pytest.mark.slow
def test_convergence_quick(tmp_path):
    assert convergence.main(["--quick", "--out", str(tmp_path)]) == 0
    assert_drawn(tmp_path, "convergence")
    results = read(tmp_path)
    assert results["quick"]
    assert len(results["verdicts"]) == 8
    for verdict in results["verdicts"]:
        assert set(verdict) == {"claim", "measured", "target", "holds"}
        assert verdict["holds"]
    convex = results["measured"]["strongly_convex"]
    problem = convex["problem"]
    assert 0 < problem["mu"] < problem["L"] < problem["L_record"]
    assert problem["slack"] < 1e-12
    for run in (*convex["theorem"], *convex["practical"]):
        assert len(run["gaps"]) == len(run["iterations"])
        assert min(run["gaps"]) > 0  # F* is the minimum
        assert run["gaps"][-1] < run["gaps"][0] / 10
        assert run["longest_delay"] <= problem["D"]
    nonconvex = results["measured"]["nonconvex"]
    assert len(nonconvex["runs"]) == len(nonconvex["lengths"])
    assert all(run["mean_square"] > 0 for row in nonconvex["runs"] for run in row)


def test_slope_is_the_exponent():
    x = np.geomspace(1, 1000, 50)
    assert slope(x, 7 / x, start=10) == pytest.approx(-1)
    assert slope(x, 7 / np.sqrt(x), start=10) == pytest.approx(-0.5)


def test_objective_is_what_the_run_descends_on():
    run = make_run(CONVEX, ["optimiser.step_size=0.005"], seed=0)
    objective = Objective(run)
    points = list(visit(run, [0, 300]))
    values = [objective(point)[0] for point in points]
    assert values[1] < values[0]
    direction = torch.randn(len(points[0]), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ahead, behind = (objective(points[0] + step * direction)[0] for step in (1e-5, -1e-5))
    assert (ahead - behind) / 2e-5 == pytest.approx(float(objective(points[0])[1] @ direction), rel=1e-6)
    assert objective.outputs(points[0]).shape == (run.data.rows, 10)


def test_constants_of_the_convex_problem_bound_its_curvature():
    """Between any two points, the gradient changes by a factor from mu to L."""
    problem = strongly_convex.pose()
    run = make_run(CONVEX, [], seed=1)
    objective = Objective(run)
    point = point_of(run)
    generator = torch.Generator().manual_seed(1)
    for reach in (0.01, 1.0):
        other = point + reach * torch.randn(len(point), generator=generator, dtype=torch.float64)
        change = objective(other)[1] - objective(point)[1]
        apart = float((other - point).square().sum())
        assert problem.mu * apart <= float(change @ (other - point)) <= problem.L * apart
    assert problem.mu <= objective.curvature(point) <= problem.L


def test_theorem_2_bound_begins_at_the_start_and_falls_like_one_over_k():
    problem = strongly_convex.pose()
    iterations = np.array([0.0, 1e7, 1e8])
    bound = problem.bound(iterations, 3.0, np.ones(5), np.full(4, 0.25))
    assert bound[0] == pytest.approx(3.0)
    assert math.log10(bound[2] / bound[1]) == pytest.approx(-1, abs=0.01)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_jobs(workers):
    jobs = [3, 1, 2, 5]
    assert run_all("negating", operator.neg, jobs, cost=float, workers=workers) == [-3, -1, -2, -5]
    assert in_groups([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]


def forged_adult(folder, gain=0.0):
    """Return people like Adult's, whose capital gain counts `gain` times as much as ten years of age."""
    generator, lines = np.random.default_rng(0), []
    for _ in range(600):
        age, hours = generator.integers(20, 60), generator.integers(10, 60)
        gained = int(generator.integers(0, 2)) if gain else 0
        score = age + hours + generator.normal() * 5 + 10 * gain * (2 * gained - 1)
        income = ">50K" if score > 80 else "<=50K"
        job = generator.choice(["Sales", "Tech", "?"])
        home = generator.choice(["Single", "Married"])
        money = f"{5000 * gained}, {generator.integers(0, 2) if gain else 0}"
        lines.append(f"{age}, ?, 1, HS, 9, {home}, {job}, Wife, Any, Male, {money}, {hours}, Here, {income}")
    (folder / "adult").mkdir()
    for name, content in (("adult.data.gz", lines[:400]), ("adult.test.gz", ["|first", *lines[400:]])):
        (folder / "adult" / name).write_bytes(gzip.compress("\n".join(content).encode()))
    return adult(folder, {"adult.data": 400, "adult.test": 200})


@pytest.mark.parametrize("head", joining.HEADS)
def test_a_company_joins_the_others(tmp_path, head):
    trial = joining.Trial(head, 0, tmp_path, tmp_path / "out", updates=300)
    found = joining.measure(trial, forged_adult(tmp_path, gain=2.0))
    assert found["at the start log_loss"] == pytest.approx(found["before log_loss"], rel=0.02)
    assert found["after as many log_loss"] < found["before log_loss"] - 0.02
    assert found["after as many auc"] > found["before auc"]
    _, after, _, loss_after = joining._verdicts({head: found})
    assert after.holds == (found["after a tenth auc"] >= found["before auc"])
    assert loss_after.holds == (found["after a tenth log_loss"] <= found["before log_loss"])


def test_companies_are_compared_on_the_same_people(tmp_path):
    people = forged_adult(tmp_path)
    found = {}
    for way in absent_records.WAYS:
        trial = absent_records.Trial("adult", way, 0, tmp_path, tmp_path / "out", quick=True)
        found[way] = absent_records.measure(trial, people)
    assert {result["test_people"] for result in found.values()} == {120}
    assert found["label holder alone"]["auc"] < found["federated"]["auc"] < 1
    assert found["federated"]["auc"] == pytest.approx(found["pooled"]["auc"], abs=0.05)


ENDLESS = """
import time
from experiments.jobs import run_all

def never_ends(job):
    print("begun", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    run_all("waiting", never_ends, [1, 2], workers=2)
"""


def test_workers_end_when_whoever_started_them_is_killed(tmp_path):
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    found_here = {**os.environ, "PYTHONPATH": str(Path(experiments.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=found_here
    ) as whole:
        begun = (line for line in whole.stdout if "begun" in line)
        assert [next(begun), next(begun)]
        whole.kill()
        whole.communicate(timeout=LIMIT)  # ends when no process holds the pipe any more
