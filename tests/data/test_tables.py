"""Good and bad files of parties: every problem gives an error that names the file."""

import gzip
import subprocess
import sys

import polars as pl
import pytest

from tests.waiting import LIMIT
from vafl.data.source_settings import TableSettings
from vafl.data.tables import POSITION, Table
from vafl.errors import ConfigError, DataError


def table(path, content=None, **settings):
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Table("bank", TableSettings(path=str(path), **{"id": "id", **settings}))


def read(own, columns=None):
    ids = own.ids()
    wanted = pl.DataFrame({"id": ids, POSITION: range(len(ids))})
    return pl.concat(own.batches(columns or own.features, wanted))


def test_a_csv_is_text_until_it_is_encoded_and_a_parquet_file_is_typed(tmp_path):
    own = table(tmp_path / "a.csv", "id,age,job\n007,41, clerk\n7,?,\n")
    assert own.ids().to_list() == ["007", "7"]
    values = read(own).select(own.values(name, own.schema[name]) for name in ("age", "job"))
    assert values.rows() == [("41", "clerk"), (None, None)]
    pl.DataFrame({"id": [7, 8], "age": [41.0, None]}).write_parquet(tmp_path / "a.parquet")
    typed = table(tmp_path / "a.parquet")
    assert typed.ids().to_list() == ["7", "8"]
    assert typed.schema["age"] == pl.Float64
    with gzip.open(tmp_path / "a.csv.gz", "wt") as file:
        file.write("id;age\n1;2\n")
    assert read(table(tmp_path / "a.csv.gz", separator=";"))["age"].to_list() == ["2"]


def test_features_are_chosen_by_name_and_pattern(tmp_path):
    content = "id,age,pay_1,pay_2,note\n1,2,3,4,x\n"
    assert table(tmp_path / "a.csv", content).features == ["age", "pay_1", "pay_2", "note"]
    assert table(tmp_path / "a.csv", features=("pay_*", "age")).features == ["pay_1", "pay_2", "age"]
    assert table(tmp_path / "a.csv", ignore=("pay_*", "note")).features == ["age"]
    with pytest.raises(DataError, match=r"VFL-2084.*parties\.bank\.source\.features.*agee"):
        _ = table(tmp_path / "a.csv", features=("agee",)).features


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", r"VFL-2284.*empty CSV"),
        ("a.csv", "id,x\n", "VFL-2033"),
        ("a.csv", "id;x\n1;2\n", "VFL-2282"),
        ("a.csv", "key,x\n1,2\n", 'no column "id"'),
        ("a.csv", "id,x\n1,2\n1,3\n", "VFL-2034"),
        ("a.csv", "id,x\n1,2\n,3\n", r"VFL-2032.*id"),
        ("a.csv", "id,x\n1,2,3\n", "VFL-2284"),
        ("a.csv", 'id,x\n1,"2\n3,4\n', "VFL-2284"),
        ("a.csv", "id,x\n1,Müller\n".encode("latin-1"), r"VFL-2092.*WINDOWS\-1252"),
        ("a.csv", bytes(range(256)) * 40, 'no column "id"'),
        ("a.csv", b"id,x\n" + bytes(range(128, 256)) * 40, "VFL-2092"),
        ("a.csv.gz", gzip.compress(b"id,x\n" * 999, mtime=0)[:40], "VFL-2284"),
        ("a.parquet", b"PAR1" + bytes(100), r"VFL-2284.*Parquet file"),
        ("a.parquet", "id,x\n1,2\n", r"VFL-2284.*Parquet file"),
    ],
)
def test_what_is_no_table_is_refused_with_the_file_s_name(tmp_path, name, content, message):
    path = tmp_path / name
    with pytest.raises(DataError, match=message) as refused:
        read(table(path, content))
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_parquet_file_cut_short_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pl.DataFrame({"id": range(5000), "x": range(5000)}).write_parquet(path)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:-3], whole[:-200] + bytes(100) + whole[-100:]):
        with pytest.raises(DataError, match=r"VFL-2284.*Parquet file"):
            read(table(path, content))
    with pytest.raises(DataError, match="VFL-2281"):
        table(tmp_path / "missing.parquet")


def test_a_file_changed_since_it_was_aligned_is_noticed(tmp_path):
    own = table(tmp_path / "a.csv", "id,x\n1,2\n")
    wanted = pl.DataFrame({"id": ["1", "2"], POSITION: [0, 1]})
    with pytest.raises(DataError, match="VFL-2283"):
        own.check_found(sum(batch.height for batch in own.batches(["x"], wanted)), wanted)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"separator": "--"}, "VFL-2250"),
        ({"most_categories": 0}, "VFL-2251"),
        ({"label": "id"}, r"VFL-2252.*id"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        TableSettings(**{"path": "a.csv", "id": "id", **settings})


_READ = """
import resource, sys
import polars as pl
from vafl.data.tables import POSITION, Table
from vafl.data.source_settings import TableSettings
own = Table("bank", TableSettings(sys.argv[1], "id"))
wanted = pl.DataFrame({"id": own.ids()}).with_row_index(POSITION)[::10]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
lines = sum(batch.height for batch in own.batches(own.features, wanted))
print(lines, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def test_a_file_is_streamed_and_never_held_whole(tmp_path):
    """Its 30 million fields would take 16 bytes each in memory."""
    header, rest = ",".join(f"x{number}" for number in range(300)), ",7" * 300
    lines = "".join(f"{number}{rest}\n" for number in range(100_000))
    (tmp_path / "a.csv").write_text(f"id,{header}\n{lines}")
    command = [sys.executable, "-c", _READ, str(tmp_path / "a.csv")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT)
    lines, megabytes = map(int, done.stdout.split())
    assert lines == 10_000
    assert megabytes < 350
