"""`vafl smoothness`: how smooth the noise makes the objective, and the step sizes that follow."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from vafl.build import torch_threads
from vafl.commands.configured import add_config_options, as_json, overrides
from vafl.commands.course import expected_activations
from vafl.commands.objective import Objective
from vafl.config import Config, read_config
from vafl.errors import ConfigError
from vafl.models.losses import LARGEST_CURVATURES, LARGEST_SLOPES
from vafl.plan import Plan, make_plan
from vafl.privacy.secant import secant
from vafl.privacy.smoothness import Layer, chain_of, smoothness
from vafl.protocol import stepsizes

PAPER = "paper constant (block-diagonal only)"
_ROWS, _DRAWS = 2000, 4
_STEP = 0.01  # of a secant, relative to the parameters


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of `vafl smoothness`."""
    add_config_options(parser)
    parser.add_argument(
        "--delay", type=int, help="D, the largest delay to expect (default: rule.delay_bound, 0 for sync)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace, console: Console) -> None:
    """Prints each client's constants, a secant estimate for the whole objective, and step sizes."""
    plan = make_plan(read_config(options.config, overrides(options)))
    with torch_threads(plan.config.threads):
        report = _report(plan, options.delay)
    if options.json:
        sys.stdout.write(as_json(report))
    else:
        _show(report, console)


def _report(plan: Plan, delay: int | None) -> dict[str, Any]:
    objective = Objective(plan, _ROWS, _DRAWS)
    slope = LARGEST_SLOPES.get(plan.task.loss) or objective.largest_slope()
    names = [party.name for party in plan.data.parties]
    clients = {
        name: _constants(plan, model, features, slope)
        for name, model, features in zip(names, plan.models, objective.features, strict=True)
    }
    here = objective.here
    estimate = secant(objective.gradient, here, _STEP * max(1.0, float(here.norm())))
    bound = max(own.get("bound", math.inf) for own in clients.values())
    delay = _delay(plan.config, delay)
    found = {"secant estimate": estimate, "largest client's bound": bound}
    return {
        "clients": clients,
        "secant": estimate,
        "bound": bound,
        "step_sizes": {
            source: _step_sizes(plan.config, smooth, delay, len(names)) for source, smooth in found.items()
        },
        "notes": _notes(plan.config, delay, clients),
    }


def _constants(plan: Plan, model: nn.Module, features: Tensor, slope: float) -> dict[str, Any]:
    settings = plan.config.privacy
    noised = settings.kind in ("frozen", "dp_train", "embed_only")
    try:
        if noised and settings.placement == "output":
            raise ConfigError('privacy.placement "output": noise behind a kink does not smooth it.')
        noise, hidden = (settings.noise, settings.layers) if noised else (0.0, ())
        layers = chain_of(model, noise, hidden, settings.layer_noise)
    except ConfigError as error:
        return {"no_constants": str(error)}
    head = _head_slope(plan.head)
    curvature = LARGEST_CURVATURES[plan.task.loss] * head**2
    found = smoothness(layers, features, slope * head, curvature, plan.config.optimiser.l2)
    return {
        "layers": [asdict(layer) for layer in found.layers],
        "bound": found.joint,
        "paper": found.paper,
        "clipped": _clipped_share(layers, features, settings.clip if noised else 0.0),
    }


def _head_slope(head: nn.Module) -> float:
    """The head's Lipschitz constant: its affine layers' norms, multiplied."""
    weights = [layer.weight.detach() for layer in head.modules() if isinstance(layer, nn.Linear)]
    return math.prod(float(torch.linalg.matrix_norm(weight, 2)) for weight in weights)


@torch.no_grad()
def _clipped_share(layers: Sequence[Layer], features: Tensor, clip: float) -> float:
    """The part of the rows, without noise, that the clip changes."""
    values = features.flatten(1)
    for layer in layers[:-1]:
        values = layer.activation(layer.linear(values))
    return float((layers[-1].linear(values).norm(dim=1) > clip).float().mean()) if clip else 0.0


def _step_sizes(config: Config, smooth: float, delay: int | None, clients: int) -> dict[str, Any]:
    """The theorems' step sizes, at the first and at the last iteration."""
    if not 0 < smooth < math.inf:
        return {}
    last, constants = config.stop.updates, config.optimiser.constants
    found: dict[str, stepsizes.StepSize] = {}
    l2, counts = config.optimiser.l2, expected_activations(config, clients)
    rarest = min(counts) / sum(counts)
    if delay is not None:
        found["nonconvex-bounded"] = stepsizes.nonconvex_bounded(
            smooth, delay, last, constants.get("c_eta", 1.0)
        )
        if l2:
            found["strongly-convex-bounded"] = stepsizes.strongly_convex_bounded(smooth, l2, delay, rarest)
    if "rho" in constants and "pbar" in constants:
        tail = (constants["rho"], constants["pbar"])
        found["nonconvex-stochastic"] = stepsizes.nonconvex_stochastic(
            smooth, last, *tail, constants.get("c_eta", 1.0)
        )
        if l2:
            found["strongly-convex-stochastic"] = stepsizes.strongly_convex_stochastic(
                smooth, l2, rarest, *tail
            )
    return {name: {"first": size(0), "last": size(last)} for name, size in found.items()}


def _delay(config: Config, given: int | None) -> int | None:
    if given is not None:
        return given
    return config.rule.delay_bound or (0 if config.rule.name == "sync" else None)


def _notes(config: Config, delay: int | None, clients: Mapping[str, Any]) -> list[str]:
    notes = [f"{name}: {own['no_constants']}" for name, own in clients.items() if "no_constants" in own]
    if any(own.get("bound") == math.inf for own in clients.values()):
        notes.append("a layer without noise has no constant: set privacy.noise and privacy.layers")
    clipped = max((own["clipped"] for own in clients.values() if "clipped" in own), default=0.0)
    if clipped:
        notes.append(
            f"{clipped:.0%} of a client's rows are clipped: the clip has a kink that no noise smooths, and "
            "the last layer's constants hold for the other rows"
        )
    notes.append("a bound is of one client's parameters, all others fixed; the secant is of all together")
    if delay is None:
        notes.append("no delay bound: give --delay D, or optimiser.constants rho and pbar, for step sizes")
    if config.optimiser.l2:
        notes.append("strongly-convex step sizes are for an objective that is: a linear model, say")
    return notes


def _show(report: dict[str, Any], console: Console) -> None:
    table = Table(
        *(
            "client",
            "layer",
            "|w|",
            "kappa",
            "B",
            "E|u|",
            "E|u|^2",
            "L_b",
            "L_w",
            "[bright_black]paper L_w[/]",
        ),
        box=None,
        header_style="bold",
    )
    for name, own in report["clients"].items():
        for number, layer in enumerate(own.get("layers", ()), 1):
            keys = ("norm", "kappa", "reach", "input_norm", "input_square", "bias", "weight")
            paper = f"[bright_black]{layer['paper_weight']:.4g}[/]"
            table.add_row(name, str(number), *(f"{layer[key]:.4g}" for key in keys), paper)
    if table.row_count:
        console.print(table)
    for name, own in report["clients"].items():
        if "bound" in own:
            paper = f"[bright_black]{PAPER}: {own['paper']:.4g}[/]"
            console.print(f"{name}: all layers together at most {own['bound']:.4g}; {paper}", highlight=False)
    console.print(f"secant estimate of the whole objective: {report['secant']:.4g} (L is at least that)")
    _show_steps(report["step_sizes"], console)
    for note in report["notes"]:
        console.print(note, style="yellow", soft_wrap=True, highlight=False)


def _show_steps(found: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    table = Table("step size", "L by", "first", "last", box=None, header_style="bold")
    for source, sizes in found.items():
        for name, size in sizes.items():
            table.add_row(name, source, f"{size['first']:.4g}", f"{size['last']:.4g}")
    if table.row_count:
        console.print(table)
