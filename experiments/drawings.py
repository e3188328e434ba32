"""The figure of a study: curves against time, against bytes, a sweep, or bars."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from experiments import figures
from experiments.harness import Found
from experiments.measures import Outcome
from experiments.study import CENTRALISED
from experiments.timed_runs import GRID, Timed, crossing, read_at
from vafl.arrays import Doubles

_SMOOTHED = 20  # the loss of single minibatches is noisy, so draw the mean of at least this many


def draw(outcome: Outcome, path: Path) -> None:
    """Draw the study's figure as path.png and path.svg."""
    kind = outcome.study.figure
    if kind == "bars":
        with figures.drawing(path, panels=1, height=0.9 + 0.3 * len(outcome.rows)) as (axes,):
            _bars(axes, outcome)
        return
    with figures.drawing(path, panels=2, height=3.4) as (left, right):
        if kind == "sweep":
            _sweep(left, right, outcome)
        else:
            _against_seconds(left, outcome)
            (_against_bytes if kind == "bytes" else _losses)(right, outcome)
        lines, labels = left.get_legend_handles_labels()
        left.figure.legend(lines, labels, loc="outside lower center", ncols=min(4, len(labels)))


def _timed(outcome: Outcome) -> list[Found]:
    """Return the rows with a clock and without failed runs, which would leave gaps in the mean."""
    return [
        each for each in outcome.found if all(run.seconds[-1] > 0 and not run.diverged for run in each.final)
    ]


def _against_seconds(axes: Axes, outcome: Outcome) -> None:
    for each in _timed(outcome):
        at = np.linspace(0, min(float(run.seconds[-1]) for run in each.final), GRID)
        _band(
            axes,
            each,
            at,
            [run.seconds for run in each.final],
            lambda run: _calmed(run, outcome.study.smooth),
        )
    for start, end in outcome.study.windows:
        axes.axvspan(start, end, color=figures.GREY, alpha=0.12, linewidth=0)
    _frame(axes, outcome)
    smooth = outcome.study.smooth
    title = f"(a) time, each point the mean of {smooth:g} s" if smooth else "(a) time"
    axes.set(xlabel="simulated seconds", xlim=(0, outcome.horizon), title=title)


def _against_bytes(axes: Axes, outcome: Outcome) -> None:
    seen = []
    for each in _timed(outcome):
        first = max(float(run.megabytes[run.megabytes > 0][0]) for run in each.final)
        at = np.geomspace(first, min(float(run.megabytes[-1]) for run in each.final), GRID)
        _band(axes, each, at, [run.megabytes for run in each.final], lambda run: run.metric)
        seen.append(crossing(each.final, "megabytes", outcome.study.floor) or first)
    _frame(axes, outcome)
    axes.set(xlabel="megabytes, all clients, both ways", xscale="log", title="(b) communication")
    axes.set_xlim(left=min(seen) / 2)
    _plain(axes, "x")


def _losses(axes: Axes, outcome: Outcome) -> None:
    top = 0.0
    for each in outcome.found:
        if any(run.diverged for run in each.final):
            continue
        passes = [_with_loss(run) for run in each.final]
        at = np.linspace(max(float(x[0]) for x in passes), min(float(x[-1]) for x in passes), GRID)
        _band(axes, each, at, passes, _smooth)
        if each.variant.name != CENTRALISED:
            top = max(top, float(at[-1]))
    axes.set(
        xlabel="passes over the training rows, mean of the clients",
        ylabel="training loss",
        xlim=(0, top),
        yscale="log",
        title="(b) progress per pass",
    )
    _plain(axes, "y")


def _with_loss(run: Timed) -> Doubles:
    known = [point.train_loss is not None for point in run.run.evaluations[1:]]
    return run.passes[1:][known]


def _band(
    axes: Axes, each: Found, at: Doubles, along: Sequence[Doubles], values: Callable[[Timed], Doubles]
) -> None:
    variant = each.variant
    colour = getattr(figures, variant.colour)
    read = read_at(at, along, [values(run) for run in each.final])
    main = variant.line == "-"
    if main:
        axes.fill_between(at, read.min(axis=0), read.max(axis=0), color=colour, alpha=0.18, linewidth=0)
    width = 1.4 if main else 1.0
    axes.plot(
        at, read.mean(axis=0), color=colour, linestyle=variant.line, linewidth=width, label=variant.name
    )


def _calmed(run: Timed, seconds: float) -> Doubles:
    """Return the metric, or its mean over the evaluations of this many seconds."""
    each = float(run.seconds[-1]) / (len(run.seconds) - 1)
    return _moving_mean(run.metric, max(1, round(seconds / each)))


