"""Columns become features by what the training rows showed, and the same again from what was saved."""

import json
import math
import tomllib

import numpy as np
import polars as pl
import pytest
import tomli_w

from vafl.data.encoding import Encoder
from vafl.data.fitting import fit
from vafl.data.settings import TableSettings
from vafl.data.tables import POSITION, Table
from vafl.errors import DataError

CSV = """id,age,job,plan,income,note,empty,same
1,20,clerk,1,10,a,,x
2,40,,2,n.a.,b,,x
3,60,cook,1,30,c,NA,x
4,?,clerk,2,50,d,?,x
5,1e99,pilot,3,,e,,y
"""


def table(tmp_path, content=CSV, **settings):
    (tmp_path / "t.csv").write_text(content)
    return Table("bank", TableSettings(str(tmp_path / "t.csv"), "id", **settings))


def lines(*ids):
    return pl.DataFrame({"id": [str(number) for number in ids], POSITION: range(len(ids))})


def test_features_by_the_training_rows_alone(tmp_path):
    own = table(tmp_path, categories=("plan",), ignore=("note",))
    encoder, reports = fit(own, lines(1, 2, 3, 4))
    assert encoder.names == [
        *("age", "age is missing", "job = clerk", "job = cook", "job is missing"),
        *("plan = 1", "plan = 2", "income = 10", "income = 30", "income = 50", "income = n.a."),
    ]
    use = {report.name: (report.use, report.why) for report in reports}
    assert use["id"] == ("dropped", "the id")
    assert use["note"] == ("dropped", "ignored")
    assert use["empty"] == ("dropped", "missing in every training row")
    assert use["same"] == ("dropped", 'always "x" in the training rows')
    features = encoder.read(own, lines(1, 2, 4, 5), 4)
    step = 20 / math.sqrt(800 / 3)  # of 20, 40 and 60
    expected = [
        [-step, 0, 1, 0, 0, 1, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1],
        [0, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0],
        [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0],  # too large a number, unseen categories, a first missing one
    ]
    np.testing.assert_allclose(features, expected, atol=1e-6)


def test_rare_categories_share_a_column_and_unseen_ones_are_among_them(tmp_path):
    content = "id,job\n" + "".join(f"{n},{'abbcccdddd'[n]}\n" for n in range(10)) + "10,new\n11,\n"
    own = table(tmp_path, content, most_categories=2)
    encoder, reports = fit(own, lines(*range(10)))
    assert encoder.names == ["job = c", "job = d", "job is another"]
    assert encoder.read(own, lines(0, 3, 9, 10, 11), 5).tolist() == [
        *([0, 0, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0])
    ]
    assert "4 categories: c, d, the rarer ones as one" in reports[1].why


def test_a_few_words_among_numbers_count_as_missing_and_are_shown(tmp_path):
    content = "id,pay\n" + "".join(f"{n},{n}\n" for n in range(39)) + "39,unknown\n"
    encoder, reports = fit(table(tmp_path, content), lines(*range(40)))
    assert encoder.names == ["pay", "pay is missing"]
    assert '1 are no number, such as "unknown"' in reports[1].why


def test_names_and_types_that_mean_nothing_to_a_model_are_dropped(tmp_path):
    names = pl.Series([f"person {n}" for n in range(100)])
    days = pl.date_range(pl.date(2020, 1, 1), pl.date(2020, 4, 9), eager=True)
    frame = pl.DataFrame({"id": range(100), "name": names, "day": days, "list": [[1]] * 100, "x": range(100)})
    frame.write_parquet(tmp_path / "t.parquet")
    own = Table("bank", TableSettings(str(tmp_path / "t.parquet"), "id"))
    encoder, reports = fit(own, lines(*range(100)))
    assert encoder.names == ["x"]
    why = {report.name: report.why for report in reports}
    assert '100 different values in 100 rows, such as "' in why["name"]
    assert "Date is no type to learn from" in why["day"]
    with pytest.raises(DataError, match=r"at least one column. None is left: .*name: text with"):
        fit(Table("bank", TableSettings(str(tmp_path / "t.parquet"), "id", ignore=("x",))), lines(*range(99)))


def test_dates_written_as_text_and_columns_without_a_name_are_left_out(tmp_path):
    rows = [f"{n},{n},2020-01-{n % 28 + 1:02},2020-01-{n % 3 + 1:02}T08:00:00Z,{n % 7}\n" for n in range(100)]
    content = ",id,day,time,x\n" + "".join(rows)
    encoder, reports = fit(table(tmp_path, content), lines(*range(100)))
    assert encoder.names == ["x"]
    why = {report.name: report.why for report in reports}
    assert why["day"] == why["time"] == "dates: write numbers, or name it in categories"
    assert why[""] == "it has no name: an index?"
    assert len(fit(table(tmp_path, content, categories=("time",)), lines(*range(100)))[0].names) == 4


