"""`vafl init` guesses the task from the label column."""

from pathlib import Path

import polars as pl
import pytest

from vafl.data.column_guess import task_of
from vafl.errors import DataError

LINES = 60


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1] * LINES, r"VFL-2071.*1.*60.*y"),
        ([], r"VFL-2071.*0.*y"),
        (["yes", None, "no"] * 20, r"VFL-2072.*y.*20 are missing"),
        ([f"name {n}" for n in range(LINES)], r"VFL-2072.*y.*60"),
    ],
)
def test_a_label_that_cannot_be_learnt_is_refused_before_a_file_is_written(values, message):
    with pytest.raises(DataError, match=message):
        task_of(pl.Series("y", values), Path("a.csv"))
