import polars as pl
import pytest

from vafl.data.alignment.ids import canonical_ids, loosened
from vafl.errors import DataError


def test_whole_numbers_become_digits():
    assert canonical_ids(pl.Series("id", [7, -1, 10**18]), "t").to_list() == ["7", "-1", "1" + "0" * 18]


def test_text_stays():
    column = pl.Series("id", ["007", "ü", " a"])
    assert canonical_ids(column, "t").to_list() == column.to_list()
    assert canonical_ids(column.cast(pl.Categorical), "t").to_list() == column.to_list()


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pl.Series("key", [1.0, 2.0]), r"VFL-2031.*t.*Float64.*key"),
        (pl.Series("key", ["a", None, ""]), r"VFL-2032.*t.*2.*key"),
        (pl.Series("key", [3, 1, 3, 1, 2]), r"VFL-2034.*t.*2.*3, 1"),
        (pl.Series("key", [], pl.String), "VFL-2033"),
    ],
)
def test_ids_that_cannot_be_used(column, message):
    with pytest.raises(DataError, match=message):
        canonical_ids(column, "t")


def test_loosened_ids_forget_zeros_blanks_and_case():
    assert loosened(pl.Series(["007", " 7", "0", "A0", "x "])).to_list() == ["7", "7", "0", "a0", "x"]
