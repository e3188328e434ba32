"""`vafl calibrate`: find the noise that a budget needs in a run, and say what configured noise is worth."""

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
from vafl.commands.expected_usage import courses_of
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
    """Those of `vafl calibrate`."""
    add_config_options(parser)
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--mu", type=float, help="the budget of a record, as Gaussian DP's mu")
    budget.add_argument("--epsilon", type=float, help="the same as epsilon, for --delta")
    parser.add_argument("--delta", type=float, help="default: privacy.delta")
    parser.add_argument("--epochs", type=float, help="passes of every client (default: by stop and delays)")
    parser.add_argument(
        "--share", type=float, default=0.5, help="dp_train: the uploads' part of mu^2 (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace, console: Console) -> None:
    """Prints what each mode needs for the budget, and what the configuration's own noise guarantees."""
    document = read_document(options.config, overrides(options))
    config = from_document({**document, "privacy": _noised(document.get("privacy", {}))})
    wish = Wish.of(config.privacy, document.get("privacy", {}), options)
    plan = make_plan(replace(config, privacy=PrivacySettings()), party=a_party(config))
    courses = courses_of(plan, options.epochs)
    found = [expose(course) for course in courses]
    names = [party.name for party in plan.data.parties]
    report = _report(wish, courses, dict(zip(names, found, strict=True)))
    if options.json:
        sys.stdout.write(as_json(report))
    else:
        _show(report, console)


def _noised(section: Any) -> Any:
    """The privacy section, completed so that it can be checked: noise and budget may be missing, for they are
    what calibration finds."""
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
    """What the privacy section and the command line ask for.

    Attributes:
        settings: as `_noised` has completed them.
        own: the noise that the section says; 0 where it says none, and so is mu.
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
        accountant.epsilon(1.0, delta)  # refuses a delta that is none
        own = Deviations(float(section.get("noise", 0.0)), float(section.get("gradient_noise", 0.0)))
        return cls(settings, own, delta, mu, options.share)

    def mechanism(self, mode: PrivateMode) -> Mechanism:
        settings = self.settings
        return Mechanism(mode, settings.clip or 1.0, settings.gradient_clip or 1.0, settings.neighbours)


def _report(wish: Wish, courses: Sequence[ExpectedUsage], clients: dict[str, Exposure]) -> dict[str, Any]:
    exposure = worst(list(clients.values()))
    course = max(courses, key=lambda course: course.activations)
    modes: tuple[PrivateMode, ...] = get_args(PrivateMode)
    clipped = wish.mechanism(DEFAULT_PRIVATE_MODE)

    def worth(mu: float) -> dict[str, Any]:
        """mu as epsilon, and both for a person whose record all clients hold."""
        person = accountant.compose([mu] * len(clients))
        return {
            "mu": mu,
            "epsilon": accountant.epsilon(mu, wish.delta),
            "person": {"mu": person, "epsilon": accountant.epsilon(person, wish.delta)},
        }

    report: dict[str, Any] = {
        "clients": {
            name: {"activations": own.activations, "uploads": one.uploads, **asdict(one)}
            for own, (name, one) in zip(courses, clients.items(), strict=True)
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
        report["paper"] = _paper_noise(wish, course)
    if wish.own.noise:
        found = {
            mode: guarantee(wish.mechanism(mode), exposure, wish.own)
            for mode in modes
            if not MODES[mode].noises_updates or wish.own.gradient_noise
        }
        report["as_configured"] = {
            "mode": wish.settings.kind,
            **asdict(wish.own),
            "worth": {mode: worth(mu) for mode, mu in found.items()},
            "paper": _paper_mu(wish, course),
        }
    if not (wish.mu or wish.own.noise):
        raise ConfigError(
            "VFL-9021",
            "there must be a budget to calibrate to, or noise to judge. Found none. Give --mu, or --epsilon "
            "with --delta, or set privacy.noise.",
        )
    return report


def _section(wish: Wish, exposure: Exposure) -> dict[str, Any]:
    """A [privacy] section that keeps to the budget, for the configured mode or, if that has no guarantee, for
    `dp_train`. Noise is rounded up, so that the planned uploads fit into mu_max."""
    modes: tuple[PrivateMode, ...] = get_args(PrivateMode)
    mode: PrivateMode = DEFAULT_PRIVATE_MODE
    if wish.settings.protection.guaranteed:
        mode = next(own for own in modes if own == wish.settings.kind)
    mechanism = wish.mechanism(mode)
    mu = _rounded(wish.mu, 6, math.floor)
    found = calibrate(mechanism, exposure, mu, wish.share)
    section: dict[str, Any] = {
        "mode": mode,
        "clip": mechanism.clip,
        "noise": _rounded(found.noise, 4, math.ceil),
    }
    if MODES[mode].noises_updates:
        section["gradient_clip"] = mechanism.gradient_clip
        section["gradient_noise"] = _rounded(found.gradient_noise, 4, math.ceil)
    return section | {"neighbours": mechanism.neighbours, "mu_max": mu, "delta": wish.delta}


def _rounded(value: float, digits: int, way: Callable[[float], int]) -> float:
    """Round `value` to `digits` significant digits, up or down as `way` does."""
    if float(f"{value:.{digits}g}") == value:
        return value
    place = digits - 1 - math.floor(math.log10(value))
    return float(f"{way(value * 10.0**place) / 10.0**place:.{digits}g}")


def _papers(wish: Wish, course: ExpectedUsage) -> dict[str, PaperCalibration]:
    sensitivity = wish.mechanism("embed_only").sensitivity
    return {
        f"K counts {kind}": PaperCalibration(
            sensitivity, course.batch_size, course.rows, course.activations, kind == "samples"
        )
        for kind in ("minibatch steps", "samples")
    }


def _paper_noise(wish: Wish, course: ExpectedUsage) -> dict[str, Any]:
    forms = {
        name: {"first_order": paper.first_order(wish.mu), "central_limit": paper.central_limit(wish.mu)}
        for name, paper in _papers(wish, course).items()
    }
    return {"label": NOT_VALID, "noise": forms}


def _paper_mu(wish: Wish, course: ExpectedUsage) -> dict[str, Any]:
    forms = {
        name: {
            "first_order": paper.first_order_mu(wish.own.noise),
            "central_limit": paper.central_limit_mu(wish.own.noise),
        }
        for name, paper in _papers(wish, course).items()
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
            f"\nfor mu {budget['mu']:.4g}, that is epsilon {budget['epsilon']:.4g} at delta "
            f"{report['delta']:g}, set ({terms}):",
        )
        console.print(_noise_table(report))
        console.print(f"\n[privacy]\n{tomli_w.dumps(report['section'])}", end="")
        person = budget["person"]
        console.print(
            f"\nThis is the budget at one client. A person whose record all {len(report['clients'])} clients "
            f"hold spends up to mu {person['mu']:.4g}, epsilon {person['epsilon']:.4g}: mu^2 adds up over "
            "clients."
        )
    if "as_configured" in report:
        own = report["as_configured"]
        second = f" and gradient_noise {own['gradient_noise']:g}" if own["gradient_noise"] else ""
        console.print(f"\nnoise {own['noise']:g}{second} ({terms}) is worth:")
        console.print(_worth_table(own, len(report["clients"])))


def _exposure_table(clients: dict[str, Any]) -> Table:
    table = Table(
        "client",
        *("activations", "uploads", "batches", "refreshes", "requests", "updates", "held out"),
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for name, own in clients.items():
        counts = ("activations", "uploads", "batches", "refreshes", "requests", "updates", "evaluations")
        table.add_row(name, *(f"{own[count]:,.0f}" for count in counts))
    return table


def _noise_table(report: dict[str, Any]) -> Table:
    table = Table("mode", "noise", "gradient_noise", "", box=None, header_style="bold")
    for mode, found in report["to_set"].items():
        second = f"{found['gradient_noise']:.4g}" if found["gradient_noise"] else ""
        table.add_row(mode, f"{found['noise']:.4g}", second, MODES[mode].summary)
    for reading, forms in report["paper"]["noise"].items():
        both = f"{forms['first_order']:.4g} (CLT: {forms['central_limit']:.4g})"
        table.add_row("the paper", both, "", f"{reading}: {NOT_VALID}", style="bright_black")
    return table


def _worth_table(own: dict[str, Any], clients: int) -> Table:
    person = f"a person at all {clients} clients"
    table = Table("mode", "mu", "epsilon", person, box=None, header_style="bold")
    for mode, found in own["worth"].items():
        both = f"mu {found['person']['mu']:.4g}, epsilon {found['person']['epsilon']:.4g}"
        table.add_row(mode, f"{found['mu']:.4g}", f"{found['epsilon']:.4g}", both)
    for reading, forms in own["paper"]["mu"].items():
        both = f"{forms['first_order']:.4g} (CLT: {forms['central_limit']:.4g})"
        table.add_row("the paper", both, "", f"{reading}: {NOT_VALID}", style="bright_black")
    return table
