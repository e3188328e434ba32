from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.federation import parameters, run_of, vertical_data
from vafl.errors import Diverged


@pytest.mark.parametrize(("combine", "weighted"), [("sum", False), ("concat", False), ("sum", True)])
def test_a_step_is_descent_on_the_joint_loss(combine, weighted):
    data = vertical_data(rows=8, clients=2)
    weights = torch.linspace(0, 2, 8) if weighted else torch.ones(8)
    data = replace(data, weights=torch.cat([3 * weights, torch.zeros(4)]) if weighted else None)
    run = run_of(
        data,
        rule={"name": "centralised"},
        model={"head": "linear", "combine": combine, "width": 4},
        optimiser={"step_size": 0.3, "server_step_size": 0.6, "l2": 0.2},
        schedule={"batch_size": 8},
    )
    trainer, before = run.runtime.trainer, parameters(run)
    parts = [model(party.features[data.train]) for model, party in zip(run.models, data.parties, strict=True)]
    inputs = sum(parts) if combine == "sum" else torch.cat(parts, 1)
    losses = nn.functional.cross_entropy(run.head(inputs), data.labels[data.train], reduction="none")
    loss = (losses * weights).mean()
    every = [p for module in (*run.models, run.head) for p in module.parameters()]
    gradients = torch.autograd.grad(loss, every)
    trainer.step()
    assert trainer.iteration == 1
    assert trainer.losses.take_mean() == pytest.approx(loss.item())
    for number, (found, old, gradient) in enumerate(zip(parameters(run), before, gradients, strict=True)):
        step, l2 = (0.6, 0.0) if number >= 4 else (0.3, 0.2)
        assert torch.allclose(found, old - step * (gradient + l2 * old), atol=1e-6)


def test_a_loss_that_is_not_finite_stops_it():
    run = run_of(vertical_data(classes=0), rule={"name": "centralised"})
    with torch.no_grad():
        run.models[0].bias.fill_(3e38)
    with pytest.raises(Diverged, match=r"VFL-4011.*inf.*0"):
        run.runtime.trainer.step()