def test_numbers_and_categories_mean_the_same_in_both_formats(tmp_path):
    generator = np.random.default_rng(0)
    kinds = [None if kind == 3 else float(kind) for kind in generator.integers(0, 4, 200)]
    frame = pl.DataFrame({"id": range(200), "x": generator.normal(size=200), "kind": kinds})
    frame = frame.with_columns(y=pl.when(pl.col("x") < 1).then("x"))  # a sixth is missing
    frame.with_columns(pl.col("kind", "y").fill_null(float("nan"))).write_parquet(tmp_path / "t.parquet")
    frame.with_columns(kind=pl.col("kind").cast(pl.Int8)).write_csv(tmp_path / "t.csv")
    found = []
    for name in ("t.csv", "t.parquet"):
        own = Table("bank", TableSettings(str(tmp_path / name), "id", categories=("kind",)))
        encoder, _ = fit(own, lines(*range(200)))
        found.append((encoder, encoder.read(own, lines(*range(200)), 200)))
    assert found[0][0] == found[1][0]
    assert found[0][0].names[-2:] == ["y", "y is missing"]
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_a_column_of_numbers_is_one_though_some_are_infinite(tmp_path):
    values = [float("inf")] * 30 + [float(number) for number in range(70)]
    pl.DataFrame({"id": range(100), "x": values, "y": float("inf")}).write_parquet(tmp_path / "t.parquet")
    encoder, reports = fit(
        Table("bank", TableSettings(str(tmp_path / "t.parquet"), "id")), lines(*range(100))
    )
    assert encoder.names == ["x", "x is missing"]
    assert encoder.columns[0].fill == 34.5
    assert reports[2].why == "missing in every training row"


def test_an_encoder_survives_toml_and_json(tmp_path):
    own = table(tmp_path, categories=("plan",))
    encoder, _ = fit(own, lines(1, 2, 3, 4), flags_absent=True)
    for saved in (tomllib.loads(tomli_w.dumps(encoder.to_dict())), json.loads(json.dumps(encoder.to_dict()))):
        assert Encoder.from_dict(saved) == encoder
    assert encoder.absent_row().tolist() == [0.0] * (len(encoder.names) - 1) + [1.0]
    whole = encoder.to_dict()
    for junk in ({}, {**whole, "flags_absent": 1}, {**whole, "columns": [{"kind": "code"}]}, {"columns": 3}):
        with pytest.raises(DataError, match="as vafl wrote it"):
            Encoder.from_dict(junk)


def test_a_file_without_a_column_of_the_model_is_refused(tmp_path):
    encoder, _ = fit(table(tmp_path), lines(1, 2, 3))
    with pytest.raises(DataError, match="Missing: age"):
        encoder.read(table(tmp_path, CSV.replace("age", "years")), lines(1), 1)


def test_a_public_encoder_depends_on_no_record(tmp_path):
    one, _ = fit(table(tmp_path, ignore=("job", "plan", "income", "note", "same")), lines(1, 2), public=True)
    other, _ = fit(
        table(tmp_path, ignore=("job", "plan", "income", "note", "same")), lines(3, 4), public=True
    )
    assert one == other
    assert one.read(table(tmp_path), lines(1, 4), 2).tolist() == [[20.0, 0.0], [0.0, 0.0]]
    with pytest.raises(DataError, match='"job" holds categories'):
        fit(table(tmp_path), lines(1, 2, 3), public=True)


def test_numbers_far_from_zero_are_standardised_as_any(tmp_path):
    """Contract numbers, say: nine digits of their mean were a hundred deviations away from it."""
    content = "id,x\n" + "".join(f"{n},{4930123450000 + n}\n" for n in range(100))
    own = table(tmp_path, content)
    features = fit(own, lines(*range(100)))[0].read(own, lines(*range(100)), 100)
    assert features.mean() == pytest.approx(0, abs=1e-4)
    assert features.std() == pytest.approx(1, abs=1e-4)


def test_many_batches_are_as_one(tmp_path, monkeypatch):
    generator = np.random.default_rng(1)
    values = generator.normal(1e6, 1.0, size=5000)
    content = "id,x,job\n" + "".join(f"{n},{value!r},{n % 7}\n" for n, value in enumerate(values.tolist()))
    whole, _ = fit(table(tmp_path, content, categories=("job",)), lines(*range(5000)))
    monkeypatch.setattr("vafl.data.tables._CELLS", 0)  # the fewest lines: 1024
    parts, _ = fit(table(tmp_path, content, categories=("job",)), lines(*range(5000)))
    assert parts == whole
    assert whole.columns[0].deviation == pytest.approx(values.std(), rel=1e-8)
    assert whole.columns[0].mean == pytest.approx(values.mean(), rel=1e-8)
