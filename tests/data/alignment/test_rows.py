import numpy as np
import polars as pl
import pytest

from vafl.data.alignment.rows import Alignment
from vafl.errors import DataError

TOKEN = "0123456789abcdef" * 2


def alignment(**changes):
    whole = {
        "token": TOKEN,
        "rows": 5,
        "classes": ("no", "yes"),
        "ids": pl.Series("id", ["b", "007", "ü"]),
        "numbers": np.array([0, 3, 4]),
        "holders": {"bank": pl.Series([True, False, True])},
        "label": "paid",
    }
    return Alignment(**{**whole, **changes})


@pytest.mark.parametrize("classes", [("no", "yes"), None])
def test_it_reads_back_as_it_was_written(tmp_path, classes):
    written = alignment(classes=classes)
    path = tmp_path / "a[1].parquet"  # no pattern
    written.write(path)
    found = Alignment.read(path)
    assert (found.token, found.rows, found.classes, found.label) == (TOKEN, 5, classes, "paid")
    assert found.ids.to_list() == ["b", "007", "ü"]
    assert found.numbers.tolist() == [0, 3, 4]
    assert {name: held.to_list() for name, held in found.holders.items()} == {"bank": [True, False, True]}
    assert [path.name for path in tmp_path.iterdir()] == ["a[1].parquet"]


def test_a_party_may_have_none_of_the_rows(tmp_path):
    alignment(ids=pl.Series("id", [], pl.String), numbers=np.array([], np.int64), holders={}).write(
        tmp_path / "a"
    )
    assert len(Alignment.read(tmp_path / "a").ids) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token": "short"}, "VFL-2051"),
        ({"rows": 4}, r"VFL-2055.*3"),
        ({"rows": 0}, "VFL-2055"),
        ({"numbers": np.array([0, 3, 3])}, "VFL-2055"),
        ({"numbers": np.array([0, 4, 3])}, "VFL-2055"),
        ({"numbers": np.array([-1, 3, 4])}, "VFL-2055"),
        ({"numbers": np.array([0.0, 3.0, 4.0])}, r"VFL-2055.*4"),
        ({"numbers": np.array([0, 3])}, r"VFL-2054.*3.*2"),
        ({"ids": pl.Series("id", ["a", "a", "b"])}, "VFL-2053"),
        ({"ids": pl.Series("id", ["a", None, "b"])}, "VFL-2053"),
        ({"ids": pl.Series("id", [1, 2, 3])}, "VFL-2053"),
        ({"classes": ("one",)}, "VFL-2052"),
        ({"holders": {"bank": pl.Series([True, False])}}, r"VFL-2056.*bank"),
        ({"holders": {"bank": pl.Series([1, 0, 1])}}, r"VFL-2056.*bank"),
        ({"holders": {"bank": pl.Series([True, None, True])}}, r"VFL-2056.*bank"),
        ({"classes": ("one", "one")}, "VFL-2052"),
    ],
)
def test_what_is_no_alignment_is_refused(changes, message):
    with pytest.raises(DataError, match=message):
        alignment(**changes)


def test_a_missing_file_says_what_to_do(tmp_path):
    with pytest.raises(DataError, match="VFL-2057"):
        Alignment.read(tmp_path / "none.parquet")


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    alignment().write(path)
    whole = path.read_bytes()
    pl.DataFrame({"id": ["a"], "row": [0]}).write_parquet(tmp_path / "foreign.parquet")
    junk = [whole[:50], whole[:-10], b"", b"junk" * 100, (tmp_path / "foreign.parquet").read_bytes()]
    facts = '{"version": %s, "token": "%s", "rows": %s, "label": %s, "classes": null}'
    for version, rows, label in ((2, 2, '""'), (3, '"5"', '""'), (3, 1, '""'), (3, 2, 1)):
        table = pl.DataFrame({"id": ["a", "b"], "row": [0, 1]})
        table.write_parquet(path, metadata={"vafl.alignment": facts % (version, TOKEN, rows, label)})
        junk.append(path.read_bytes())
    for content in junk:
        path.write_bytes(content)
        with pytest.raises(DataError, match="VFL-2059"):
            Alignment.read(path)
