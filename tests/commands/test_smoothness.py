import json
import math
from dataclasses import replace

import pytest
import torch

from vafl.cli import main
from vafl.commands.objective import Objective
from vafl.config import from_document
from vafl.privacy.mechanism.secant import secant
from vafl.protocol.stepsizes import nonconvex_bounded, strongly_convex_bounded
from vafl.run.plan import make_plan

CONFIG = """
[data]
name = "digits"
scale = "none"
[embedding]
model = "mlp"
hidden = [8]
[model]
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


def chosen(*choices):
    return [word for choice in choices for word in ("--set", choice)]


def eigenvalues(objective, step=0.01):
    gradient, here = objective.gradient, objective.here
    moves = step * torch.eye(len(here))
    hessian = torch.stack([gradient(here + move) - gradient(here - move) for move in moves]) / (2 * step)
    return torch.linalg.eigvalsh((hessian + hessian.T) / 2)


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
    assert list(sizes) == ["nonconvex-bounded"], "an mlp is not convex, whatever l2"
    assert any("no mu is known" in note for note in found["notes"])


DECAY = ("embedding.model=linear", "privacy.layers=[]", "optimiser.options={ weight_decay = 0.01 }")


def test_weight_decay_makes_a_linear_model_strongly_convex(config, capsys):
    found = report(capsys, config, *chosen(*DECAY))
    assert found["strong_convexity"] == 0.01
    sizes = found["step_sizes"]["largest client's bound"]
    harmonic = strongly_convex_bounded(found["bound"], 0.01, 6, 1 / 3)  # client 2 is half as often active
    assert sizes["strongly-convex-bounded"]["last"] == pytest.approx(harmonic(400))
    assert sizes["strongly-convex-bounded"]["head"] == 1


def test_where_a_step_takes_t_clients_their_probabilities_sum_to_t_and_the_head_steps_t_times(config, capsys):
    """Client 1 is in every step; 2 and 3, at paces 1/2 and 1/3, share the other place: q_3 = 0.4."""
    rule = 'rule={ name = "t-sync", t = 2, delay_bound = 6 }'
    found = report(capsys, config, *chosen(*DECAY, "partition.clients=3", rule))
    sizes, smooth = found["step_sizes"]["secant estimate"], found["secant"]
    clients = strongly_convex_bounded(2 * smooth, 0.01, 6, 0.4)
    assert sizes["strongly-convex-bounded"]["last"] == pytest.approx(clients(400))
    head = nonconvex_bounded(smooth, 6, 400)
    assert 2 * sizes["nonconvex-bounded"]["first"] == pytest.approx(head(0))
    assert {size["head"] for size in sizes.values()} == {2}
    assert any("Set server_step_size to 2 times step_size" in note for note in found["notes"])


@pytest.mark.parametrize("rule", ["sync", "centralised"])
def test_without_delay_all_may_step_alike(config, capsys, rule):
    found = report(capsys, config, *chosen(*DECAY, f'rule={{ name = "{rule}" }}'))
    sizes = found["step_sizes"]["secant estimate"]["strongly-convex-bounded"]
    assert (sizes["head"], sizes["constants"]["q_min"]) == (1, 1.0)
    assert sizes["first"] == pytest.approx(1 / (4 * found["secant"]))


@pytest.mark.parametrize(
    ("data", "options", "l2", "weighted"),
    [
        ("diabetes", {}, 0.01, False),
        ("diabetes", {}, 0.01, True),
        ("iris", {"weight_decay": 0.02}, 0.1, False),
        ("iris", {"weight_decay": 0.02}, 0.1, True),
    ],
)
def test_no_hessian_has_a_smaller_eigenvalue_than_mu(data, options, l2, weighted):
    plan = make_plan(
        from_document(
            {"data": {"name": data}, "partition": {"clients": 3}, "optimiser": {"l2": l2, "options": options}}
        )
    )
    if weighted:
        weights = torch.linspace(0, 5, plan.data.parts.total)
        plan = replace(plan, data=replace(plan.data, weights=weights))
    objective = Objective(plan, rows=300, draws=1)
    mu = objective.strong_convexity()
    least = float(
        eigenvalues(objective, step=1.0 if data == "diabetes" else 0.01)[0]
    )  # labels in the hundreds
    assert 0.95 * least < mu < 1.005 * least
    assert data != "diabetes" or mu == pytest.approx(l2 / 4, rel=0.05), "three clients and the head"


def test_the_secant_of_a_linear_model_is_that_of_its_hessian():
    plan = make_plan(
        from_document({"data": {"name": "iris"}, "partition": {"clients": 2}, "optimiser": {"l2": 0.1}})
    )
    objective = Objective(plan, rows=112, draws=1)
    largest = float(eigenvalues(objective)[-1])
    assert secant(objective.gradient, objective.here, 0.01, rounds=40) == pytest.approx(largest, rel=0.02)
    assert torch.equal(plan.head.bias, torch.zeros(3))  # the plan's own models are left alone


def test_a_model_that_is_no_chain_has_a_secant_only(config, capsys):
    choices = ["--set", "embedding.model=lstm", "--set", "partition.layout=sequence"]
    found = report(capsys, config, *choices, "--set", "privacy={}")
    assert "Found SequenceEncoder" in found["clients"]["client-1"]["no_constants"]
    assert found["secant"] > 0
    assert found["bound"] is None
    assert found["step_sizes"]["largest client's bound"] == {}


def test_noise_on_outputs_has_no_constants(config, capsys):
    found = report(capsys, config, "--set", "privacy.placement=output")
    assert "VFL-9131" in found["clients"]["client-1"]["no_constants"]


def test_clipped_rows_are_pointed_out(config, capsys):
    found = report(capsys, config, "--set", "privacy.clip=0.01")
    assert found["clients"]["client-1"]["clipped"] == 1.0
    assert any("rows are clipped" in note for note in found["notes"])


def test_a_regression_takes_its_slope_from_the_present_errors(config, capsys):
    choices = ("data.name=diabetes", "embedding.model=linear", "privacy.layers=[]")
    found = report(capsys, config, *chosen(*choices))
    assert found["clients"]["client-1"]["layers"][0]["reach"] > 100  # labels are in the hundreds


def test_constants_hold_for_the_heaviest_row(config, capsys):
    """Digit 0 weighs 50 times as much as the others, before all weights are scaled to a mean of 1."""
    even, weighted = (
        report(capsys, config),
        report(capsys, config, *chosen("model.class_weight={ 0 = 50.0 }")),
    )
    layers = [found["clients"]["client-1"]["layers"][-1] for found in (even, weighted)]
    heaviest = layers[1]["reach"] / layers[0]["reach"]
    assert 50 / 6.5 < heaviest < 50 / 5.4  # a tenth of the digits are 0
    assert weighted["secant"] <= 2 * weighted["bound"]


def test_stochastic_delays_and_a_deep_head(config, capsys):
    choices = ["rule.delay_bound=0", "optimiser.schedule=nonconvex-stochastic"]
    constants = "optimiser.constants={ L = 1.0, K = 400, rho = 0.5, pbar = [1.0, 1.0] }"
    found = report(capsys, config, *chosen("model.head=mlp", *choices, constants))
    assert set(found["step_sizes"]["secant estimate"]) == {"nonconvex-stochastic"}
    convex = report(capsys, config, *chosen(*DECAY, *choices, constants))
    assert "strongly-convex-stochastic" in convex["step_sizes"]["secant estimate"]
    assert any("--delay D" in note for note in found["notes"])


def test_the_table_labels_the_papers_constant(config, capsys):
    assert main(["smoothness", config]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "paper constant (block-diagonal only)" in text
    assert "nonconvex-bounded" in text
    assert "secant estimate of the whole objective" in text
