"""What `vafl init` makes of columns: no id or index is a feature, and no label that cannot be learnt."""

from pathlib import Path

import polars as pl
import pytest

from vafl.data.first_look import task_of, why_ignored
from vafl.errors import DataError

LINES = 60
COLUMNS = ["id", "x"]


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("id", [(7 * n) % 61 for n in range(LINES)], "as ids are"),
        ("x", [(7 * n) % 61 for n in range(LINES)], ""),
        ("x", range(100, 100 + LINES), "as ids are"),
        ("x", [n * n for n in range(LINES)], ""),
        ("", range(LINES), "index"),
        ("id", [n / 2 for n in range(LINES)], ""),
        ("x", [1e300] + [1.0] * (LINES - 1), '1 of 60 values are missing or no numbers, such as "1e+300"'),
    ],
)
def test_ids_and_what_is_no_number_are_ignored(name, values, why):
    found = why_ignored(pl.Series(name, values), COLUMNS)
    assert why in found
    assert bool(found) == bool(why)


def test_a_label_s_task_and_classes_are_told():
    assert task_of(pl.Series(["no", "yes"] * 30), Path("a.csv")) == (
        "classification",
        "2 different values: no, yes",
    )
    assert task_of(pl.Series([f"kind {n % 25}" for n in range(LINES)]), Path("a.csv")) == (
        "classification",
        "25 different values",
    )
    assert task_of(pl.Series([n / 7 for n in range(LINES)]), Path("a.csv"))[0] == "regression"
    assert (
        "half of them beyond 2.9795e+06: "
        in task_of(pl.Series([101_000 * n for n in range(LINES)]), Path())[1]
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1] * LINES, 'Found 1 in 60 lines of "y"'),
        ([], 'Found 0 in 0 lines of "y"'),
        (["yes", None, "no"] * 20, 'In "y", 20 are missing'),
        ([f"name {n}" for n in range(LINES)], "most of the 60 lines have a text of their own"),
    ],
)
def test_a_label_that_cannot_be_learnt_is_refused_before_a_file_is_written(values, message):
    with pytest.raises(DataError, match=message):
        task_of(pl.Series("y", values), Path("a.csv"))
