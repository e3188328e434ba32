"""The sections about a model of two classes: ranking, probabilities, decisions."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vafl.arrays import Flags
from vafl.observe.report import blocks
from vafl.observe.report.figures import Chart, histogram, percent
from vafl.observe.report.inputs import Scores
from vafl.observe.report.markup import Markup, element, join
from vafl.observe.report.statistics import (
    Curve,
    auc,
    average_precision,
    confusion,
    gains,
    precision_recall,
    reliability,
    roc,
    thinned,
)
from vafl.observe.report.words import count, quoted, share

_FEWEST_ROWS = 10
_MIDDLE = 0.5
_STRIP_BINS = 25
_GOALS = {
    "f1": "the best F1, a balance of precision and recall",
    "precision": "the best recall with a precision",
    "recall": "the best precision with a recall",
    "cost": "the lowest cost",
}


def two_class_sections(held: Scores, summary: Mapping[str, Any]) -> list[Markup]:
    """Return the sections about scores of two classes.

    Args:
        held: The scores.
        summary: The content of summary.json, which may include a calibration and a decision threshold.
    """
    positive = held.labels == 1
    if held.rows < _FEWEST_ROWS or positive.all() or not positive.any():
        few = (
            f"The {count(held.rows)} {held.part} rows do not have enough cases of both classes to draw "
            "curves."
        )
        return [blocks.section("Ranking, probabilities and decisions", blocks.note(few))]
    return [
        _ranking(held, positive),
        _tenths(held, positive),
        _probabilities(held, positive, summary.get("calibration") or {}),
        _decisions(held, positive, summary.get("decision") or {}),
    ]


def _ranking(held: Scores, positive: Flags) -> Markup:
    name, base = quoted(held.classes[1]), float(positive.mean())
    area, _ = auc(held.scores, positive)
    precision = average_precision(held.scores, positive)
    curve = roc(held.scores, positive)
    at_tenth = float(np.interp(0.1, curve.x, curve.y))
    left = Chart((0, 1), (0, 1)).axes("false alarms", "found", percent, percent)
    left.diagonal().line(thinned(curve), "s0")
    curve = precision_recall(held.scores, positive)
    at_half = float(curve.y[np.searchsorted(curve.x, 0.5)])
    start = Curve(np.append(0.0, curve.x), np.append(curve.y[0], curve.y))
    right = Chart((0, 1), (0, 1)).axes("found (recall)", "right (precision)", percent, percent)
    right.level(base).line(thinned(start), "s0")
    roc_says = (
        f"If 10% of the other cases may be flagged by mistake, the model finds {share(at_tenth, 0)} of all "
        f"{name} cases. The dashed line is guessing."
    )
    precision_says = (
        f"If half of the {name} cases are to be found, {share(at_half, 0)} of the flagged cases are right. "
        f"Without a model, {share(base)} would be right (dashed line)."
    )
    return blocks.section(
        "Ranking",
        blocks.figures(
            blocks.figure(f"ROC curve, area {area:.3f}", left.svg("roc", "ROC curve", roc_says), roc_says),
            blocks.figure(
                f"Precision and recall, average {precision:.3f}",
                right.svg("precision-recall", "Precision-recall curve", precision_says),
                precision_says,
            ),
        ),
    )


def _tenths(held: Scores, positive: Flags) -> Markup:
    name, tenths = quoted(held.classes[1]), gains(held.scores, positive)
    shares = np.arange(11) / 10
    found = Curve(shares, np.append(0.0, [tenth.found for tenth in tenths]))
    left = Chart((0, 1), (0, 1)).axes("rows, highest scores first", "found so far", percent, percent)
    left.diagonal().line(found, "s0")
    for place, tenth in zip(shares[1:].tolist(), tenths, strict=True):
        left.dot(place, tenth.found, says=f"{percent(place)} of the rows hold {share(tenth.found)}")
    most = max(1.0, *(tenth.lift for tenth in tenths))
    right = Chart((0, 10), (0, most * 1.05)).axes(
        "tenth of the rows, highest scores first",
        "lift",
        lambda value: "",
        lambda value: f"{value:g}\N{MULTIPLICATION SIGN}",
    )
    for number, tenth in enumerate(tenths):
        says = f"tenth {number + 1}: {share(tenth.share)} are {held.classes[1]}, lift {tenth.lift:.2f}"
        right.bar(number + 0.1, number + 0.9, tenth.lift, says=says)
        right.text(right.across(number + 0.5), right.up(0) + 15, str(number + 1), "middle")
    right.level(1.0)
    first, third = tenths[0], tenths[2]
    gains_say = (
        f"The tenth with the highest scores holds {share(first.found, 0)} of all {name} cases, the first "
        f"three tenths {share(third.found, 0)}. The dashed line is a random order."
    )
    lift_says = (
        f"In the first tenth {share(first.share)} are {name}: {first.lift:.1f} times as many as in all rows "
        f"({share(float(positive.mean()))})."
    )
    lines = [
        [
            str(number),
            count(tenth.rows),
            count(tenth.positives),
            share(tenth.share),
            f"{tenth.lift:.2f}",
            share(tenth.found),
        ]
        for number, tenth in enumerate(tenths, 1)
    ]
    headings = ["Tenth", "Rows", held.classes[1], "Rate", "Lift", "Found so far"]
    return blocks.section(
        "Acting on the highest scores",
        blocks.figures(
            blocks.figure("Gains", left.svg("gains", "Cumulative gains", gains_say), gains_say),
            blocks.figure("Lift by tenth", right.svg("lift", "Lift by tenth", lift_says), lift_says),
        ),
        element(
            "details",
            element("summary", "The tenths in figures"),
            blocks.table(headings, lines, "Gains and lift by tenth of the rows, highest scores first"),
        ),
    )


def _probabilities(held: Scores, positive: Flags, calibration: Mapping[str, Any]) -> Markup:
    bins = reliability(held.scores, positive)
    largest = max(max(group.score, group.interval.high) for group in bins)
    top = min(1.0, np.ceil(20 * largest) / 20)
    tick = percent if top > 0.2 else lambda value: f"{100 * value:g}%"
    left = Chart((0, top), (0, top)).axes("predicted probability", "happened", tick, tick).diagonal()
    for group in bins:
        says = f"{count(group.rows)} rows: predicted {share(group.score)}, happened {share(group.share)}"
        left.whisker(group.score, group.interval).dot(group.score, group.share, says=says)
    edges, counts = histogram(held.scores, 0.0, 1.0, _STRIP_BINS)
    right = Chart((0, 1), (0, 1.05 * max(counts))).axes("predicted probability", "rows", percent)
    for low, high, number in zip(edges[:-1].tolist(), edges[1:].tolist(), counts, strict=True):
        right.bar(low, high, number, says=f"{percent(low)} to {percent(high)}: {count(number)} rows")
    off = sum(group.rows * abs(group.score - group.share) for group in bins) / held.rows
    says = (
        "Each dot is a group of rows with similar probabilities, with a 95% interval. On the dashed line, "
        "predicted and actual shares are equal. On average they differ by "
        f"{100 * off:.1f} percentage points."
    )
    spread = f"The probabilities of the {count(held.rows)} rows."
    headings = ["Group", "Rows", "Predicted", "Happened", "95% interval"]
    lines = [
        [
            str(number),
            count(group.rows),
            share(group.score),
            share(group.share),
            f"{share(group.interval.low)} to {share(group.interval.high)}",
        ]
        for number, group in enumerate(bins, 1)
    ]
    return blocks.section(
        "Probabilities",
        _calibrated(calibration),
        blocks.figures(
            blocks.figure("Calibration", left.svg("calibration", "Calibration plot", says), says),
            blocks.figure("Predictions", right.svg("spread", "Predicted probabilities", spread), spread),
        ),
        element(
            "details",
            element("summary", "The groups in figures"),
            blocks.table(headings, lines, "Predicted and actual shares in groups of similar probabilities"),
        ),
    )


def _calibrated(calibration: Mapping[str, Any]) -> Markup:
    method = calibration.get("method", "none")
    if method == "none":
        return join()
    way = {"platt": "by Platt scaling", "isotonic": "by isotonic regression"}.get(method, f"by {method}")
    return blocks.text(f"The probabilities were corrected {way} on the validation rows.")


def _decisions(held: Scores, positive: Flags, decision: Mapping[str, Any]) -> Markup:
    threshold = float(decision.get("threshold", _MIDDLE))
    flagged = held.scores >= threshold
    counts = confusion(flagged.astype(np.int64), positive.astype(np.int64), 2)
    (true_negative, false_positive), (false_negative, true_positive) = counts.tolist()
    no, yes = held.classes
    goal = decision.get("goal")
    chosen = ""
    if goal not in (None, "accuracy"):  # the goal "accuracy" uses the threshold 0.5, which is not fitted
        least = f" of at least {share(decision['at_least'])}" if goal in ("precision", "recall") else ""
        chosen = f", chosen on the validation rows for {_GOALS.get(goal, goal)}{least}"
    precision = true_positive / max(1, true_positive + false_positive)
    recall = true_positive / max(1, true_positive + false_negative)
    says = (
        f"A row is flagged as {quoted(yes)} if its probability is at least {threshold:.3g}{chosen}. "
        f"That flags {share(float(flagged.mean()))} of the {held.part} rows. "
        f"Of those flagged, {share(precision)} are right (precision). "
        f"Of all {quoted(yes)} cases, {share(recall)} are flagged (recall)."
    )
    lines = [
        [f"actually {no}", _cell(true_negative, held.rows, True), _cell(false_positive, held.rows, False)],
        [f"actually {yes}", _cell(false_negative, held.rows, False), _cell(true_positive, held.rows, True)],
    ]
    return blocks.section(
        "Decisions",
        blocks.text(says),
        ""
        if decision.get("reached", True)
        else blocks.notice(
            "The goal was not reached", "on the validation rows; this threshold is the nearest to it."
        ),
        blocks.table(["", f"predicted {no}", f"predicted {yes}"], lines, "Confusion matrix", kind="compact"),
    )


def _cell(rows: int, total: int, right: bool) -> Markup:
    return element(
        "span",
        element("b", count(rows)),
        element("small", share(rows / total)),
        class_=f"cell {'right' if right else 'wrong'}",
    )
