"""Ticks, numbers and escaping."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vafl.observe.report.figures import plain, ticks
from vafl.observe.report.markup import Markup, element, join
from vafl.observe.report.words import duration, megabytes, metric_value


@given(st.floats(-1e12, 1e12), st.floats(1e-6, 1e12))
def test_ticks_are_few_and_within_the_range(low, width):
    high = low + width
    if not high > low or width < abs(low) * 1e-9:
        return
    found = ticks(low, high)
    assert len(found) <= 7
    assert all(low - width * 1e-6 <= value <= high + width * 1e-6 for value in found)


def test_ticks_are_round():
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(0, 3.5) == pytest.approx([0, 1, 2, 3])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.25, "0.25"), (-2.0, "\N{MINUS SIGN}2"), (1234.0, "1,234"), (45_000.0, "45k"), (3.2e6, "3.2M")],
)
def test_numbers_are_brief(value, text):
    assert plain(value) == text


def test_figures_have_units():
    assert megabytes(1_234_567) == "1.23 MB"
    assert megabytes(900) == "900 bytes"
    assert duration(90) == "90 s"
    assert duration(600) == "10 min"
    assert metric_value("accuracy", 0.8312) == "83.1%"
    assert metric_value("rmse", 12345.6) == "12.3k"
    assert metric_value("r2", -0.0001) == "0.000"
    assert metric_value("r2", -0.01) == "\N{MINUS SIGN}0.010"
    assert metric_value("auc", None) == "\N{EN DASH}"


@given(st.text())
def test_text_and_attributes_are_escaped_and_markup_is_not(text):
    made = element("p", text, [text], title=text)
    assert not {"<", '"'} & set(made.removeprefix('<p title="').removesuffix("</p>").replace('">', "", 1))
    assert join(Markup("<b>")) == "<b>"
