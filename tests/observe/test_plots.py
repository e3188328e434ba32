"""The axes of a plot have names and numbers."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from vafl.observe import plots
from vafl.observe.evaluation import Evaluation
from vafl.observe.record import RecordedRun


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draw runs, and return the four axes."""
    figures: list[Figure] = []

    def draw(*runs):
        monkeypatch.setattr(plots, "save", lambda figure, stem: figures.append(figure) or [stem])
        plots.plot_runs(runs, tmp_path / "progress")
        figures[-1].draw_without_rendering()
        return figures[-1].axes

    return draw


def run(losses, **summary):
    points = [Evaluation(float(n), n, n, n, loss, 0.5 + n / 100) for n, loss in enumerate(losses)]
    return RecordedRun(
        "run",
        Path(),
        {"metric": {"name": "accuracy", "value": 0.5}, "watched": "test", "kept": {"updates": 1}, **summary},
        points,
    )


@pytest.mark.parametrize("losses", [(0.69, 0.6, 0.55), (2.3, 1.0, 0.4), (2.3, 0.1, 0.001), (0.0402, 0.0398)])
def test_the_loss_has_numbers_at_its_axis_however_little_it_changes(drawn, losses):
    axis = drawn(run(losses))[3].yaxis
    low, high = axis.get_view_interval()
    labels = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
    assert sum(bool(label.get_text()) for place, label in labels if low <= place <= high) >= 2


def test_an_axis_names_the_rows_that_its_curve_is_of(drawn):
    assert drawn(run((1.0, 0.5)))[0].get_ylabel() == "test accuracy"
    validated = run((1.0, 0.5), watched="validation")
    assert drawn(validated)[0].get_ylabel() == "validation accuracy"
    assert drawn(validated, run((1.0, 0.5)))[0].get_ylabel() == "test or validation accuracy"


def test_a_run_without_a_loss_is_drawn(drawn):
    drawn(run((None,)))


def test_a_dot_marks_the_models_that_are_kept_unless_they_are_the_last(drawn):
    early, last = (run((1.0, 0.5, 0.4), kept={"updates": update}) for update in (1, 2))
    (dot,) = [line for line in drawn(early)[1].lines if line.get_marker() == "o"]
    assert (dot.get_xdata().tolist(), dot.get_ydata().tolist()) == ([1], [0.51])
    assert not [line for line in drawn(last)[1].lines if line.get_marker() == "o"]


def test_evaluations_without_the_metric_are_left_out(drawn):
    whole = run((1.0, 0.5, 0.4))
    gap = replace(whole, evaluations=[replace(whole.evaluations[0], metric=None), *whole.evaluations[1:]])
    assert drawn(gap)[1].lines[0].get_xdata().tolist() == [1, 2]
    drawn(replace(whole, evaluations=[replace(point, metric=None) for point in whole.evaluations]))


def test_a_metric_that_hardly_changes_is_no_cliff(drawn):
    level = run([1.0] * 12)
    low, high = drawn(
        replace(level, evaluations=[replace(point, metric=0.8) for point in level.evaluations])
    )[0].get_ylim()
    assert high - low == pytest.approx(0.109)
