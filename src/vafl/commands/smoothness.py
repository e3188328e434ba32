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
from rich.text import Text
from torch import Tensor, nn

from vafl.commands.configured import add_config_options, as_json, overrides
from vafl.commands.expected_usage import expected_activations
from vafl.commands.objective import Objective
from vafl.config import Config, read_config
from vafl.errors import ConfigError
from vafl.models.losses import LARGEST_CURVATURES, LARGEST_SLOPES
from vafl.privacy.mechanism.secant import secant
from vafl.privacy.mechanism.smoothness import Layer, chain_of, smoothness
from vafl.protocol.rules import Rule
from vafl.protocol.stepsizes import SCHEDULES
from vafl.run.assembly import limited_threads
from vafl.run.plan import Plan, make_plan

PAPER = "paper constant (block-diagonal only)"
_ROWS, _DRAWS = 2000, 4
_STEP = 0.01  # of a secant, relative to the parameters


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of `vafl smoothness`."""
    add_config_options(parser)
    parser.add_argument(
        "--delay",
        type=int,
        help="D, the largest delay to expect (default: rule.delay_bound; 0 for sync, centralised)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace, console: Console) -> None:
    """Prints each client's constants, a secant estimate for the whole objective, and step sizes."""
    plan = make_plan(read_config(options.config, overrides(options)))
    with limited_threads(plan.config.threads):
        report = _report(plan, options.delay)
    if options.json:
        sys.stdout.write(as_json(report))
    else:
        _show(report, console)


def _report(plan: Plan, delay: int | None) -> dict[str, Any]:
    objective = Objective(plan, _ROWS, _DRAWS)
    heaviest = 1.0 if plan.weights is None else float(plan.weights.max())  # row's weight in the loss
    bounded = plan.task.loss in LARGEST_SLOPES
    slope = heaviest * LARGEST_SLOPES[plan.task.loss] if bounded else objective.largest_slope()
    names = [party.name for party in plan.data.parties]
    clients = {
        name: _constants(plan, model, features, slope, heaviest)
        for name, model, features in zip(names, plan.models, objective.features, strict=True)
    }
    here = objective.here
    estimate = secant(objective.gradient, here, _STEP * max(1.0, float(here.norm())))
    bound = max(own.get("bound", math.inf) for own in clients.values())
    delay = _delay(plan.config, delay)
    found, mu = {"secant estimate": estimate, "largest client's bound": bound}, objective.strong_convexity()
    return {
        "clients": clients,
        "secant": estimate,
        "bound": bound,
        "strong_convexity": mu,
        "step_sizes": {
            source: _step_sizes(plan.config, smooth, mu, delay, len(names))
            for source, smooth in found.items()
        },
        "notes": _notes(plan.config, mu, delay, clients),
    }


def _constants(
    plan: Plan, model: nn.Module, features: Tensor, slope: float, heaviest: float
) -> dict[str, Any]:
    """Return a client's constants.

    Args:
        slope: the largest slope of a row's loss, its weight included.
        heaviest: the largest weight of a row.
    """
    settings = plan.config.privacy
    noised = settings.protection.noises_uploads
    try:
        if noised and settings.placement == "output":
            raise ConfigError(
                "VFL-9131", 'privacy.placement "output": noise behind a kink does not smooth it.'
            )
        noise, hidden = (settings.noise, settings.layers) if noised else (0.0, ())
        layers = chain_of(model, noise, hidden, settings.layer_noise)
    except ConfigError as error:
        return {"no_constants": str(error)}
    head = _head_slope(plan.head)
    curvature = heaviest * LARGEST_CURVATURES[plan.task.loss] * head**2
    optimiser = plan.config.optimiser
    found = smoothness(layers, features, slope * head, curvature, optimiser.l2 + optimiser.decay)
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


