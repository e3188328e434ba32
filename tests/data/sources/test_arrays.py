"""Arrays: reading by id, scaling, and files that cannot be used."""

import numpy as np
import polars as pl
import pytest
from safetensors.numpy import save_file

from tests.data.sources.making import fitted, opened, wanted, write_array
from vafl.data.source_settings import ArraySettings
from vafl.data.sources import arrays
from vafl.errors import ConfigError, DataError

NUMBERS = np.arange(12, dtype=np.float64).reshape(4, 3) ** 2
IDS = ["d", "a", "c", "b"]


def test_records_are_found_by_id_and_scaled_by_the_training_records(tmp_path):
    source = opened(write_array(tmp_path, IDS, NUMBERS))
    assert source.ids().to_list() == IDS
    encoder, (report,) = fitted(source, wanted("a", "d"))
    trained = NUMBERS[[1, 0]]
    features = encoder.read(source, wanted("a", "b", "c"), 3)
    assert features == pytest.approx((NUMBERS[[1, 3, 2]] - trained.mean(0)) / trained.std(0), rel=1e-5)
    assert encoder.shape == encoder.record_shape == (3,)
    assert report.features == 3


def test_the_sample_and_the_parts_change_nothing(tmp_path, monkeypatch):
    values = np.random.default_rng(0).normal(5, 2, (300, 4, 2)).astype(np.float32)
    source = opened(write_array(tmp_path, range(300), values))
    whole = wanted(*range(299, -1, -1))
    monkeypatch.setattr("vafl.data.sources.common.PART_BYTES", 1)
    encoder, _ = fitted(source, whole)
    assert encoder.means == pytest.approx(values.mean((0, 1)), rel=1e-5)
    assert encoder.deviations == pytest.approx(values.std((0, 1)), rel=1e-5)
    scaled = (values - values.mean((0, 1))) / values.std((0, 1))
    assert encoder.read(source, whole, 300) == pytest.approx(scaled[::-1], rel=1e-3, abs=1e-4)
    monkeypatch.setattr(arrays, "_SAMPLE", 200)
    sampled, _ = fitted(source, whole)
    assert sampled != encoder
    assert sampled == fitted(source, whole)[0]
    assert sampled.means == pytest.approx(encoder.means, abs=0.5)


@pytest.mark.parametrize(
    ("shape", "kind", "settings", "options", "expected"),
    [
        ((2, 3), "f4", {}, {"scale": False}, "as they are"),
        ((2, 3), "f4", {}, {"public": True}, "as they are"),
        ((2, 3), "f4", {"scale": "none"}, {}, "as they are"),
        ((2,), "i8", {}, {}, "scaled"),
        ((2, 3, 4), "f2", {}, {}, "scaled"),
        ((2, 1, 3, 4), "f4", {}, {}, "as they are"),
        ((2, 1, 3, 4), "f4", {"scale": "standard"}, {}, "scaled"),
        ((2, 1, 3, 4), "u1", {}, {}, "divided by 255"),
        ((2, 1, 3, 4), "u1", {"scale": "none"}, {}, "as they are"),
    ],
)
def test_what_is_scaled(tmp_path, shape, kind, settings, options, expected):
    values = np.random.default_rng(0).integers(0, 255, shape).astype(kind)
    source = opened(write_array(tmp_path, "ab", values, **settings))
    encoder, (report,) = fitted(source, wanted("a", "b"), **options)
    assert expected in report.why
    features = encoder.read(source, wanted("a", "b"), 2)
    assert features.dtype == np.float32
    assert features.shape[1:] == (shape[1:] or (1,))
    if expected != "scaled":
        assert features == pytest.approx(values / (255 if "255" in expected else 1))


def test_a_public_encoder_cannot_scale_by_the_records(tmp_path):
    source = opened(write_array(tmp_path, IDS, NUMBERS, scale="standard"))
    with pytest.raises(ConfigError, match="VFL-2358"):
        fitted(source, wanted("a"), public=True)


def test_a_constant_column_is_not_blown_up(tmp_path):
    source = opened(write_array(tmp_path, "abc", np.full((3, 1), 0.1)))
    encoder, _ = fitted(source, wanted("a", "b"))
    assert encoder.read(source, wanted("c"), 1) == pytest.approx(0, abs=1e-6)


