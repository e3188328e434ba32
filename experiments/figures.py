"""The style of the experiments' figures, and how they are saved."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vafl.arrays import Doubles

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, BLACK, GREY = "#CC79A7", "#56B4E9", "#000000", "#7F7F7F"

_STYLE: dict[Any, Any] = {
    "font.family": "serif",
    "font.size": 8,
    "mathtext.fontset": "dejavuserif",
    "axes.titlesize": 8.5,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.4,
    "lines.linewidth": 1.3,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "svg.hashsalt": "vafl",
}


@contextmanager
def drawing(path: Path, panels: int, height: float = 2.9) -> Iterator[list[Axes]]:
    """Yield panels side by side, as wide as a page of text; save them as PNG and SVG at the end.

    The same drawing gives the same bytes.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.0, height), layout="constrained")
        yield list(figure.subplots(1, panels, squeeze=False)[0])
        figure.savefig(path.with_suffix(".png"), dpi=200)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def band(axes: Axes, x: Doubles, runs: Sequence[Doubles], colour: str, label: str, **line: Any) -> None:
    """Draw the mean of several runs, and the range from the lowest to the highest."""
    stacked = np.stack(runs)
    axes.fill_between(x, stacked.min(axis=0), stacked.max(axis=0), color=colour, alpha=0.2, linewidth=0)
    axes.plot(x, stacked.mean(axis=0), color=colour, label=label, **line)
