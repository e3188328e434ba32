"""Files that are not valid CSV, and column names that polars would change."""

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vafl.data import csv_files
from vafl.data.csv_files import header_of, read_blocks
from vafl.data.source_settings import TableSettings
from vafl.data.tables import Table
from vafl.errors import DataError


def test_two_columns_of_one_name_are_refused_since_one_may_be_the_label(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("y;b;y\n1;2;1\n")
    for opened in (
        lambda: header_of(path),
        lambda: Table("bank", TableSettings(str(path), "b", separator=";")),
    ):
        with pytest.raises(DataError, match=r"VFL-2093.*y"):
            opened()
    path.write_text("y,y_duplicated_0\n1,2\n")  # as polars may write it
    assert header_of(path) == (",", ["y", "y_duplicated_0"])


def test_what_is_no_csv_is_told_in_words_of_the_user_s(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n1,2,3\n")
    with pytest.raises(DataError, match="VFL-2284") as ragged:
        list(Table("bank", TableSettings(str(path), "")).all_batches(["a", "b"]))
    assert "truncate_ragged_lines" not in str(ragged.value)
    path.write_bytes("größe,b\n1,2\n".encode("utf-16"))
    with pytest.raises(DataError, match=r"VFL-2092.*UTF\-16"):
        header_of(path)
    path.write_text("")
    with pytest.raises(DataError, match="VFL-2091"):
        header_of(path)
    pl.DataFrame({"a": [1]}).write_parquet(path)
    assert header_of(path) == (",", ["a"])


CELLS = st.sampled_from(["", "a", "1.5", '"x,y"', '"two\nlines"', '"two\r\nlines"', '"say ""hi"""', "é", " "])


@given(
    lines=st.lists(st.lists(CELLS, min_size=2, max_size=3), max_size=20),
    end=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
    mark=st.booleans(),
    size=st.integers(1, 60),
)
def test_a_file_read_in_blocks_is_what_polars_reads_at_once(tmp_path_factory, lines, end, last, mark, size):
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    text = end.join(",".join(line) for line in [["a", "b", "c"], *lines]) + (end if last else "")
    path.write_bytes((("\ufeff" if mark else "") + text).encode())
    whole = pl.scan_csv(path, infer_schema=False).collect()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_files, "_BLOCK", size)
        read = pl.concat(read_blocks(path, dict(whole.schema), ["c", "a"], ","))
    assert read.equals(whole.select("c", "a"))
