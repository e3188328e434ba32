import json
import math

import pytest
import torch

from vafl.cli import main
from vafl.commands.objective import Objective
from vafl.config import from_document
from vafl.plan import make_plan
from vafl.privacy.secant import secant
from vafl.protocol.stepsizes import nonconvex_bounded, strongly_convex_bounded

CONFIG = """
[data]
name = "digits"
scale = "none"
[model]
embedding = "mlp"
hidden = [8]
[rule]
delay_bound = 6
[optimiser]
l2 = 0.01
[stop]
updates = 400
[delays]
kind = "fixed"
[privacy]
mode = "embed_only"
clip = 50.0
noise = 1.0
layers = [0.5]
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return str(path)


def report(capsys, *arguments):
    assert main(["smoothness", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_constants_secant_and_step_sizes(config, capsys):
    found = report(capsys, config)
    first, last = found["clients"]["client-1"]["layers"]
    assert first["kappa"] == pytest.approx(math.sqrt(8) / (math.sqrt(3) * 0.5))
    assert last["kappa"] == pytest.approx(math.sqrt(2 / math.pi))
    assert last["reach"] == pytest.approx(math.sqrt(2))  # softmax
    assert first["weight"] == pytest.approx(first["input_square"] * first["bias"])
    assert 0 < found["secant"] <= found["bound"] * 2  # two clients
    sizes = found["step_sizes"]["largest client's bound"]
    assert sizes["nonconvex-bounded"]["first"] == pytest.approx(nonconvex_bounded(found["bound"], 6, 400)(0))
    harmonic = strongly_convex_bounded(found["bound"], 0.01, 6, 1 / 3)  # client 2 is half as often active
    assert sizes["strongly-convex-bounded"]["last"] == pytest.approx(harmonic(400))


def test_the_secant_of_a_linear_model_is_that_of_its_hessian():
    plan = make_plan(
        from_document({"data": {"name": "iris"}, "partition": {"clients": 2}, "optimiser": {"l2": 0.1}})
    )
    objective = Objective(plan, rows=112, draws=1)
    gradient, here = objective.gradient, objective.here
    moves = 0.01 * torch.eye(len(here))
    hessian = torch.stack([gradient(here + move) - gradient(here - move) for move in moves]) / 0.02
    largest = float(torch.linalg.eigvalsh((hessian + hessian.T) / 2)[-1])
    assert secant(gradient, here, 0.01, rounds=40) == pytest.approx(largest, rel=0.02)
    assert torch.equal(plan.head.bias, torch.zeros(3))  # the plan's own models are left alone


def test_a_model_that_is_no_chain_has_a_secant_only(config, capsys):
    choices = ["--set", "model.embedding=lstm", "--set", "partition.layout=sequence"]
    found = report(capsys, config, *choices, "--set", "privacy={}")
    assert "Found SequenceEncoder" in found["clients"]["client-1"]["no_constants"]
    assert found["secant"] > 0
    assert found["bound"] is None
    assert found["step_sizes"]["largest client's bound"] == {}


def test_noise_on_outputs_has_no_constants(config, capsys):
    found = report(capsys, config, "--set", "privacy.placement=output")
    assert "does not smooth it" in found["clients"]["client-1"]["no_constants"]


def test_clipped_rows_are_pointed_out(config, capsys):
    found = report(capsys, config, "--set", "privacy.clip=0.01")
    assert found["clients"]["client-1"]["clipped"] == 1.0
    assert any("the clip has a kink" in note for note in found["notes"])


def test_a_regression_takes_its_slope_from_the_present_errors(config, capsys):
    choices = ("data.name=diabetes", "model.embedding=linear", "privacy.layers=[]")
    found = report(capsys, config, *(word for choice in choices for word in ("--set", choice)))
    assert found["clients"]["client-1"]["layers"][0]["reach"] > 100  # labels are in the hundreds


def test_stochastic_delays_and_a_deep_head(config, capsys):
    choices = ["model.head=mlp", "rule.delay_bound=0", "optimiser.schedule=nonconvex-stochastic"]
    constants = "optimiser.constants={ L = 1.0, K = 400, rho = 0.5, pbar = [1.0, 1.0] }"
    chosen = [word for choice in (*choices, constants) for word in ("--set", choice)]
    found = report(capsys, config, *chosen)
    assert set(found["step_sizes"]["secant estimate"]) == {
        "nonconvex-stochastic",
        "strongly-convex-stochastic",
    }
    assert any("give --delay D" in note for note in found["notes"])


def test_the_table_labels_the_papers_constant(config, capsys):
    assert main(["smoothness", config]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "paper constant (block-diagonal only)" in text
    assert "nonconvex-bounded" in text
    assert "secant estimate of the whole objective" in text
