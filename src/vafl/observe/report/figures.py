"""Draw small SVG charts. Colours are classes of the style sheet, so that they follow light and dark mode.

Every chart is 360 units wide, which is about the width of a phone, so that its text is readable there. A wide
page shows two charts side by side.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vafl.arrays import Doubles
from vafl.observe.report.markup import Markup, element
from vafl.observe.report.statistics import Curve, Interval

WIDTH = 360.0
SERIES = 8  # colours in the style sheet
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 12.0, 12.0, 42.0

Format = Callable[[float], str]


def percent(value: float) -> str:
    """Return a share as a whole percentage."""
    return f"{100 * value:.0f}%"


def plain(value: float) -> str:
    """Return a number with at most four significant digits, such as 0.25, 1,200 or 3.2M."""
    size = abs(value)
    for least, unit in ((1e9, "bn"), (1e6, "M"), (1e4, "k")):
        if size >= least:
            return f"{value / (1e3 if unit == 'k' else least):.3g}{unit}".replace("-", "\N{MINUS SIGN}")
    text = f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"
    return text.replace("-", "\N{MINUS SIGN}")


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers from `low` to `high`."""
    step = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(step))
    step = power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass
class Chart:
    """A chart with two linear axes. Marks are drawn in the order in which they are added.

    Args:
        x, y: The ranges of the axes.
        height: The height in units of the drawing.
        left: The margin for the labels of the vertical axis.
        bottom: The margin for the labels of the horizontal axis.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    height: float = 270.0
    left: float = _LEFT
    bottom: float = _BOTTOM
    _marks: list[Markup] = field(default_factory=list)

    def across(self, value: float) -> float:
        """Return the horizontal coordinate of a value."""
        low, high = self.x
        return self.left + (value - low) / (high - low) * (WIDTH - self.left - _RIGHT)

    def up(self, value: float) -> float:
        """Return the vertical coordinate of a value."""
        low, high = self.y
        return self.height - self.bottom - (value - low) / (high - low) * (self.height - self.bottom - _TOP)

    def axes(self, x_label: str, y_label: str, x_format: Format = plain, y_format: Format = plain) -> "Chart":
        """Draw the grid lines with their values, and the names of the axes."""
        right, floor = WIDTH - _RIGHT, self.height - self.bottom
        for value in ticks(*self.y):
            place = self.up(value)
            self._add("line", class_="grid", x1=self.left, x2=right, y1=place, y2=place)
            self.text(self.left - 6, place + 4, y_format(value), "end")
        for value in ticks(*self.x):
            place = self.across(value)
            self._add("line", class_="grid", x1=place, x2=place, y1=_TOP, y2=floor)
            self.text(place, floor + 15, x_format(value), "middle")
        self.text((self.left + right) / 2, floor + 33, x_label, "middle", "name")
        middle = (_TOP + floor) / 2
        turned = f"rotate(-90 10 {middle:.1f})"
        self._add("text", y_label, class_="name", x=10.0, y=middle, text_anchor="middle", transform=turned)
        return self

    def line(self, curve: Curve, kind: str) -> "Chart":
        """Draw a curve. `kind` is its class in the style sheet."""
        points = " ".join(
            f"{self.across(x):.1f},{self.up(y):.1f}"
            for x, y in zip(curve.x.tolist(), curve.y.tolist(), strict=True)
        )
        self._add("polyline", class_=f"line {kind}", points=points)
        return self

    def diagonal(self) -> "Chart":
        """Draw the line on which both axes have the same value."""
        low, high = max(self.x[0], self.y[0]), min(self.x[1], self.y[1])
        return self.line(Curve(np.array([low, high]), np.array([low, high])), "guide")

    def level(self, value: float) -> "Chart":
        """Draw a horizontal guide."""
        return self.line(Curve(np.array(self.x), np.array([value, value])), "guide")

    def dot(self, x: float, y: float, kind: str = "s0", says: str = "") -> "Chart":
        """Draw a dot. `says` is its tooltip."""
        self._add("circle", *_hint(says), class_=f"dot {kind}", cx=self.across(x), cy=self.up(y), r=3.5)
        return self

    def whisker(self, x: float, interval: Interval, kind: str = "s0") -> "Chart":
        """Draw a vertical interval."""
        place = self.across(x)
        low, high = self.up(max(interval.low, self.y[0])), self.up(min(interval.high, self.y[1]))
        self._add("line", class_=f"whisker {kind}", x1=place, x2=place, y1=low, y2=high)
        return self

    def bar(self, low: float, high: float, value: float, kind: str = "s0", says: str = "") -> "Chart":
        """Draw a bar from the axis to `value`, between `low` and `high` on the horizontal axis."""
        left, right = self.across(low), self.across(high)
        base, top = sorted((self.up(max(0.0, self.y[0])), self.up(value)))
        gap = min(1.5, (right - left) / 8)
        box = {"x": left + gap, "width": right - left - 2 * gap, "y": base, "height": max(0.0, top - base)}
        self._add("rect", *_hint(says), class_=f"bar {kind}", **box)
        return self

    def cell(self, x: tuple[float, float], y: tuple[float, float], share: float) -> "Chart":
        """Draw a cell of a density plot. `share` is its darkness, from 0 to 1."""
        left, right, top, base = self.across(x[0]), self.across(x[1]), self.up(y[1]), self.up(y[0])
        box = {"x": left, "y": top, "width": right - left + 0.3, "height": base - top + 0.3}
        self._add("rect", class_="bar s0", fill_opacity=0.08 + 0.92 * share, **box)
        return self

    def text(self, x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> "Chart":
        """Write text at a position in units of the drawing."""
        self._add("text", words, x=x, y=y, text_anchor=anchor, class_=kind or None)
        return self

    def _add(self, name: str, *content: str, **attributes: object) -> None:
        self._marks.append(element(name, *content, **attributes))

    def svg(self, name: str, title: str, description: str) -> Markup:
        """Return the drawing.

        Args:
            name: A prefix for element ids, unique in the page.
            title: What the drawing shows, for screen readers.
            description: The information in the drawing, for screen readers.
        """
        return drawing(name, title, description, self.height, self._marks)


def drawing(name: str, title: str, description: str, height: float, marks: Iterable[Markup]) -> Markup:
    """Return an SVG element with its accessible name and description."""
    return element(
        "svg",
        element("title", title, id=f"{name}-title"),
        element("desc", description, id=f"{name}-desc"),
        marks,
        role="img",
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        aria_labelledby=f"{name}-title",
        aria_describedby=f"{name}-desc",
    )


def _hint(says: str) -> list[Markup]:
    return [element("title", says)] if says else []


@dataclass(frozen=True)
class Line:
    """One line of a chart of named values.

    Attributes:
        shown: The value as text.
        interval: Drawn over the value; None draws none.
        kind: A class of the style sheet.
    """

    name: str
    value: float
    shown: str
    interval: Interval | None = None
    kind: str = "s0"


def named_values(name: str, title: str, lines: Sequence[Line], *, zero: bool) -> Markup:
    """Draw named values below each other, as bars from 0 or as dots on a common axis.

    Args:
        name: A prefix for element ids, unique in the page.
        title: What the values are.
        lines: The values from top to bottom.
        zero: Draw bars on an axis that includes 0. False draws dots on an axis around the values.
    """
    ends = [line.value for line in lines]
    ends += [end for line in lines if line.interval for end in (line.interval.low, line.interval.high)]
    low, high = min(ends), max(ends)
    if zero:
        low, high = min(0.0, low), max(0.0, high)
    else:
        low, high = low - 0.04 * (high - low), high + 0.04 * (high - low)
    if high <= low:
        low, high = low - 0.5, high + 0.5
    line_height, first = 36.0, 12.0
    height = first + line_height * len(lines) - 12
    left, right = (0.0, WIDTH) if zero else (8.0, WIDTH - 8)

    def across(value: float) -> float:
        return left + (value - low) / (high - low) * (right - left)

    marks = []
    for number, line in enumerate(lines):
        top = first + line_height * number
        middle = top + 16
        marks.append(element("text", line.name, class_="label", x=0.0, y=top))
        marks.append(element("text", line.shown, class_="value", x=WIDTH, y=top, text_anchor="end"))
        if zero:
            start, end = sorted((across(0.0), across(line.value)))
            track = {"x": 0.0, "y": top + 6, "width": WIDTH, "height": 9.0}
            marks.append(element("rect", class_="track", rx=2.0, **track))
            box = {"x": start, "y": top + 6, "width": max(1.0, end - start), "height": 9.0}
            marks.append(element("rect", class_=f"bar {line.kind}", rx=2.0, **box))
        else:
            ends_at = {"x1": left, "x2": right, "y1": middle, "y2": middle}
            marks.append(element("line", class_="grid", **ends_at))
        if line.interval:
            y = top + 10.5 if zero else middle
            ends_at = {"x1": across(line.interval.low), "x2": across(line.interval.high), "y1": y, "y2": y}
            marks.append(element("line", class_="whisker ink" if zero else f"whisker {line.kind}", **ends_at))
        if not zero:
            marks.append(
                element("circle", class_=f"dot {line.kind}", cx=across(line.value), cy=middle, r=5.0)
            )
    description = "; ".join(f"{line.name}: {line.shown}" for line in lines)
    return drawing(name, title, description, height, marks)


def histogram(values: Doubles, low: float, high: float, bins: int) -> tuple[Doubles, list[int]]:
    """Return the edges of equally wide bins and the number of values in each. Ignore values outside."""
    counts, edges = np.histogram(values, bins=bins, range=(low, high))
    return edges, counts.tolist()
