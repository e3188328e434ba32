"""`vafl calibrate`: what noise a budget needs in the run of a configuration, and what its noise is worth."""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from vafl.commands.configured import add_config_options, as_json, overrides
from vafl.commands.course import courses_of
from vafl.config import from_document, read_document
from vafl.errors import ConfigError
from vafl.plan import a_party, make_plan
from vafl.privacy import accountant
from vafl.privacy.calibration import (
    NOT_VALID,
    Deviations,
    Mechanism,
    PaperCalibration,
    PrivateMode,
    calibrate,
    guarantee,
)
from vafl.privacy.exposure import Course, Exposure, expose, worst

_DELTA = 1e-5


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of `vafl calibrate`."""
    add_config_options(parser)
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--mu", type=float, help="the budget of a record, as Gaussian DP's mu")
    budget.add_argument("--epsilon", type=float, help="the same as epsilon, for --delta")
    parser.add_argument("--delta", type=float, help=f"default: privacy.delta, or {_DELTA}")
    parser.add_argument("--epochs", type=float, help="passes of every client (default: by stop and delays)")
    parser.add_argument(
        "--share", type=float, default=0.5, help="dp_train: the uploads' part of mu^2 (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace, console: Console) -> None:
    """Prints what each mode needs for the budget, and what the configuration's own noise guarantees."""
    document = read_document(options.config, overrides(options))
    wish = Wish.of(document.pop("privacy", {}), options)  # noise may be missing: that is the question
    config = from_document(document)
    plan = make_plan(config, party=a_party(config))
    courses = courses_of(plan, options.epochs)
    found = [expose(course) for course in courses]
    names = [party.name for party in plan.data.parties]
    report = _report(wish, courses, dict(zip(names, found, strict=True)))
    if options.json:
        sys.stdout.write(as_json(report))
    else:
        _show(report, console)


@dataclass(frozen=True)
class Wish:
    """What the privacy section and the command line ask for; 0 where they say nothing."""

    mode: str
    clip: float
    gradient_clip: float
    neighbours: Any
    noise: float
    gradient_noise: float
    delta: float
    mu: float
    share: float

    @classmethod
    def of(cls, section: Any, options: argparse.Namespace) -> "Wish":
        if not isinstance(section, dict):
            raise ConfigError(f"privacy must be a section. Found {section!r}.")
        neighbours = section.get("neighbours", "zero_out")
        if neighbours not in ("zero_out", "replace"):
            raise ConfigError(f"privacy.neighbours must be zero_out or replace. Found {neighbours!r}.")
        delta = _number(section, "delta", _DELTA) if options.delta is None else options.delta
        mu = _number(section, "mu_max", 0.0) if options.mu is None else options.mu
        if options.epsilon is not None:
            mu = accountant.mu(options.epsilon, delta)
        accountant.epsilon(1.0, delta)  # refuses a delta that is none
        return cls(
            mode=section.get("mode", "auto"),
            clip=_number(section, "clip", 0.0) or 1.0,
            gradient_clip=_number(section, "gradient_clip", 0.0) or 1.0,
            neighbours=neighbours,
            noise=_number(section, "noise", 0.0),
            gradient_noise=_number(section, "gradient_noise", 0.0),
            delta=delta,
            mu=mu,
            share=options.share,
        )

    def mechanism(self, mode: PrivateMode) -> Mechanism:
        return Mechanism(mode, self.clip, self.gradient_clip, self.neighbours)


def _number(section: dict[str, Any], key: str, default: float) -> float:
    value = section.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"privacy.{key} must be 0 or more. Found {value!r}.")
    return float(value)


