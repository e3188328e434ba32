"""Columns become features by statistics of the training rows, and identically after a reload."""

import json
import math
import tomllib

import numpy as np
import polars as pl
import pytest
import tomli_w

from vafl.data.encoding import Encoder
from vafl.data.fitting import fit
from vafl.data.source_settings import TableSettings
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


def clipped(distance):
    """Return `distance`, in robust deviations from the median, after the encoder's smooth clip."""
    return distance / math.sqrt(1 + (distance / 3) ** 2)


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
    step = clipped(20 / (20 / 1.349))  # of 20, 40 and 60, whose quartiles are 30 and 50
    expected = [
        [-step, 0, 1, 0, 0, 1, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1],
        [0, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0],
        [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0],  # too large a number, unseen categories, a first missing one
    ]
    np.testing.assert_allclose(features, expected, atol=1e-6)


def test_codes_are_places_among_edges_and_ranks_by_frequency(tmp_path):
    own = table(tmp_path, categories=("plan",), ignore=("note",))
    encoder, _ = fit(own, lines(1, 2, 3, 4), form="codes", flags_absent=True)
    assert encoder.names == ["age", "job", "plan", "income", "(absent)"]
    features = encoder.read(own, lines(1, 2, 4, 5), 5)
    np.testing.assert_allclose(
        features,
        [
            [0, 1, 1, 1, 0],
            [1, 3, 2, 4, 0],  # no job: the last level
            [-1, 1, 2, 3, 0],
            [-1, 0, 0, 0, 0],
            [-1, 0, 0, 0, 1],  # the party does not have this record
        ],
    )
    (between,) = encoder.encode(
        own, pl.DataFrame({"age": ["55"], "job": [""], "plan": ["3"], "income": [""]})
    )
    assert between[0] == pytest.approx(1.75)


def test_rare_categories_share_a_column_and_unseen_ones_are_among_them(tmp_path):
    content = "id,job\n" + "".join(f"{n},{'abbcccdddd'[n]}\n" for n in range(10)) + "10,new\n11,\n"
    own = table(tmp_path, content, most_categories=2)
    encoder, reports = fit(own, lines(*range(10)))
    assert encoder.names == ["job = d", "job = c", "job is another"]
    assert encoder.read(own, lines(0, 3, 9, 10, 11), 5).tolist() == [
        *([0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 0, 0])
    ]
    assert "4 categories: d, c, b, a, rare ones grouped" in reports[1].why


def test_in_a_large_table_categories_of_a_few_rows_are_rare(tmp_path):
    jobs = ["clerk"] * 996 + ["seer"] * 4
    content = "id,job\n" + "".join(f"{n},{job}\n" for n, job in enumerate(jobs))
    own = table(tmp_path, content)
    encoder, _ = fit(own, lines(*range(1000)), form="codes")
    assert encoder.columns[0].categories == ("clerk",)
    assert encoder.read(own, lines(0, 999), 2).ravel().tolist() == [1, 0]


def test_of_100_000_categories_the_frequent_ones_have_a_code(tmp_path):
    count = 250_000
    names = [f"s{n % 100_000 if n >= 50_000 else n % 4000}" for n in range(count)]
    own = table(tmp_path, "id,street\n" + "".join(f"{n},{name}\n" for n, name in enumerate(names)))
    encoder, reports = fit(own, lines(*range(count)), form="codes")
    assert len(encoder.columns[0].categories) == 4000  # the others have fewer than 5 rows
    assert "100,000 categories" in reports[1].why
    assert encoder.read(own, lines(0, 99_999), 2)[1, 0] == 0  # rare


def test_a_few_words_among_numbers_count_as_missing_and_are_shown(tmp_path):
    content = "id,pay\n" + "".join(f"{n},{n / 7}\n" for n in range(39)) + "39,unknown\n"
    encoder, reports = fit(table(tmp_path, content), lines(*range(40)))
    assert encoder.names == ["pay", "pay is missing"]
    assert '1 are not numbers, such as "unknown"' in reports[1].why


