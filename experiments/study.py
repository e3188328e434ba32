"""A study: one experiment, a TOML file in experiments/studies. What is compared, on what, and what is asked.

Beside `[config]`, which is a vafl configuration, a study names its variants, each a list of changes to that
configuration, the grid of step sizes that every variant gets, and what the figures must show.
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
    """One of the things compared.

    Attributes:
        set: changes of the configuration, as `--set` takes them.
        like: takes the step size found for that variant; empty: the grid decides.
        step_size: fixed beforehand; 0: the grid decides.
        seeds: how many, if fewer than the study's others.
        series, x, tick: its line and its place on the axis, in a sweep, and what is written there if not x.
        colour, line: of its curve.
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
    """An experiment.

    Attributes:
        licensed: its data are not free to get, so it is made only if it is named.
        paper: what the paper claims; empty for what goes beyond it.
        note: how it was set up where the paper leaves it open, and what to make of the result.
        before: set-ups tried earlier and what they gave on the test rows: a result after several tries is
            worth less than a first one, and the report says so.
        why: what keeps it from what is asked, for the report if something does.
        figure: `race` draws the metric against seconds and the loss against passes over the data; `bytes`
            the metric against seconds and megabytes; `sweep` what each x took; `bars` the final metrics.
        config: a vafl configuration.
        step_sizes: the grid, the same for every variant.
        tuning_seconds: of the runs that choose the step size, if they are shorter; on `tuning_seeds` seeds.
        held_out: share of the training rows to choose step sizes on.
        as_good: of 1; a step size that ends no further below the best there is as good, and may be faster.
        level: the metric that is timed; 0 means sync's final one, less `drop`.
        within: what async may end below centralised (of 1), or None if nothing is asked.
        share: of sync's time to the level that async may take, or None.
        axis: what the x of a sweep is.
        smooth: curves are drawn as the mean over so many seconds, where test rows are too few for less.
        windows: [start, end] to shade, in seconds.
        floor: where the metric's axis begins.
        quick: changes of the configuration for a first look.
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
        """The same with at most so many seeds."""
        return replace(self, seeds=min(self.seeds, most))

    def scaled_down(self) -> "Study":
        """For a first look: one seed, and no grid but its middle."""
        middle = self.step_sizes[len(self.step_sizes) // 2]
        return replace(self, seeds=1, step_sizes=(middle,), tuning_seconds=0.0, tuning_seeds=1, is_quick=True)


def read_study(name: str) -> Study:
    """The study of that name."""
    document = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    variants = tuple(
        Variant(**{key: _frozen(value) for key, value in each.items()}) for each in document.pop("variants")
    )
    config = document.pop("config")
    others = {key: _frozen(value) for key, value in document.items()}
    return Study(name=name, config=config, variants=variants, **others)


def names() -> list[str]:
    """Every study there is, those of the paper first."""
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
