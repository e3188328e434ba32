"""A study: one experiment, described by a TOML file in experiments/studies.

`[config]` is a vafl configuration. A study also has variants, each a list of changes to that configuration, a
grid of step sizes for all variants, and the targets of its figures.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).parent / "studies"
ASYNC, SYNC, CENTRALISED = "async", "sync", "centralised"


@dataclass(frozen=True)
class Variant:
    """One of the compared variants.

    Attributes:
        set: changes to the configuration, as `--set` takes them.
        like: name of another variant whose step size is used; empty: the grid decides.
        step_size: a fixed step size; 0: the grid decides.
        seeds: number of seeds, if fewer than for the other variants.
        series, x, tick: in a sweep, its line, its place on the axis, and its label there if not x.
        colour, line: the style of its curve.
    """

    name: str
    set: tuple[str, ...] = ()
    like: str = ""
    step_size: float = 0.0
    seeds: int = 0
    series: str = ""
    x: float = 0.0
    tick: str = ""
    colour: str = "BLUE"
    line: str = "-"


@dataclass(frozen=True)
class Study:
    """A study.

    Attributes:
        licensed: its data need a licence, so it runs only if it is named.
        paper: what the paper claims; empty for studies beyond the paper.
        note: how it was set up where the paper leaves this open, and how to read the result.
        before: earlier set-ups and their results on the test rows. A result after several attempts is worth
            less than a first one, so the report shows them.
        why: for the report: why a target is not met.
        figure: `race` draws the metric against seconds and the loss against passes over the data; `bytes`
            the metric against seconds and megabytes; `sweep` the time of each x; `bars` the final metrics.
        config: a vafl configuration. step_sizes: the grid of step sizes, the same for every variant.
        tuning_seconds: length of the runs that choose the step size, if they are shorter. They use
        `tuning_seeds` seeds. held_out: share of the training rows to choose step sizes on. as_good: a step
        size whose final metric is at most this much below the best counts as equally good. level: the metric
        whose time is measured; 0 means sync's final metric minus `drop`. within: how far async may end below
        centralised, or None for no target. share: share of sync's time to the level that async may take, or
        None for no target. axis: what the x of a sweep is. smooth: curves show the mean over this many
        seconds, if there are few test rows. windows: [start, end] to shade, in seconds. floor: where the
        metric's axis begins. quick: changes to the configuration for --quick.
    """

    name: str
    title: str
    config: dict[str, Any]
    step_sizes: tuple[float, ...]
    variants: tuple[Variant, ...]
    licensed: bool = False
    paper: str = ""
    note: str = ""
    before: str = ""
    why: str = ""
    figure: Literal["race", "bytes", "sweep", "bars"] = "race"
    seeds: int = 5
    tuning_seconds: float = 0.0
    tuning_seeds: int = 1
    held_out: float = 1 / 6
    as_good: float = 0.0025
    level: float = 0.0
    drop: float = 0.005
    within: float | None = None
    share: float | None = None
    axis: str = ""
    metric: str = "accuracy"
    floor: float = 0.0
    quick: tuple[str, ...] = ()
    is_quick: bool = False
    smooth: float = 0.0
    windows: tuple[tuple[float, float], ...] = ()

    def variant(self, name: str) -> Variant:
        return next(variant for variant in self.variants if variant.name == name)

    def has(self, name: str) -> bool:
        return any(variant.name == name for variant in self.variants)

    def with_seeds(self, most: int) -> "Study":
        """Return the study with at most this many seeds."""
        return replace(self, seeds=min(self.seeds, most))

    def scaled_down(self) -> "Study":
        """Return the study for --quick: one seed, and only the middle of the grid."""
        middle = self.step_sizes[len(self.step_sizes) // 2]
        return replace(self, seeds=1, step_sizes=(middle,), tuning_seconds=0.0, tuning_seeds=1, is_quick=True)


def read_study(name: str) -> Study:
    """Return the study with this name."""
    document = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    variants = tuple(
        Variant(**{key: _frozen(value) for key, value in each.items()}) for each in document.pop("variants")
    )
    config = document.pop("config")
    others = {key: _frozen(value) for key, value in document.items()}
    return Study(name=name, config=config, variants=variants, **others)


def names() -> list[str]:
    """Return the names of all studies, those of the paper first."""
    return sorted((path.stem for path in FOLDER.glob("*.toml")), key=_order)


def _order(name: str) -> tuple[int, str]:
    known = _SEQUENCE.index(name) if name in _SEQUENCE else len(_SEQUENCE)
    return known, name


_SEQUENCE: Sequence[str] = (
    "mnist",
    "fashion_mnist",
    "cifar10",
    "parkinson",
    "modelnet40",
    "mortality",
    "mortality_mimic3",
    "refresh",
    "delay_bound",
    "dropout",
    "clients",
    "encodings",
    "local_steps",
    "adult",
    "credit_default",
)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
