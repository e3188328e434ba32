"""`vafl calibrate`: find the noise that a privacy budget needs, and the guarantee of the configured noise."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import tomli_w
from rich.console import Console
from rich.table import Table

from vafl.commands.configured import add_config_options, as_json, overrides
from vafl.commands.expected_usage import expected_usages
from vafl.config import from_document, read_document
from vafl.errors import ConfigError
from vafl.privacy.analysis import accountant
from vafl.privacy.analysis.calibration import (
    NOT_VALID,
    Deviations,
    Mechanism,
    PaperCalibration,
    calibrate,
    guarantee,
)
from vafl.privacy.analysis.exposure import ExpectedUsage, Exposure, expose, worst
from vafl.privacy.modes import DEFAULT_PRIVATE_MODE, MODES, PrivateMode
from vafl.privacy.settings import UNLIMITED, PrivacySettings
from vafl.run.plan import a_party, make_plan


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vafl calibrate`."""
    add_config_options(parser)
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--mu", type=float, help="the budget of a record, as mu of Gaussian differential privacy"
    )
    budget.add_argument("--epsilon", type=float, help="the budget as epsilon, for --delta")
    parser.add_argument("--delta", type=float, help="default: privacy.delta")
    parser.add_argument(
        "--epochs", type=float, help="passes of every client over its rows (default: from stop and delays)"
    )
    parser.add_argument(
        "--share", type=float, default=0.5, help="dp_train: the share of mu^2 for uploads (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace, console: Console) -> None:
    """Print the noise that each mode needs for the budget, and the guarantee of the configured noise."""
    document = read_document(options.config, overrides(options))
    config = from_document({**document, "privacy": _noised(document.get("privacy", {}))})
    wish = Wish.of(config.privacy, document.get("privacy", {}), options)
    plan = make_plan(replace(config, privacy=PrivacySettings()), party=a_party(config))
    usages = expected_usages(plan, options.epochs)
    names = [party.name for party in plan.data.parties]
    report = _report(wish, usages, dict(zip(names, map(expose, usages), strict=True)))
    if options.json:
        sys.stdout.write(as_json(report))
    else:
        _show(report, console)


def _noised(section: Any) -> Any:
    """Return the privacy section with placeholders for missing noise and budget, so that it can be validated.

    Calibration computes those values, so the user need not set them.
    """
    if not isinstance(section, dict):
        return section  # the config reader refuses it
    mode = section.get("mode", "auto")
    mode = DEFAULT_PRIVATE_MODE if mode in ("auto", "none") else mode
    protection = next((protection for name, protection in MODES.items() if name == mode), None)
    if protection is None:
        return section  # an unknown mode; the config reader refuses it
    budget = {"mu_max": section.get("mu_max", UNLIMITED)} if protection.guaranteed else {}
    noise = {name: section.get(name) or 1.0 for name in protection.needs}
    return {**section, **noise, **budget, "mode": mode}


@dataclass(frozen=True)
class Wish:
    """The request of the privacy section and the command line.

    Attributes:
        settings: the privacy settings, with placeholders from `_noised`.
        own: the configured noise; 0 if not configured.
        delta: the delta for epsilon.
        mu: the budget; 0 if there is none.
        share: the share of mu^2 for uploads.
    """

    settings: PrivacySettings
    own: Deviations
    delta: float
    mu: float
    share: float

    @classmethod
    def of(cls, settings: PrivacySettings, section: dict[str, Any], options: argparse.Namespace) -> "Wish":
        delta = settings.delta if options.delta is None else options.delta
        mu = settings.limit if options.mu is None else options.mu
        if options.epsilon is not None:
            mu = accountant.mu(options.epsilon, delta)
        mu = 0.0 if math.isinf(mu) else mu
        accountant.epsilon(1.0, delta)  # raises if delta is out of range
        configured = Deviations(float(section.get("noise", 0.0)), float(section.get("gradient_noise", 0.0)))
        return cls(settings, configured, delta, mu, options.share)

    def mechanism(self, mode: PrivateMode) -> Mechanism:
        settings = self.settings
        return Mechanism(mode, settings.clip or 1.0, settings.gradient_clip or 1.0, settings.neighbours)


def _report(wish: Wish, usages: Sequence[ExpectedUsage], clients: dict[str, Exposure]) -> dict[str, Any]:
    exposure = worst(list(clients.values()))
    usage = max(usages, key=lambda usage: usage.activations)
    modes: tuple[PrivateMode, ...] = get_args(PrivateMode)
    clipped = wish.mechanism(DEFAULT_PRIVATE_MODE)

    def worth(mu: float) -> dict[str, Any]:
        """Return mu as epsilon, and both for a person whose record all clients hold."""
        person = accountant.compose([mu] * len(clients))
        return {
            "mu": mu,
            "epsilon": accountant.epsilon(mu, wish.delta),
            "person": {"mu": person, "epsilon": accountant.epsilon(person, wish.delta)},
        }

    report: dict[str, Any] = {
        "clients": {
            name: {"activations": used.activations, "uploads": exposed.uploads, **asdict(exposed)}
            for used, (name, exposed) in zip(usages, clients.items(), strict=True)
        },
        "clip": clipped.clip,
        "gradient_clip": clipped.gradient_clip,
        "neighbours": clipped.neighbours,
        "delta": wish.delta,
        "notes": list(exposure.notes),
    }
    if wish.mu:
        report["budget"] = worth(wish.mu)
        report["to_set"] = {
            mode: asdict(calibrate(wish.mechanism(mode), exposure, wish.mu, wish.share)) for mode in modes
        }
        report["section"] = _section(wish, exposure)
        report["paper"] = _paper_noise(wish, usage)
    if wish.own.noise:
        mus = {
            mode: guarantee(wish.mechanism(mode), exposure, wish.own)
            for mode in modes
            if not MODES[mode].noises_updates or wish.own.gradient_noise
        }
        report["as_configured"] = {
            "mode": wish.settings.kind,
            **asdict(wish.own),
            "worth": {mode: worth(mu) for mode, mu in mus.items()},
            "paper": _paper_mu(wish, usage),
        }
    if not (wish.mu or wish.own.noise):
        raise ConfigError(
            "VFL-9021",
            "`vafl calibrate` needs a budget or configured noise. Found neither. Add --mu, or --epsilon with "
            "--delta, or set privacy.noise.",
        )
    return report


def _section(wish: Wish, exposure: Exposure) -> dict[str, Any]:
    """Return a [privacy] section that keeps the budget, for the configured mode or `dp_train`.

    It is for `dp_train` if the configured mode has no guarantee. Noise is rounded up and mu_max down, so that
    the planned uploads fit the budget.
    """
    modes: tuple[PrivateMode, ...] = get_args(PrivateMode)
    mode: PrivateMode = DEFAULT_PRIVATE_MODE
    if wish.settings.protection.guaranteed:
        mode = next(name for name in modes if name == wish.settings.kind)
    mechanism = wish.mechanism(mode)
    mu = _rounded(wish.mu, 6, math.floor)
    deviations = calibrate(mechanism, exposure, mu, wish.share)
    section: dict[str, Any] = {
        "mode": mode,
        "clip": mechanism.clip,
        "noise": _rounded(deviations.noise, 4, math.ceil),
    }
    if MODES[mode].noises_updates:
        section["gradient_clip"] = mechanism.gradient_clip
        section["gradient_noise"] = _rounded(deviations.gradient_noise, 4, math.ceil)
    return section | {"neighbours": mechanism.neighbours, "mu_max": mu, "delta": wish.delta}


def _rounded(value: float, digits: int, way: Callable[[float], int]) -> float:
    """Round `value` to `digits` significant digits, with math.floor or math.ceil as `way`."""
    if float(f"{value:.{digits}g}") == value:
        return value
    place = digits - 1 - math.floor(math.log10(value))
    return float(f"{way(value * 10.0**place) / 10.0**place:.{digits}g}")


def _papers(wish: Wish, usage: ExpectedUsage) -> dict[str, PaperCalibration]:
    """Return both readings of the paper's theorem, which is ambiguous about what K counts."""
    sensitivity = wish.mechanism("embed_only").sensitivity
    return {
        f"K counts {kind}": PaperCalibration(
            sensitivity, usage.batch_size, usage.rows, usage.activations, kind == "samples"
        )
        for kind in ("minibatch steps", "samples")
    }


def _paper_noise(wish: Wish, usage: ExpectedUsage) -> dict[str, Any]:
    forms = {
        name: {"first_order": paper.first_order(wish.mu), "central_limit": paper.central_limit(wish.mu)}
        for name, paper in _papers(wish, usage).items()
    }
    return {"label": NOT_VALID, "noise": forms}


def _paper_mu(wish: Wish, usage: ExpectedUsage) -> dict[str, Any]:
    forms = {
        name: {
            "first_order": paper.first_order_mu(wish.own.noise),
            "central_limit": paper.central_limit_mu(wish.own.noise),
        }
        for name, paper in _papers(wish, usage).items()
    }
    return {"label": NOT_VALID, "mu": forms}


def _show(report: dict[str, Any], console: Console) -> None:
    console.print("how often a run uses each client's most used record:")
    console.print(_exposure_table(report["clients"]))
    for note in report["notes"]:
        console.print(f"  {note}", style="yellow")
    terms = f"clip {report['clip']:g}, gradient_clip {report['gradient_clip']:g}, {report['neighbours']}"
    if "to_set" in report:
        budget = report["budget"]
        console.print(
            f"\nfor mu {budget['mu']:.4g}, which is epsilon {budget['epsilon']:.4g} at delta "
            f"{report['delta']:g}, set ({terms}):",
        )
        console.print(_noise_table(report))
        console.print(f"\n[privacy]\n{tomli_w.dumps(report['section'])}", end="")
        person = budget["person"]
        console.print(
            f"\nThis is the budget at one client. For a person whose record all {len(report['clients'])} "
            f"clients hold, the total is up to mu {person['mu']:.4g}, epsilon {person['epsilon']:.4g}: mu^2 "
            "adds up over clients."
        )
    if "as_configured" in report:
        configured = report["as_configured"]
        gradient_noise = configured["gradient_noise"]
        second = f" and gradient_noise {gradient_noise:g}" if gradient_noise else ""
        console.print(f"\nnoise {configured['noise']:g}{second} ({terms}) guarantees:")
        console.print(_worth_table(configured, len(report["clients"])))


def _exposure_table(clients: dict[str, Any]) -> Table:
    table = Table(
        "client",
        *("activations", "uploads", "batches", "refreshes", "requests", "updates", "held out"),
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    counts = ("activations", "uploads", "batches", "refreshes", "requests", "updates", "evaluations")
    for name, client in clients.items():
        table.add_row(name, *(f"{client[count]:,.0f}" for count in counts))
    return table


def _noise_table(report: dict[str, Any]) -> Table:
    table = Table("mode", "noise", "gradient_noise", "", box=None, header_style="bold")
    for mode, deviations in report["to_set"].items():
        second = f"{deviations['gradient_noise']:.4g}" if deviations["gradient_noise"] else ""
        table.add_row(mode, f"{deviations['noise']:.4g}", second, MODES[mode].summary)
    for reading, forms in report["paper"]["noise"].items():
        both = f"{forms['first_order']:.4g} (CLT: {forms['central_limit']:.4g})"
        table.add_row("the paper", both, "", f"{reading}: {NOT_VALID}", style="bright_black")
    return table


def _worth_table(configured: dict[str, Any], clients: int) -> Table:
    person = f"a person at all {clients} clients"
    table = Table("mode", "mu", "epsilon", person, box=None, header_style="bold")
    for mode, worth in configured["worth"].items():
        both = f"mu {worth['person']['mu']:.4g}, epsilon {worth['person']['epsilon']:.4g}"
        table.add_row(mode, f"{worth['mu']:.4g}", f"{worth['epsilon']:.4g}", both)
    for reading, forms in configured["paper"]["mu"].items():
        both = f"{forms['first_order']:.4g} (CLT: {forms['central_limit']:.4g})"
        table.add_row("the paper", both, "", f"{reading}: {NOT_VALID}", style="bright_black")
    return table
