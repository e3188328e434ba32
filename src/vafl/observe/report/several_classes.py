"""The sections about a model of more than two classes: each class, and the confusion matrix."""

from collections.abc import Sequence

import numpy as np

from vafl.arrays import Integers
from vafl.observe.report import blocks
from vafl.observe.report.figures import SERIES, Chart, percent
from vafl.observe.report.inputs import Scores
from vafl.observe.report.markup import Markup, element
from vafl.observe.report.statistics import auc, confusion, roc, thinned
from vafl.observe.report.words import count, quoted, share

_MOST_DRAWN = SERIES  # curves in one chart
_MOST_IN_MATRIX = 12
_MOST_IN_TABLE = 40
_DASH = "\N{EN DASH}"


def several_class_sections(held: Scores) -> list[Markup]:
    """Return the sections about scores of more than two classes."""
    classes = len(held.classes)
    actual, predicted = held.labels.astype(np.int64), held.scores.argmax(axis=1)
    counts = confusion(predicted, actual, classes)
    largest = np.argsort(-counts.sum(axis=1), kind="stable")
    areas = {
        place: auc(held.scores[:, place], actual == place)[0]
        for place in range(classes)
        if 0 < counts[place].sum() < held.rows
    }
    return [_each(held, counts, largest[:_MOST_IN_TABLE], areas), _matrix(held, counts, largest)]


def _each(held: Scores, counts: Integers, shown: Integers, areas: dict[int, float]) -> Markup:
    labelled, predicted, right = counts.sum(axis=1), counts.sum(axis=0), np.diag(counts)
    lines = [
        [
            held.classes[place],
            count(labelled[place]),
            _ratio(right[place], predicted[place]),
            _ratio(right[place], labelled[place]),
            f"{areas[place]:.3f}" if place in areas else _DASH,
        ]
        for place in shown.tolist()
    ]
    headings = ["Class", "Rows", "Precision", "Recall", "AUC"]
    drawn = [place for place in shown.tolist() if place in areas][:_MOST_DRAWN]
    chart = Chart((0, 1), (0, 1)).axes("false alarms", "found", percent, percent).diagonal()
    for number, place in enumerate(drawn):
        chart.line(thinned(roc(held.scores[:, place], held.labels == place), 100), f"s{number}")
    says = "Each class against all others. The closer a curve is to the upper left corner, the better."
    keys = [(f"s{number}", held.classes[place]) for number, place in enumerate(drawn)]
    left_out = len(held.classes) - len(shown)
    more = blocks.note(f"{count(left_out)} smaller classes are left out.") if left_out else ""
    explained = (
        "Precision: of the rows predicted as the class, the share that is right. Recall: of the rows of the "
        "class, the share that is found. AUC: how often a row of the class scores higher than a row of "
        "another class; 0.5 is guessing."
    )
    curves = (
        blocks.figure(
            "ROC curves", chart.svg("roc", "ROC curve of each class", says), says, blocks.legend(keys)
        )
        if drawn
        else ""
    )
    return blocks.section(
        "Each class",
        element(
            "div",
            element(
                "div",
                blocks.table(headings, lines, "Precision, recall and AUC of each class"),
                more,
                blocks.note(explained),
            ),
            curves,
            class_="figures",
        ),
    )


def _ratio(part: int, whole: int) -> str:
    return share(part / whole) if whole else _DASH


def _matrix(held: Scores, counts: Integers, largest: Integers) -> Markup:
    right = np.diag(counts).sum() / held.rows
    rows = f"{count(held.rows)} {held.part} rows"
    says = f"For {share(right)} of the {rows}, the most probable class is right."
    wrong = counts - np.diag(np.diag(counts))
    actual, taken = divmod(int(wrong.argmax()), len(held.classes))
    if wrong.any():
        says += (
            f" The most frequent mistake: {count(wrong[actual, taken])} rows of "
            f"{quoted(held.classes[actual])} are predicted as {quoted(held.classes[taken])}."
        )
    names, counts = _merged(held.classes, counts, largest)
    lines = [
        [
            f"actually {name}",
            *(
                _cell(rows, int(line.sum()), name == other)
                for other, rows in zip(names, line.tolist(), strict=True)
            ),
        ]
        for name, line in zip(names, counts, strict=True)
    ]
    caption = "Confusion matrix: actual classes in rows, predicted classes in columns"
    return blocks.section(
        "Confusion between classes",
        blocks.text(says),
        blocks.table(["", *names], lines, caption, kind="compact"),
    )


def _merged(classes: Sequence[str], counts: Integers, largest: Integers) -> tuple[list[str], Integers]:
    """Return names and a confusion matrix in which all but the largest classes are merged into one."""
    kept, rest = largest[:_MOST_IN_MATRIX], largest[_MOST_IN_MATRIX:]
    if not len(rest):
        return list(classes), counts
    into = np.zeros((len(classes), len(kept) + 1), dtype=np.int64)
    into[kept, np.arange(len(kept))] = 1
    into[rest, -1] = 1
    return [*(classes[place] for place in kept.tolist()), f"{len(rest)} others"], into.T @ counts @ into


def _cell(rows: int, total: int, right: bool) -> Markup:
    """Return a number of rows, shaded by its share of the line."""
    shade = round(4 * rows / total) if total else 0
    kind = f"heat {'right' if right else 'wrong'} heat-{max(1, shade) if rows else 0}"
    return element("span", count(rows) if rows else "\N{MIDDLE DOT}", class_=kind)
