"""CSV files that are none, or whose columns would be called otherwise than in the file."""

import polars as pl
import pytest

from vafl.data.csv_files import read_csv, read_header
from vafl.data.settings import TableSettings
from vafl.data.tables import Table
from vafl.errors import DataError


def test_two_columns_of_one_name_are_refused_since_one_may_be_the_label(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("y;b;y\n1;2;1\n")
    for opened in (
        lambda: read_header(path),
        lambda: Table("bank", TableSettings(str(path), "b", separator=";")),
    ):
        with pytest.raises(DataError, match='Found "y" more than once'):
            opened()
    path.write_text("y,y_duplicated_0\n1,2\n")  # as polars may have written it
    assert read_header(path) == (",", ["y", "y_duplicated_0"])


def test_what_is_no_csv_is_told_in_words_of_the_user_s(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n1,2,3\n")
    with pytest.raises(DataError, match="the same fields in every line") as ragged:
        read_csv(path)
    assert "truncate_ragged_lines" not in str(ragged.value)
    path.write_bytes("größe,b\n1,2\n".encode("utf-16"))
    with pytest.raises(DataError, match="iconv -f UTF-16 -t UTF-8"):
        read_csv(path)
    pl.DataFrame({"a": [1]}).write_parquet(path)
    with pytest.raises(DataError, match="Found a Parquet file"):
        read_csv(path)
