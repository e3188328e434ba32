"""The sections about a model that predicts numbers: predicted and actual values, and errors."""

import numpy as np

from vafl.observe.report import blocks
from vafl.observe.report.figures import Chart, histogram, plain
from vafl.observe.report.inputs import Scores
from vafl.observe.report.markup import Markup, element
from vafl.observe.report.statistics import errors_by_tenth, usual_range
from vafl.observe.report.words import count, rounded, share

_FEWEST_ROWS = 10
_CELLS = 36
_BINS = 41


def number_sections(held: Scores) -> list[Markup]:
    """Return the sections about predicted numbers."""
    if held.rows < _FEWEST_ROWS:
        few = f"The {count(held.rows)} {held.part} rows are too few to draw."
        return [blocks.section("Predictions and errors", blocks.note(few))]
    return [_beside_actual(held), _by_size(held)]


def _beside_actual(held: Scores) -> Markup:
    low, high = usual_range(held.scores, held.labels)
    inside = (
        (held.scores >= low) & (held.scores <= high) & (held.labels >= low) & (held.labels <= high)
    ).mean()
    cells, edges, _ = np.histogram2d(held.scores, held.labels, bins=_CELLS, range=((low, high), (low, high)))
    chart = Chart((low, high), (low, high)).axes("predicted", "actual")
    # The square root keeps cells with few rows visible beside full ones.
    shades = np.sqrt(cells / max(1.0, cells.max()))
    for column, line in np.argwhere(cells > 0).tolist():
        chart.cell(
            (float(edges[column]), float(edges[column + 1])),
            (float(edges[line]), float(edges[line + 1])),
            float(shades[column, line]),
        )
    chart.diagonal()
    left_out = f" {share(1 - inside)} of the rows lie outside the drawing." if inside < 1 else ""
    says = (
        f"Darker cells hold more rows. On the dashed line, prediction and actual value are equal.{left_out}"
    )

    errors = held.scores - held.labels
    reach = max(abs(end) for end in usual_range(errors, share=0.98))
    edges, counts = histogram(errors, -reach, reach, _BINS)
    right = Chart((-reach, reach), (0, 1.05 * max(*counts, 1))).axes("predicted minus actual", "rows")
    for start, end, number in zip(edges[:-1].tolist(), edges[1:].tolist(), counts, strict=True):
        right.bar(start, end, number, says=f"{plain(start)} to {plain(end)}: {count(number)} rows")
    near, far = np.quantile(np.abs(errors), (0.5, 0.9))
    spread = (
        f"Half of the predictions are within {rounded(near)} of the actual value, 90% are within "
        f"{rounded(far)}. The median error is {rounded(np.median(errors), 2)}."
    )
    return blocks.section(
        "Predictions and errors",
        blocks.figures(
            blocks.figure(
                "Predicted and actual", chart.svg("density", "Predicted and actual values", says), says
            ),
            blocks.figure("Errors", right.svg("errors", "Histogram of the errors", spread), spread),
        ),
    )


def _by_size(held: Scores) -> Markup:
    tenths = errors_by_tenth(held.scores, held.labels)
    values = [value for tenth in tenths for value in (tenth.predicted, tenth.actual)]
    room = 0.06 * (max(values) - min(values) or 1.0)
    ends = (min(values) - room, max(values) + room)
    left = Chart(ends, ends).axes("mean prediction", "mean of actual values").diagonal()
    for tenth in tenths:
        left.dot(
            tenth.predicted,
            tenth.actual,
            says=f"{count(tenth.rows)} rows: {plain(tenth.predicted)} predicted",
        )
    right = Chart((0, 10), (0, 1.05 * max(tenth.error for tenth in tenths) or 1.0)).axes(
        "tenth of the rows, lowest predictions first", "mean absolute error", lambda value: ""
    )
    for number, tenth in enumerate(tenths):
        right.bar(number + 0.1, number + 0.9, tenth.error, says=f"tenth {number + 1}: {plain(tenth.error)}")
        right.text(right.across(number + 0.5), right.up(0) + 15, str(number + 1), "middle")
    says = "Each dot is a tenth of the rows. On the dashed line, predictions are right on average."
    first, last = tenths[0], tenths[-1]
    sizes = (
        f"Rows with the lowest predictions are {rounded(first.error)} off on average, those with the "
        f"highest {rounded(last.error)}."
    )
    headings = ["Tenth", "Rows", "Predicted", "Actual", "Mean absolute error"]
    lines = [
        [
            str(number),
            count(tenth.rows),
            *(rounded(value, 4) for value in (tenth.predicted, tenth.actual, tenth.error)),
        ]
        for number, tenth in enumerate(tenths, 1)
    ]
    return blocks.section(
        "Errors by size of the prediction",
        blocks.figures(
            blocks.figure("Means by tenth", left.svg("means", "Mean prediction and actual mean", says), says),
            blocks.figure("Error by tenth", right.svg("error-tenths", "Error by tenth", sizes), sizes),
        ),
        element(
            "details",
            element("summary", "The tenths in figures"),
            blocks.table(headings, lines, "Predictions, actual values and errors by tenth of the rows"),
        ),
    )