def _report(wish: Wish, courses: Sequence[Course], clients: dict[str, Exposure]) -> dict[str, Any]:
    exposure = worst(list(clients.values()))
    course = max(courses, key=lambda course: course.activations)
    modes: tuple[PrivateMode, ...] = get_args(PrivateMode)
    report: dict[str, Any] = {
        "clients": {
            name: {"activations": own.activations, "uploads": one.uploads, **asdict(one)}
            for own, (name, one) in zip(courses, clients.items(), strict=True)
        },
        "clip": wish.clip,
        "gradient_clip": wish.gradient_clip,
        "neighbours": wish.neighbours,
        "delta": wish.delta,
        "notes": list(exposure.notes),
    }
    if wish.mu:
        report["budget"] = {"mu": wish.mu, "epsilon": accountant.epsilon(wish.mu, wish.delta)}
        report["to_set"] = {
            mode: asdict(calibrate(wish.mechanism(mode), exposure, wish.mu, wish.share)) for mode in modes
        }
        report["paper"] = _paper_noise(wish, course)
    if wish.noise:
        deviations = Deviations(wish.noise, wish.gradient_noise)
        worth = {
            mode: guarantee(wish.mechanism(mode), exposure, deviations)
            for mode in modes
            if mode != "dp_train" or wish.gradient_noise
        }
        report["as_configured"] = {
            "mode": wish.mode,
            **asdict(deviations),
            "worth": {
                mode: {"mu": mu, "epsilon": accountant.epsilon(mu, wish.delta)} for mode, mu in worth.items()
            },
            "paper": _paper_mu(wish, course),
        }
    if not (wish.mu or wish.noise):
        raise ConfigError(
            "there must be a budget to calibrate to, or noise to judge. Found none. Give --mu, or --epsilon "
            "with --delta, or set privacy.noise."
        )
    return report


def _papers(wish: Wish, course: Course) -> dict[str, PaperCalibration]:
    sensitivity = wish.mechanism("embed_only").sensitivity
    return {
        f"K counts {kind}": PaperCalibration(
            sensitivity, course.batch_size, course.rows, course.activations, kind == "samples"
        )
        for kind in ("minibatch steps", "samples")
    }


def _paper_noise(wish: Wish, course: Course) -> dict[str, Any]:
    forms = {
        name: {"first_order": paper.first_order(wish.mu), "central_limit": paper.central_limit(wish.mu)}
        for name, paper in _papers(wish, course).items()
    }
    return {"label": NOT_VALID, "noise": forms}


def _paper_mu(wish: Wish, course: Course) -> dict[str, Any]:
    forms = {
        name: {
            "first_order": paper.first_order_mu(wish.noise),
            "central_limit": paper.central_limit_mu(wish.noise),
        }
        for name, paper in _papers(wish, course).items()
    }
    return {"label": NOT_VALID, "mu": forms}


def _show(report: dict[str, Any], console: Console) -> None:
    console.print(_exposure_table(report["clients"]))
    for note in report["notes"]:
        console.print(f"  {note}", style="yellow", soft_wrap=True)
    terms = f"clip {report['clip']:g}, gradient_clip {report['gradient_clip']:g}, {report['neighbours']}"
    if "to_set" in report:
        budget = report["budget"]
        console.print(
            f"\nfor mu {budget['mu']:.4g}, that is epsilon {budget['epsilon']:.4g} at delta "
            f"{report['delta']:g}, set ({terms}):",
            soft_wrap=True,
        )
        console.print(_noise_table(report))
    if "as_configured" in report:
        own = report["as_configured"]
        second = f" and gradient_noise {own['gradient_noise']:g}" if own["gradient_noise"] else ""
        console.print(f"\nnoise {own['noise']:g}{second} ({terms}) is worth:", soft_wrap=True)
        console.print(_worth_table(own))


_WORDS = {
    "release_once": "however many epochs",
    "frozen": "the embedding stays as it is",
    "dp_train": "the embedding is trained",
    "embed_only": "the one valid bound for the paper's noise",
}


def _exposure_table(clients: dict[str, Any]) -> Table:
    table = Table(
        "most used record",
        *("activations", "uploads", "batches", "refreshes", "requests", "updates", "held out"),
        box=None,
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
        table.add_row(mode, f"{found['noise']:.4g}", second, _WORDS[mode])
    for reading, forms in report["paper"]["noise"].items():
        both = f"{forms['first_order']:.4g} (CLT: {forms['central_limit']:.4g})"
        table.add_row("the paper", both, "", f"{reading}: {NOT_VALID}", style="bright_black")
    return table


def _worth_table(own: dict[str, Any]) -> Table:
    table = Table("mode", "mu", "epsilon", "", box=None, header_style="bold")
    for mode, found in own["worth"].items():
        table.add_row(mode, f"{found['mu']:.4g}", f"{found['epsilon']:.4g}", "")
    for reading, forms in own["paper"]["mu"].items():
        both = f"{forms['first_order']:.4g} (CLT: {forms['central_limit']:.4g})"
        table.add_row("the paper", both, "", f"{reading}: {NOT_VALID}", style="bright_black")
    return table