def test_names_ids_and_types_that_mean_nothing_to_a_model_are_dropped(tmp_path):
    columns = {
        "id": range(100),
        "name": [f"person {n}" for n in range(100)],
        "list": [[1]] * 100,
        "x": [n % 30 for n in range(100)],
        "line": [1000 + (37 * n) % 100 for n in range(100)],
        "contract_id": [7919 * n for n in range(100)],
        "cents": [7919 * n for n in range(100)],
    }
    pl.DataFrame(columns).write_parquet(tmp_path / "t.parquet")
    own = Table("bank", TableSettings(str(tmp_path / "t.parquet"), "id"))
    encoder, reports = fit(own, lines(*range(100)))
    assert encoder.names == ["x", "cents"]
    why = {report.name: report.why for report in reports}
    assert '100 distinct values in 100 rows, such as "' in why["name"]
    assert "List(Int64) cannot be used" in why["list"]
    assert why["line"] == why["contract_id"] == "a different whole number in every row, as ids are"
    ignored = TableSettings(str(tmp_path / "t.parquet"), "id", ignore=("x", "cents"))
    with pytest.raises(DataError, match="VFL-2201"):
        fit(Table("bank", ignored), lines(*range(99)))


def test_dates_become_days_weekdays_months_and_hours_in_both_formats(tmp_path):
    days = pl.datetime_range(pl.datetime(2020, 1, 1, 8), pl.datetime(2020, 12, 31), "3d5h", eager=True)
    frame = pl.DataFrame({"id": range(len(days)), "when": days, "day": days.dt.date()})
    frame.write_parquet(tmp_path / "t.parquet")
    frame.with_columns(pl.col("when").dt.strftime("%Y-%m-%dT%H:%M:%SZ")).write_csv(tmp_path / "t.csv")
    found = []
    for name in ("t.csv", "t.parquet"):
        own = Table("bank", TableSettings(str(tmp_path / name), "id"))
        encoder, reports = fit(own, lines(*range(len(days))), form="codes")
        found.append(encoder.read(own, lines(*range(len(days))), len(days)))
    assert encoder.names == [
        *("when days", "when weekday", "when month", "when hour"),
        *("day days", "day weekday", "day month"),
    ]
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    np.testing.assert_array_equal(found[0][:, 1], days.dt.weekday())
    np.testing.assert_array_equal(found[0][:, 2], days.dt.month())
    np.testing.assert_array_equal(found[0][:, 3], days.dt.hour())
    assert reports[1].why == "from 2020-01-01 to 2020-12-28"
    named = Table("bank", TableSettings(str(tmp_path / "t.csv"), "id", categories=("day",)))
    assert fit(named, lines(*range(5)))[0].columns[1].kind == "category"


def test_a_column_without_a_name_is_left_out(tmp_path):
    content = ",id,x\n" + "".join(f"{n},{n},{n % 7}\n" for n in range(100))
    encoder, reports = fit(table(tmp_path, content), lines(*range(100)))
    assert encoder.names == ["x"]
    assert {report.name: report.why for report in reports}[""] == "it has no name, like an index"


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
    assert encoder.columns[0].centre == 34.5
    assert reports[2].why == "missing in every training row"


def test_an_encoder_survives_toml_and_json(tmp_path):
    own = table(tmp_path, categories=("plan",))
    encoder, _ = fit(own, lines(1, 2, 3, 4), flags_absent=True)
    for saved in (tomllib.loads(tomli_w.dumps(encoder.to_dict())), json.loads(json.dumps(encoder.to_dict()))):
        assert Encoder.from_dict(saved) == encoder
    assert encoder.absent_row().tolist() == [0.0] * (len(encoder.names) - 1) + [1.0]
    whole = encoder.to_dict()
    for junk in ({}, {**whole, "flags_absent": 1}, {**whole, "columns": [{"kind": "code"}]}, {"columns": 3}):
        with pytest.raises(DataError, match="VFL-2196"):
            Encoder.from_dict(junk)


