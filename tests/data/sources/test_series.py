"""Series: padding, masks, order of time, and the long and the wide form."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.sources.making import fitted, opened, wanted, write_series
from vafl.data.source_settings import SeriesSettings
from vafl.data.sources import series, series_encoder
from vafl.errors import ConfigError, DataError


def test_a_long_file_becomes_padded_steps(tmp_path):
    lines = [("p", 2, 20, 1), ("q", 1, 5, None), ("p", 1, 10, 2), ("p", 10, 30, 3)]
    source = opened(write_series(tmp_path, lines))
    assert source.ids().to_list() == ["p", "q"]
    assert source.features == ["a", "b"]
    encoder, reports = fitted(source, wanted("p", "q"), scale=False)
    assert encoder.names == ["a", "b", "b is missing", "(step)"]
    assert encoder.shape == (3, 4)
    assert [report.missing for report in reports] == [0, 1]
    found = encoder.read(source, wanted("q", "p"), 2)
    assert found[1].tolist() == [[10, 2, 0, 1], [20, 1, 0, 1], [30, 3, 0, 1]]
    assert found[0].tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [5, 0, 1, 1]]


def test_dates_order_the_lines_and_the_latest_steps_are_kept(tmp_path):
    days = ["2024-01-10", "2024-01-09 23:00", "2023-12-31T08:00:00", "2024-01-09"]
    lines = [("p", day, number) for number, day in enumerate(days)]
    source = opened(write_series(tmp_path, lines, steps=3))
    encoder, _ = fitted(source, wanted("p"), scale=False)
    assert encoder.read(source, wanted("p"), 1)[0].tolist() == [[3], [1], [0]]


def test_numbers_are_scaled_by_median_and_quartiles(tmp_path):
    values = np.random.default_rng(0).normal(100, 5, 2000)
    values[0] = 1e9
    lines = [(number // 10, number % 10, value) for number, value in enumerate(values)]
    source = opened(write_series(tmp_path, lines))
    encoder, _ = fitted(source, wanted(*range(200)))
    (column,) = encoder.columns
    assert column.centre == pytest.approx(100, abs=0.5)
    assert column.scale == pytest.approx(5, rel=0.1)
    found = encoder.read(source, wanted(*range(200)), 200)
    assert np.abs(found).max() <= 3
    assert found.std() == pytest.approx(0.8, abs=0.1)


def test_a_sample_of_the_lines_is_enough(tmp_path, monkeypatch):
    lines = [(number // 10, number % 10, float(number % 997)) for number in range(3000)]
    source, training = opened(write_series(tmp_path, lines)), wanted(*range(300))
    whole, _ = fitted(source, training)
    monkeypatch.setattr(series, "_SAMPLE", 500)
    sampled, _ = fitted(source, training)
    assert sampled == fitted(source, training)[0] != whole
    assert sampled.columns[0].centre == pytest.approx(whole.columns[0].centre, abs=60)


def test_a_wide_file_names_the_steps_of_each_feature(tmp_path):
    frame = pl.DataFrame({"id": ["p", "q"], "hr_1": [60, 70], "hr_2": [61, None], "bp_1": [120, 130]})
    frame = frame.with_columns(bp_2=pl.Series([121, 131]), note=pl.Series(["x", "y"]))
    frame.write_parquet(tmp_path / "a.parquet")
    wide = {"pulse": ("hr_*",), "pressure": ("bp_1", "bp_2")}
    for steps, expected in ((0, [[60, 120, 0], [61, 121, 0]]), (1, [[61, 121, 0]])):
        source = opened(SeriesSettings(str(tmp_path / "a.parquet"), "id", wide=wide, steps=steps))
        encoder, _ = fitted(source, wanted("p", "q"), scale=False)
        assert encoder.names == ["pulse", "pressure", "pulse is missing"]
        assert encoder.read(source, wanted("p"), 1)[0].tolist() == expected
    source = opened(SeriesSettings(str(tmp_path / "a.parquet"), "id", wide=wide, steps=3))
    encoder, _ = fitted(source, wanted("p", "q"), scale=False)
    assert encoder.read(source, wanted("q"), 1)[0].tolist() == [[0] * 4, [70, 130, 0, 1], [0, 131, 1, 1]]
    with pytest.raises(DataError, match=r"VFL-2392.*pulse 2, pressure 1"):
        opened(SeriesSettings(str(tmp_path / "a.parquet"), "id", wide={**wide, "pressure": ("bp_1",)}))


record = st.lists(st.tuples(st.integers(0, 50), st.none() | st.integers(-9, 9)), min_size=1, max_size=8)


@given(records=st.lists(record, min_size=1, max_size=6), steps=st.integers(1, 9), data=st.data())
def test_padding_and_masks_agree_with_the_lines(tmp_path_factory, records, steps, data):
    """Lines in any order, several buckets, spilled or not: the same steps as sorting each record by hand."""
    lines = [(place, time, value) for place, own in enumerate(records) for time, value in own]
    lines = data.draw(st.permutations(lines))
    folder = tmp_path_factory.mktemp("series")
    source = opened(write_series(folder, [(*line, 1 + line[0]) for line in lines], steps=steps))
    everyone = wanted(*range(len(records)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(series_encoder, "_BUCKET", data.draw(st.sampled_from([1, 200, 1 << 20])))
        patch.setattr(series_encoder, "_SPOOL", 1)
        names = [
            series_encoder.SeriesColumn("a", 0.0, 1.0, False, True),
            series_encoder.SeriesColumn("b", 0.0, 1.0, False, False),
        ]
        encoder = series_encoder.SeriesEncoder(tuple(names), steps, True, data.draw(st.booleans()))
        found = encoder.read(source, everyone, len(records) + 1)
    assert found[-1].tolist() == encoder.absent_row().tolist()
    for place, own in enumerate(records):
        kept = sorted((line for line in lines if line[0] == place), key=lambda line: line[1])[-steps:]
        expected = np.zeros((steps, 4))
        for step, (_, _, value) in enumerate(reversed(kept), 1):
            expected[-step] = (0, place + 1, 1, 1) if value is None else (value, place + 1, 0, 1)
        flat = found[place][:-1] if encoder.flags_absent else found[place]
        assert flat.reshape(steps, 4).tolist() == expected.tolist()
        assert len(kept) == min(steps, len(own))


def test_the_number_of_steps_has_a_limit_and_settings_decide_first(tmp_path, monkeypatch):
    lines = [("p", number, number % 7) for number in range(20)] + [("q", 0, 1)]
    monkeypatch.setattr(series, "MOST_STEPS", 8)
    source = opened(write_series(tmp_path, lines))
    assert fitted(source, wanted("p"))[0].shape == (8, 1)
    assert fitted(source, wanted("p", "q"))[0].shape == (8, 2)
    source = opened(write_series(tmp_path, lines, steps=30))
    assert fitted(source, wanted("p"))[0].shape == (30, 2)


def test_a_public_encoder_depends_on_no_record(tmp_path):
    lines = [("p", 1, 7, 100), ("p", 2, None, 200), ("q", 1, -7, 300)]
    with pytest.raises(ConfigError, match="VFL-2393"):
        fitted(opened(write_series(tmp_path, lines)), wanted("p"), public=True)
    source = opened(write_series(tmp_path, lines, steps=2))
    found = {fitted(source, wanted(*ids), public=True)[0] for ids in (["p"], ["q"], ["p", "q"])}
    assert len(found) == 1
    (encoder,) = found
    assert encoder.read(source, wanted("p"), 1)[0].tolist() == [[7, 100, 1], [0, 200, 1]]


def test_columns_that_are_no_numbers_are_dropped_or_refused(tmp_path):
    lines = [("p", step, "low" if step % 2 else "high", step, 4) for step in range(9)]
    encoder, reports = fitted(opened(write_series(tmp_path, lines)), wanted("p"))
    assert encoder.names == ["b"]
    assert [report.use for report in reports] == ["dropped", "number", "dropped"]
    for options, settings in (({}, {"features": ("a", "b")}), ({"public": True}, {"steps": 3})):
        with pytest.raises(DataError, match=r'VFL-2395.*"a".*9 of 9'):
            fitted(opened(write_series(tmp_path, lines, **settings)), wanted("p"), **options)
    with pytest.raises(DataError, match=r"VFL-2394.*a: .*c: always 4"):
        fitted(opened(write_series(tmp_path, lines, ignore=("b",))), wanted("p"))
    with pytest.raises(DataError, match="VFL-2391"):
        opened(write_series(tmp_path, lines, ignore=("*",)))


def test_files_that_have_changed_are_noticed(tmp_path):
    lines = [("p", step, step, 2 * step) for step in range(4)]
    source = opened(write_series(tmp_path, lines))
    encoder, _ = fitted(source, wanted("p"))
    with pytest.raises(DataError, match="VFL-2344"):
        encoder.read(source, wanted("p", "q"), 2)
    other = opened(write_series(tmp_path, [("p", step, "x", step) for step in range(4)]))
    with pytest.raises(DataError, match=r'VFL-2401.*"a"'):
        encoder.read(other, wanted("p"), 1)
    fewer = opened(write_series(tmp_path, [("p", step, step) for step in range(4)]))
    with pytest.raises(DataError, match=r"VFL-2400.*Missing: b"):
        encoder.read(fewer, wanted("p"), 1)


@pytest.mark.parametrize(
    ("times", "code"),
    [
        (["1", ""], "VFL-2397"),
        (["1", "soon"], "VFL-2397"),
        (["2024-01-01", "7"], "VFL-2397"),
        (["1", "2024-01-01"], "VFL-2397"),
        (["soon", "later"], "VFL-2397"),
    ],
)
def test_times_must_be_numbers_or_dates(tmp_path, times, code):
    source = opened(write_series(tmp_path, [("p", time, number) for number, time in enumerate(times)]))
    encoder = series_encoder.SeriesEncoder(
        (series_encoder.SeriesColumn("a", 0.0, 1.0, False, False),), 2, False, False
    )
    with pytest.raises(DataError, match=code):
        encoder.read(source, wanted("p"), 1)


def test_missing_files_columns_and_ids_are_named(tmp_path):
    settings = write_series(tmp_path, [("p", 1, 1), ("", 2, 2)])
    with pytest.raises(DataError, match="VFL-2032"):
        opened(settings).ids()
    with pytest.raises(DataError, match=r"VFL-2083.*tim"):
        opened(SeriesSettings(settings.path, "id", "tim"))
    with pytest.raises(DataError, match=r"VFL-2281.*parties\.bank\.source"):
        opened(SeriesSettings(str(tmp_path / "no.csv"), "id", "time"))
    frame = pl.DataFrame({"id": ["p"], "time": [[1]], "a": [1.0]})
    frame.write_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="VFL-2396"):
        fitted(opened(SeriesSettings(str(tmp_path / "a.parquet"), "id", "time")), wanted("p"))
