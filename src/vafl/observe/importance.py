"""The importance of parties and of their features: RUN/importance.json, a table and a plot."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table

from vafl.files import write_atomically
from vafl.models.metrics import Figures
from vafl.observe.plots import COLOURS, STYLE, save

IMPORTANCE = "importance"  # stem of the .json, .png and .svg files in a run folder
_MOST_BARS = 20


@dataclass(frozen=True)
class Measured:
    """The effect of permuting some features on the predictions, over all repeats.

    Attributes:
        loss_increase: mean increase of the loss.
        sd: standard deviation of the increase over the repeats.
        headline_drop: mean drop in quality by the headline metric; None if the rows do not define it.
        headline_sd: standard deviation of the drop over the repeats.
        rows: number of rows that were measured.
    """

    loss_increase: float
    sd: float
    headline_drop: float | None
    headline_sd: float | None
    rows: int


@dataclass(frozen=True)
class Importance:
    """The result of `vafl importance`.

    Attributes:
        metric: the name of the headline metric.
        loss: the name of the loss: log_loss, or rmse for numbers.
        rows: number of held-out rows that were measured.
        repeats: number of permutations of each group of features.
        baseline: every metric on the unpermuted rows.
        parties: client -> importance of all its features together.
        features: client -> group or column -> importance.
        refused: client -> the reason why something was not measured.
    """

    metric: str
    loss: str
    rows: int
    repeats: int
    baseline: Figures
    parties: Mapping[str, Measured]
    features: Mapping[str, Mapping[str, Measured]]
    refused: Mapping[str, str] = field(default_factory=dict)

    def write(self, run: Path) -> list[Path]:
        """Write importance.json and the plot into a run folder; return their paths."""
        path = run / f"{IMPORTANCE}.json"
        write_atomically(path, (json.dumps(asdict(self), indent=2) + "\n").encode())
        return [path, *plot_importance(self, run / IMPORTANCE)]

    def lines(self) -> list[tuple[str, str, Measured]]:
        """Return (party, features, importance): parties first, then features, the most important first."""
        parties = [(party, "all", measured) for party, measured in self.parties.items()]
        columns = [
            (party, name, measured)
            for party, by_name in self.features.items()
            for name, measured in by_name.items()
        ]
        return [*_sorted(parties), *_sorted(columns)]


def _sorted(lines: Sequence[tuple[str, str, Measured]]) -> list[tuple[str, str, Measured]]:
    return sorted(lines, key=lambda line: -line[2].loss_increase)


def table(importance: Importance) -> Table:
    """Return the importance of every party and feature as a table for a terminal."""
    shown = Table(box=None, pad_edge=False)
    for heading in ("party", "permuted features", f"{importance.loss} increase", f"{importance.metric} drop"):
        shown.add_column(heading, justify="right" if heading.endswith(("increase", "drop")) else "left")
    for party, name, measured in importance.lines():
        loss = _text(measured.loss_increase, measured.sd)
        shown.add_row(party, name, loss, _text(measured.headline_drop, measured.headline_sd))
    return shown


def _text(mean: float | None, deviation: float | None) -> str:
    if mean is None or deviation is None:
        return "\N{EN DASH}"
    return f"{mean:.4f} \N{PLUS-MINUS SIGN} {deviation:.4f}"


def plot_importance(importance: Importance, stem: Path) -> list[Path]:
    """Draw a bar for every party and, in a second panel, for the most important features.

    Returns:
        stem.png and stem.svg.
    """
    import matplotlib as mpl  # noqa: PLC0415 - slow to load
    from matplotlib.figure import Figure  # noqa: PLC0415

    lines = importance.lines()
    parties, columns = lines[: len(importance.parties)], lines[len(importance.parties) :][:_MOST_BARS]
    colours = {party: COLOURS[place % len(COLOURS)] for place, party in enumerate(importance.parties)}
    panels = [("party", parties), *([("feature", columns)] if columns else [])]
    most = max(len(own) for _, own in panels)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.5 * len(panels), 1.6 + 0.3 * max(most, 4)), layout="constrained")
        for axis, (what, own) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            places = range(len(own))
            axis.barh(
                places,
                [measured.loss_increase for *_, measured in own],
                xerr=[measured.sd for *_, measured in own],
                color=[colours.get(party, COLOURS[-1]) for party, *_ in own],
                error_kw={"ecolor": "#444444", "capsize": 2, "elinewidth": 1},
                height=0.65,
            )
            names = [party if what == "party" else f"{name} ({party})" for party, name, _ in own]
            axis.set_yticks(places, list(map(_label, names)))
            axis.set_ylim(most - 0.5, -0.5)  # same bar height in both panels, longest bar on top
            axis.grid(visible=False, axis="y")
            axis.set_xlabel(f"increase of {importance.loss} when permuted")
            axis.set_title(f"by {what}", loc="left")
        return save(figure, stem)


def _label(name: str) -> str:
    """Return the name shortened for an axis. A dollar sign is escaped: it would start a formula."""
    short = name if len(name) <= 40 else f"{name[:39]}\N{HORIZONTAL ELLIPSIS}"
    return short.replace("$", r"\$")