def _step_sizes(config: Config, smooth: float, mu: float, delay: int | None, clients: int) -> dict[str, Any]:
    """The theorems' step sizes of the clients, at the first and at the last iteration.

    Where a step takes t clients, the probabilities q_m sum to t, and the proofs carry over with
    eta_0 = t eta_m: then eta_m is what they have for t L and c_eta / t. Without delay eta_0 = eta_m will do.
    """
    if not 0 < smooth < math.inf:
        return {}
    last, given = config.stop.updates, config.optimiser.constants
    counts = expected_activations(config, clients)
    delays: dict[str, dict[str, Any]] = {} if delay is None else {"bounded": {"D": delay}}
    if "rho" in given and "pbar" in given:
        delays["stochastic"] = {"rho": given["rho"], "pbar": given["pbar"]}
    found: dict[str, Any] = {}
    for kind, own in delays.items():
        t = _times_the_clients(config, own.get("D"), clients)
        cautious = {"L": t * smooth, **own}
        theorems = {"nonconvex": {**cautious, "K": last, "c_eta": given.get("c_eta", 1.0) / t}}
        if mu:
            q_min = Rule.of(config.rule, clients).quorum * min(counts) / sum(counts)
            theorems["strongly-convex"] = {**cautious, "mu": mu, "q_min": q_min}
        for theorem, constants in theorems.items():
            name = f"{theorem}-{kind}"
            size = SCHEDULES[name](**constants)
            found[name] = {"first": size(0), "last": size(last), "head": t, "constants": constants}
    return found


def _times_the_clients(config: Config, delay: int | None, clients: int) -> int:
    """eta_0 / eta_m."""
    return 1 if delay == 0 else Rule.of(config.rule, clients).quorum


def _delay(config: Config, given: int | None) -> int | None:
    if given is not None:
        return given
    return config.rule.delay_bound or (0 if config.rule.name in ("sync", "centralised") else None)


def _notes(config: Config, mu: float, delay: int | None, clients: Mapping[str, Any]) -> list[str]:
    notes = [f"{name}: {own['no_constants']}" for name, own in clients.items() if "no_constants" in own]
    if any(own.get("bound") == math.inf for own in clients.values()):
        notes.append(
            "a layer without noise has no constant by Theorem 5, smooth as it may be without: for one, set "
            "privacy.noise and privacy.layers"
        )
    clipped = max((own["clipped"] for own in clients.values() if "clipped" in own), default=0.0)
    if clipped:
        notes.append(
            f"{clipped:.0%} of a client's rows are clipped: the clip has a kink that no noise smooths, and "
            "the last layer's constants hold for the other rows"
        )
    notes.append("a bound is of one client's parameters, all others fixed; the secant is of all together")
    if delay is None:
        notes.append("no delay bound: give --delay D, or optimiser.constants rho and pbar, for step sizes")
    if mu:
        notes.append(f"the objective is strongly convex with mu {mu:.4g} wherever no row is clipped")
    elif config.optimiser.l2:
        notes.append(
            "no mu is known, so no strongly-convex step sizes: optimiser.l2 leaves out the head. With linear "
            "embeddings and a bias head sgd's weight decay is a mu: optimiser.options = { weight_decay = X }"
        )
    t = _times_the_clients(config, delay, len(clients))
    if t > 1:
        notes.append(
            f"a step takes t = {t} clients: the step sizes are theirs, and the head's are t times as large. "
            f"Set server_step_size to {t} times step_size; L among the constants is t times L"
        )
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
        ),
        box=None,
        header_style="bold",
    )
    table.add_column(Text("paper L_w", "bright_black"))
    for name, own in report["clients"].items():
        for number, layer in enumerate(own.get("layers", ()), 1):
            keys = ("norm", "kappa", "reach", "input_norm", "input_square", "bias", "weight")
            paper = Text(f"{layer['paper_weight']:.4g}", "bright_black")
            table.add_row(name, str(number), *(f"{layer[key]:.4g}" for key in keys), paper)
    if table.row_count:
        console.print(table)
    for name, own in report["clients"].items():
        if "bound" in own:
            together = f"{name}: all layers together at most {own['bound']:.4g}; "
            paper = Text(f"{PAPER}: {own['paper']:.4g}", "bright_black")
            console.print(Text.assemble(together, paper))
    console.print(f"secant estimate of the whole objective: {report['secant']:.4g} (L is at least that)")
    _show_steps(report["step_sizes"], console)
    for note in report["notes"]:
        console.print(note, style="yellow")


def _show_steps(found: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    table = Table("step size", "L by", "first", "last", "the head's", box=None, header_style="bold")
    for source, sizes in found.items():
        for name, size in sizes.items():
            ends = (f"{size[end]:.4g}" for end in ("first", "last"))
            table.add_row(name, source, *ends, f"{size['head']} times that")
    if table.row_count:
        console.print(table)
