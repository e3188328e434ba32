"""`vafl smoothness`: compute how smooth the noise makes the objective, and step sizes from that."""

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
_STEP = 0.01  # length of a secant, relative to the norm of the parameters


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vafl smoothness`."""
    add_config_options(parser)
    parser.add_argument(
        "--delay",
        type=int,
        help="D, the largest delay to expect (default: rule.delay_bound; 0 for sync, centralised)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace, console: Console) -> None:
    """Print each client's constants, a secant estimate for the whole objective, and step sizes."""
    plan = make_plan(read_config(options.config, overrides(options)))
    with limited_threads(plan.config.threads):
        report = _report(plan, options.delay)
    if options.json:
        sys.stdout.write(as_json(report))
    else:
        _show(report, console)


def _report(plan: Plan, delay: int | None) -> dict[str, Any]:
    objective = Objective(plan, _ROWS, _DRAWS)
    heaviest = 1.0 if plan.weights is None else float(plan.weights.max())  # largest weight of a row
    bounded = plan.task.loss in LARGEST_SLOPES
    slope = heaviest * LARGEST_SLOPES[plan.task.loss] if bounded else objective.largest_slope()
    names = [party.name for party in plan.data.parties]
    clients = {
        name: _constants(plan, model, features, slope, heaviest)
        for name, model, features in zip(names, plan.models, objective.features, strict=True)
    }
    here = objective.here
    estimate = secant(objective.gradient, here, _STEP * max(1.0, float(here.norm())))
    bound = max(client.get("bound", math.inf) for client in clients.values())
    delay = _delay(plan.config, delay)
    smoothness_by = {"secant estimate": estimate, "largest client's bound": bound}
    mu = objective.strong_convexity()
    return {
        "clients": clients,
        "secant": estimate,
        "bound": bound,
        "strong_convexity": mu,
        "step_sizes": {
            source: _step_sizes(plan.config, smooth, mu, delay, len(names))
            for source, smooth in smoothness_by.items()
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
                "VFL-9131",
                'privacy.placement "output" adds noise after the activation, which does not smooth its kink.',
            )
        noise, hidden = (settings.noise, settings.layers) if noised else (0.0, ())
        layers = chain_of(model, noise, hidden, settings.layer_noise)
    except ConfigError as error:
        return {"no_constants": str(error)}
    head = _head_slope(plan.head)
    curvature = heaviest * LARGEST_CURVATURES[plan.task.loss] * head**2
    optimiser = plan.config.optimiser
    constants = smoothness(layers, features, slope * head, curvature, optimiser.l2 + optimiser.decay)
    return {
        "layers": [asdict(layer) for layer in constants.layers],
        "bound": constants.joint,
        "paper": constants.paper,
        "clipped": _clipped_share(layers, features, settings.clip if noised else 0.0),
    }


def _head_slope(head: nn.Module) -> float:
    """Return the head's Lipschitz constant: the product of the norms of its affine layers."""
    weights = [layer.weight.detach() for layer in head.modules() if isinstance(layer, nn.Linear)]
    return math.prod(float(torch.linalg.matrix_norm(weight, 2)) for weight in weights)


@torch.no_grad()
def _clipped_share(layers: Sequence[Layer], features: Tensor, clip: float) -> float:
    """Return the share of rows whose outputs without noise exceed the clip."""
    values = features.flatten(1)
    for layer in layers[:-1]:
        values = layer.activation(layer.linear(values))
    return float((layers[-1].linear(values).norm(dim=1) > clip).float().mean()) if clip else 0.0


def _step_sizes(config: Config, smooth: float, mu: float, delay: int | None, clients: int) -> dict[str, Any]:
    """Return the clients' step sizes by the theorems, at the first and at the last iteration.

    If a step takes t clients, the probabilities q_m sum to t. The proofs still hold with eta_0 = t eta_m,
    where eta_m is the theorems' step size for t L and c_eta / t. Without delay, eta_0 = eta_m is sufficient.
    """
    if not 0 < smooth < math.inf:
        return {}
    last, known = config.stop.updates, config.optimiser.constants
    counts = expected_activations(config, clients)
    delays: dict[str, dict[str, Any]] = {} if delay is None else {"bounded": {"D": delay}}
    if "rho" in known and "pbar" in known:
        delays["stochastic"] = {"rho": known["rho"], "pbar": known["pbar"]}
    sizes: dict[str, Any] = {}
    for kind, delay_constants in delays.items():
        t = _times_the_clients(config, delay_constants.get("D"), clients)
        cautious = {"L": t * smooth, **delay_constants}
        theorems = {"nonconvex": {**cautious, "K": last, "c_eta": known.get("c_eta", 1.0) / t}}
        if mu:
            q_min = Rule.of(config.rule, clients).quorum * min(counts) / sum(counts)
            theorems["strongly-convex"] = {**cautious, "mu": mu, "q_min": q_min}
        for theorem, constants in theorems.items():
            name = f"{theorem}-{kind}"
            size = SCHEDULES[name](**constants)
            sizes[name] = {"first": size(0), "last": size(last), "head": t, "constants": constants}
    return sizes


def _times_the_clients(config: Config, delay: int | None, clients: int) -> int:
    """Return eta_0 / eta_m, the head's step size relative to the clients'."""
    return 1 if delay == 0 else Rule.of(config.rule, clients).quorum


def _delay(config: Config, option: int | None) -> int | None:
    """Return --delay, the delay bound of the rule, or None if no bound is known."""
    if option is not None:
        return option
    return config.rule.delay_bound or (0 if config.rule.name in ("sync", "centralised") else None)


def _notes(config: Config, mu: float, delay: int | None, clients: Mapping[str, Any]) -> list[str]:
    notes = [
        f"{name}: {client['no_constants']}" for name, client in clients.items() if "no_constants" in client
    ]
    if any(client.get("bound") == math.inf for client in clients.values()):
        notes.append(
            "Theorem 5 has no constant for a layer without noise, even if the layer is smooth; set "
            "privacy.noise and privacy.layers to get one"
        )
    clipped = max((client["clipped"] for client in clients.values() if "clipped" in client), default=0.0)
    if clipped:
        notes.append(
            f"{clipped:.0%} of a client's rows are clipped: noise does not smooth the kink of the clip, so "
            "the last layer's constants hold only for the other rows"
        )
    notes.append(
        "a bound covers one client's parameters, with all others fixed; the secant covers all parameters"
    )
    if delay is None:
        notes.append(
            "no delay bound: for step sizes, add --delay D, or set rho and pbar in optimiser.constants"
        )
    if mu:
        notes.append(f"the objective is strongly convex with mu {mu:.4g} wherever no row is clipped")
    elif config.optimiser.l2:
        notes.append(
            "no mu is known, so there are no strongly-convex step sizes: optimiser.l2 does not regularise "
            "the head. With linear embeddings and a bias head, the weight decay of sgd is a mu: "
            "optimiser.options = { weight_decay = X }"
        )
    t = _times_the_clients(config, delay, len(clients))
    if t > 1:
        notes.append(
            f"a step takes t = {t} clients: the step sizes are those of the clients, and the head's are t "
            f"times as large. Set server_step_size to {t} times step_size; the constant L is t times L"
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
    for name, client in report["clients"].items():
        for number, layer in enumerate(client.get("layers", ()), 1):
            keys = ("norm", "kappa", "reach", "input_norm", "input_square", "bias", "weight")
            paper = Text(f"{layer['paper_weight']:.4g}", "bright_black")
            table.add_row(name, str(number), *(f"{layer[key]:.4g}" for key in keys), paper)
    if table.row_count:
        console.print(table)
    for name, client in report["clients"].items():
        if "bound" in client:
            together = f"{name}: all layers together at most {client['bound']:.4g}; "
            paper = Text(f"{PAPER}: {client['paper']:.4g}", "bright_black")
            console.print(Text.assemble(together, paper))
    console.print(f"secant estimate of the whole objective: {report['secant']:.4g} (L is at least that)")
    _show_steps(report["step_sizes"], console)
    for note in report["notes"]:
        console.print(note, style="yellow")


def _show_steps(step_sizes: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    table = Table("step size", "L by", "first", "last", "the head's", box=None, header_style="bold")
    for source, sizes in step_sizes.items():
        for name, size in sizes.items():
            ends = (f"{size[end]:.4g}" for end in ("first", "last"))
            table.add_row(name, source, *ends, f"{size['head']} times that")
    if table.row_count:
        console.print(table)