def test_a_file_without_a_column_of_the_model_is_refused(tmp_path):
    encoder, _ = fit(table(tmp_path), lines(1, 2, 3))
    with pytest.raises(DataError, match=r"VFL-2194.*age"):
        encoder.read(table(tmp_path, CSV.replace("age", "years")), lines(1), 1)


def test_a_public_encoder_depends_on_no_record(tmp_path):
    one, _ = fit(table(tmp_path, ignore=("job", "plan", "income", "note", "same")), lines(1, 2), public=True)
    other, _ = fit(
        table(tmp_path, ignore=("job", "plan", "income", "note", "same")), lines(3, 4), public=True
    )
    assert one == other
    assert one.read(table(tmp_path), lines(1, 4), 2).tolist() == [[20.0, 0.0], [0.0, 0.0]]
    with pytest.raises(DataError, match=r"VFL-2202.*job"):
        fit(table(tmp_path), lines(1, 2, 3), public=True)


def test_numbers_far_from_zero_are_scaled_as_any(tmp_path):
    """For example contract numbers: rounding their mean to nine digits moved it by a hundred deviations."""
    content = "id,x\n" + "".join(f"{n},{4930123450000 + n % 50}\n" for n in range(100))
    own = table(tmp_path, content)
    features = fit(own, lines(*range(100)))[0].read(own, lines(*range(100)), 100)
    assert features.mean() == pytest.approx(0, abs=1e-4)
    assert 0.7 < features.std() < 1.1


def test_one_huge_value_does_not_flatten_the_others(tmp_path):
    content = "id,x\n" + "".join(f"{n},{n % 10}\n" for n in range(100)) + "100,50708\n"
    own = table(tmp_path, content)
    features = fit(own, lines(*range(101)))[0].read(own, lines(*range(101)), 101).ravel()
    assert features[:100].std() > 0.5
    assert features[100] == pytest.approx(3, abs=1e-3)


def test_half_of_the_edges_show_a_column_that_is_mostly_zero(tmp_path):
    values = np.concatenate([np.zeros(5000), np.random.default_rng(0).lognormal(5, 1, 300)])
    content = "id,x\n" + "".join(f"{n},{value!r}\n" for n, value in enumerate(values.tolist()))
    encoder, _ = fit(table(tmp_path, content), lines(*range(5300)), form="codes")
    edges = encoder.columns[0].edges
    assert 60 < len(edges) <= 128
    assert sum(edge > 0 for edge in edges) > 60


def test_many_batches_are_as_one(tmp_path, monkeypatch):
    generator = np.random.default_rng(1)
    values = generator.normal(1e6, 1.0, size=5000)
    content = "id,x,job\n" + "".join(f"{n},{value!r},{n % 7}\n" for n, value in enumerate(values.tolist()))
    whole, _ = fit(table(tmp_path, content, categories=("job",)), lines(*range(5000)))
    monkeypatch.setattr("vafl.data.tables._CELLS", 0)  # the fewest lines: 1024
    parts, _ = fit(table(tmp_path, content, categories=("job",)), lines(*range(5000)))
    assert parts == whole
    assert whole.columns[0].centre == pytest.approx(np.median(values), rel=1e-12)


def test_a_sample_of_a_long_table_is_enough_for_its_edges(tmp_path, monkeypatch):
    monkeypatch.setattr("vafl.data.fitting._SAMPLE", 500)
    values = np.random.default_rng(1).normal(size=5000)
    content = "id,x\n" + "".join(f"{n},{value!r}\n" for n, value in enumerate(values.tolist()))
    encoder, _ = fit(table(tmp_path, content), lines(*range(5000)))
    assert encoder.columns[0].centre == pytest.approx(0, abs=0.15)
    assert encoder.columns[0].scale == pytest.approx(1, abs=0.15)