def test_safetensors_are_read_like_npy(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"x": NUMBERS, "y": np.arange(4, dtype=np.float16)}, path)
    (tmp_path / "ids.txt").write_text("\r\n".join(IDS))
    found = {}
    for name in ("x", "y"):
        source = opened(ArraySettings(str(path), str(tmp_path / "ids.txt"), tensor=name, scale="none"))
        found[name] = fitted(source, wanted(*IDS))[0].read(source, wanted(*IDS), 4)
    assert found["x"] == pytest.approx(NUMBERS)
    assert found["y"].tolist() == [[0], [1], [2], [3]]
    with pytest.raises(DataError, match=r"VFL-2360.*x, y"):
        opened(ArraySettings(str(path), str(tmp_path / "ids.txt")))


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_ids_may_be_a_column(tmp_path, ending):
    settings = write_array(tmp_path, IDS, NUMBERS)
    ids = tmp_path / f"ids.{ending}"
    frame = pl.DataFrame({"n": range(4), "who": IDS})
    frame.write_csv(ids) if ending == "csv" else frame.write_parquet(ids)
    assert opened(ArraySettings(settings.path, str(ids), "who")).ids().to_list() == IDS
    with pytest.raises(ConfigError, match="VFL-2354"):
        opened(ArraySettings(settings.path, str(ids))).ids()


def used(settings, training):
    source = opened(settings)
    source.ids()
    if training is not None:
        fitted(source, wanted(*training))


def test_files_that_cannot_be_used_are_refused_by_name(tmp_path):
    good = write_array(tmp_path, IDS, NUMBERS)

    def refused(code, array=NUMBERS, ids=IDS, content=None, read=False):
        settings = write_array(tmp_path, ids, np.asarray(array))
        if content is not None:
            (tmp_path / "array.npy").write_bytes(content)
        with pytest.raises(DataError, match=code) as error:
            used(settings, ids if read else None)
        assert str(tmp_path) in str(error.value)

    refused("VFL-2352", np.array(["a", "b", "c", "d"]))
    refused("VFL-2352", np.array(3.0))
    refused("VFL-2352", np.empty((4, 0)))
    refused("VFL-2352", np.ones((4, 2), dtype=complex))
    refused("VFL-2353", np.asfortranarray(NUMBERS))
    refused("VFL-2356", NUMBERS[:3])
    refused("VFL-2034", ids=["a", "a", "b", "c"])
    refused("VFL-2032", ids=["a", "", "b", "c"])
    refused("VFL-2359", np.array([{}, {}], dtype=object))
    refused("VFL-2359", content=b"")
    refused("VFL-2359", content=b"\x93NUMPY" + bytes(100))
    refused(r"VFL-2357.*\"c\"", np.where(np.arange(4)[:, None] == 2, np.inf, NUMBERS), read=True)
    refused(r"VFL-2357.*\"d\"", np.where(np.arange(4)[:, None] == 0, 1e300, NUMBERS), read=True)
    whole = (np.save(tmp_path / "array.npy", NUMBERS), (tmp_path / "array.npy").read_bytes())[1]
    refused("VFL-2359", content=whole[:-1])
    (tmp_path / "b.safetensors").write_bytes(whole)
    with pytest.raises(DataError, match="VFL-2359"):
        opened(ArraySettings(str(tmp_path / "b.safetensors"), good.ids))
    for path, ids in ((tmp_path / "no.npy", good.ids), (good.path, tmp_path / "no.txt")):
        with pytest.raises(DataError, match="VFL-2351"):
            opened(ArraySettings(str(path), str(ids)))
    (tmp_path / "array.npy").write_bytes(whole)
    (tmp_path / "ids.txt").write_bytes(b"\xff\xfe\n" * 4)
    with pytest.raises(DataError, match="VFL-2355"):
        opened(good).ids()


def test_another_shape_than_in_training_is_refused(tmp_path):
    encoder, _ = fitted(source := opened(write_array(tmp_path, IDS, NUMBERS)), wanted("a"))
    other = opened(write_array(tmp_path, IDS, NUMBERS[:, :2]))
    with pytest.raises(DataError, match="VFL-2363"):
        encoder.read(other, wanted("a"), 1)
    with pytest.raises(DataError, match=r"VFL-2344.*1 of 2"):
        encoder.read(source, wanted("a", "nobody"), 2)
