"""Plot one run or several runs, as PNG and SVG.

Functions import matplotlib when they draw, because it is slow to load and many processes never draw.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vafl.models.metrics import shown_name
from vafl.observe.record import RecordedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0b6e99", "#d1495b", "#edae49", "#3f7d4f", "#6b4e9b", "#7a7a7a", "#c06014", "#2e86ab")
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "vafl",
    "svg.fonttype": "path",
}
_DECADES_ALONE = 100  # label only the decades if a logarithmic axis spans at least this factor
_LEAST_SPAN = 0.1  # smallest range of a metric's axis, so that noise from a few rows does not look large
_AXES = (
    ("seconds", "seconds (the run's clock)", lambda evaluation: evaluation.seconds),
    ("updates", "server updates", lambda evaluation: evaluation.updates),
    ("bytes", "megabytes, both ways", lambda evaluation: (evaluation.bytes_up + evaluation.bytes_down) / 1e6),
)


def plot_runs(runs: Sequence[RecordedRun], stem: Path) -> list[Path]:
    """Draw the headline metric against seconds, updates and bytes, and the loss against updates.

    A dot marks the evaluation whose models are kept. The runs must have the same headline metric.

    Returns:
        stem.png and stem.svg.
    """
    import matplotlib as mpl  # noqa: PLC0415 - slow to load
    from matplotlib.figure import Figure  # noqa: PLC0415

    watched = {run.watched for run in runs}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 7), layout="constrained")
        axes = figure.subplots(2, 2).ravel()
        for axis, (_, label, reading) in zip(axes, _AXES, strict=False):
            for number, run in enumerate(runs):
                _draw_metric(axis, run, COLOURS[number % len(COLOURS)], reading)
            axis.set_xlabel(label)
            axis.set_ylabel(f"{' or '.join(sorted(watched))} {shown_name(runs[0].metric)}")
            _focus(axis, runs)
        for number, run in enumerate(runs):
            _draw_loss(axes[3], run, COLOURS[number % len(COLOURS)])
        axes[3].set_xlabel("server updates")
        axes[3].set_ylabel("training loss (minibatches)")
        axes[3].set_yscale("log")
        _number_decades(axes[3])
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=min(6, len(runs)))
        return save(figure, stem)


def save(figure: "Figure", stem: Path) -> list[Path]:
    """Write stem.png and stem.svg, and return their paths."""
    paths = [stem.with_name(stem.name + ending) for ending in (".png", ".svg")]
    figure.savefig(paths[0], dpi=140)
    figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _draw_metric(axis: "Axes", run: RecordedRun, colour: str, reading: Any) -> None:
    """Draw the metric as a line. A centralised run, which has no clock and sends nothing, is a level line."""
    kept = run.summary["kept"]["updates"]
    across, values = (
        [reading(evaluation) for evaluation, _ in run.measured],
        [value for _, value in run.measured],
    )
    if across and across[-1] == 0:
        axis.axhline(values[-1], color=colour, linestyle="--", linewidth=1.4, label=run.name)
        return
    axis.plot(across, values, color=colour, linewidth=1.8, label=run.name)
    for evaluation, value in run.measured[:-1]:  # the end of the line needs no dot
        if evaluation.updates == kept:
            axis.plot(reading(evaluation), value, "o", color=colour, markersize=6)


def _draw_loss(axis: "Axes", run: RecordedRun, colour: str) -> None:
    known = [
        (evaluation.updates, evaluation.train_loss)
        for evaluation in run.evaluations
        if evaluation.train_loss is not None
    ]
    axis.plot([updates for updates, _ in known], [loss for _, loss in known], color=colour, linewidth=1.5)


def _number_decades(axis: "Axes") -> None:
    """Label a logarithmic axis with plain numbers, also between decades if there are few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415

    low, high = axis.get_ylim()
    plain = FuncFormatter(lambda value, _: f"{value:.4g}")
    if high < _DECADES_ALONE * low:
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7), numticks=20))
        axis.set_ylim(low, high)
    axis.yaxis.set_major_formatter(plain)
    axis.yaxis.set_minor_formatter(NullFormatter())


def _focus(axis: "Axes", runs: Sequence[RecordedRun]) -> None:
    """Choose the range of a metric's axis.

    The first evaluations, of untrained models, are left out because they would flatten the rest. The range is
    at least `_LEAST_SPAN`.
    """
    values = sorted(value for run in runs for _, value in run.measured)
    if runs[0].higher_is_better and len(values) > 10:
        low = min(values[len(values) // 12], values[-1] - _LEAST_SPAN)
        axis.set_ylim(low - 0.05 * (values[-1] - low), values[-1] + 0.04 * (values[-1] - low))