def _moving_mean(values: Doubles, width: int) -> Doubles:
    """Return the mean of the last `width` values, or of all values at the beginning."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def _smooth(run: Timed) -> Doubles:
    """Return the loss at each evaluation except the first, as the mean of enough minibatches."""
    losses = np.array([point.train_loss for point in run.run.evaluations[1:] if point.train_loss is not None])
    each = run.run.evaluations[-1].updates / len(losses)
    return _moving_mean(losses, math.ceil(_SMOOTHED / each))


def _frame(axes: Axes, outcome: Outcome) -> None:
    study = outcome.study
    ends = [row.metric for row in outcome.rows]
    if (ceiling := outcome.row(CENTRALISED)) is not None:
        axes.axhline(
            ceiling.metric,
            color=figures.GREEN,
            linewidth=1.0,
            linestyle=(0, (5, 2)),
            label=CENTRALISED,
        )
    if np.isfinite(outcome.level):
        axes.axhline(outcome.level, color=figures.GREY, linewidth=0.7, linestyle=":", label="level timed")
    top = max(*ends, *(float(np.max(line.get_ydata())) for line in axes.lines))
    axes.set(ylim=(study.floor, top + 0.06 * (top - study.floor)), ylabel=f"test {_named(study.metric)}")


def _sweep(left: Axes, right: Axes, outcome: Outcome) -> None:
    rows = {row.variant: row for row in outcome.rows}
    variants = [variant for variant in outcome.study.variants if variant.series and variant.name in rows]
    for axes, reading in ((left, "seconds"), (right, "megabytes")):
        series: dict[str, list[tuple[float, float | None, str]]] = {}
        for variant in variants:
            value = getattr(rows[variant.name], reading)
            series.setdefault(variant.series, []).append((variant.x, value, variant.colour))
        for name, points in series.items():
            colour = getattr(figures, points[0][2])
            axes.plot(
                [x for x, _, _ in points],
                [math.nan if value is None else value for _, value, _ in points],  # a gap
                color=colour,
                marker="o",
                markersize=4,
                label=name,
            )
        reached = any(value is not None for points in series.values() for _, value, _ in points)
        axes.set(xlabel=outcome.study.axis, xscale="log", yscale="log" if reached else "linear")
        _no_magnifying(axes)
        _plain(axes, "y")
        places = {variant.x: variant.tick or f"{variant.x:,g}" for variant in variants}
        axes.xaxis.set_ticks(list(places), list(places.values()))
        axes.xaxis.set_ticks([], minor=True)
        axes.set_xlim(min(places) / 1.3, max(places) * 1.3)
    metric = _named(outcome.study.metric)
    left.set(ylabel=f"simulated seconds to {metric} {outcome.level:.3g}", title="(a) time")
    right.set(ylabel=f"megabytes to {metric} {outcome.level:.3g}", title="(b) communication")


def _bars(axes: Axes, outcome: Outcome) -> None:
    rows = list(outcome.rows)[::-1]
    colours = [getattr(figures, outcome.study.variant(row.variant).colour) for row in rows]
    places = np.arange(len(rows))
    axes.barh(places, [row.metric for row in rows], color=colours, height=0.6, alpha=0.85)
    reach = [[row.metric - row.low for row in rows], [row.high - row.metric for row in rows]]
    axes.errorbar(
        [row.metric for row in rows],
        places,
        xerr=reach,
        fmt="none",
        ecolor=figures.BLACK,
        elinewidth=0.8,
        capsize=2,
    )
    for place, row in zip(places, rows, strict=True):
        axes.text(row.high + 0.004, float(place), f"{row.metric:.3f}", va="center", fontsize=7)
    axes.set(
        yticks=places,
        yticklabels=[row.variant for row in rows],
        xlabel=f"test {_named(outcome.study.metric)}",
    )
    axes.set_xlim(outcome.study.floor, max(row.high for row in rows) + 0.03)
    axes.grid(visible=False, axis="y")


def _no_magnifying(axes: Axes) -> None:
    """Make the axis span at least a factor of two, so that nearly equal values look nearly equal."""
    low, high = axes.get_ylim()
    if 0 < low < high < 2 * low:
        centre = math.sqrt(low * high)
        axes.set_ylim(centre / math.sqrt(2), centre * math.sqrt(2))


def _plain(axes: Axes, which: str) -> None:
    """Write plain numbers on a logarithmic axis."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    if which == "y" and axes.get_yscale() == "log":
        low, high = axes.get_ylim()
        near = high < 5 * low
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]) if near else LogLocator(subs=[1, 2, 5]))


def _named(metric: str) -> str:
    return "AUC" if metric == "auc" else metric
