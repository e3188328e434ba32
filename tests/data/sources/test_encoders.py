"""What the encoders of all kinds have in common: they survive a manifest, and mark absent records."""

import json
import tomllib

import numpy as np
import pytest
import tomli_w

from tests.data.sources.making import (
    fitted,
    opened,
    python,
    wanted,
    write_array,
    write_images,
    write_series,
    write_table,
)
from vafl.data.sources.base import encoder_from_dict
from vafl.errors import DataError

IDS = ["P0", "P1", "P2", "P3"]


def write_source(folder, kind):
    if kind == "table":
        return write_table(folder, IDS, age=[30.5, 41, 52, 63], job=["cook", "pilot", "cook", None])
    if kind == "series":
        lines = [(name, step, place * step) for place, name in enumerate(IDS) for step in range(place + 1)]
        return write_series(folder, lines)
    if kind == "images":
        return write_images(folder / "photos", IDS)
    if kind == "arrays":
        return write_array(folder, IDS, np.arange(8.0).reshape(4, 2))
    return python(count=4)


kinds = pytest.mark.parametrize("kind", ["table", "series", "images", "arrays", "python"])


@kinds
@pytest.mark.parametrize("flags_absent", [False, True])
def test_an_encoder_survives_toml_and_json(tmp_path, kind, flags_absent):
    source = opened(write_source(tmp_path, kind))
    encoder, reports = fitted(source, wanted(*IDS), flags_absent=flags_absent)
    assert encoder.kind == kind
    assert reports
    assert source.features
    features = encoder.read(source, wanted(*IDS), 4)
    written = encoder.to_dict()
    assert written["kind"] == kind
    for saved in (tomllib.loads(tomli_w.dumps(written)), json.loads(json.dumps(written))):
        again = encoder_from_dict(saved)
        assert again == encoder
        assert (again.read(source, wanted(*IDS), 4) == features).all()
    for key in written:
        for junk in ({**written, key: None}, {name: value for name, value in written.items() if name != key}):
            with pytest.raises(DataError, match=r"VFL-2(196|343|346)"):
                encoder_from_dict(junk)


@kinds
def test_an_absent_record_is_marked_and_others_are_not(tmp_path, kind):
    source = opened(write_source(tmp_path, kind))
    plain, _ = fitted(source, wanted(*IDS))
    marking, _ = fitted(source, wanted(*IDS), flags_absent=True)
    assert plain.shape == plain.record_shape
    assert marking.flags_absent
    known = wanted("P3", "P1", start=1)
    found = marking.read(source, known, 4)
    assert found.shape == (4, *marking.shape)
    assert found.dtype == np.float32
    for row in (0, 3):
        assert found[row].tolist() == marking.absent_row().tolist()
    assert marking.absent_row()[-1] == 1
    assert found[1:3, -1].tolist() == [0, 0]
    if kind != "table":
        assert marking.record_shape == plain.record_shape
        assert marking.shape == (np.prod(plain.record_shape) + 1,)
        assert not marking.absent_row()[:-1].any()
        assert found[1:3, :-1].ravel().tolist() == plain.read(source, known, 4)[1:3].ravel().tolist()
    into = np.full((4, *marking.shape), 7, dtype=np.float32)
    assert marking.read(source, known, 4, into) is into
    assert (into == found).all()


@kinds
def test_an_encoder_reads_only_sources_of_its_kind(tmp_path, kind):
    encoder, _ = fitted(opened(write_source(tmp_path, kind)), wanted(*IDS))
    other = opened(write_source(tmp_path, "python" if kind == "table" else "table"))
    with pytest.raises(DataError, match=rf'VFL-2341.*"{kind}".*parties\.bank\.source'):
        encoder.read(other, wanted(*IDS), 4)


@kinds
def test_the_fingerprint_follows_the_content(tmp_path, kind):
    settings = write_source(tmp_path, kind)
    before = opened(settings).fingerprint()
    assert opened(settings).fingerprint() == before
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes() + b" ")
    changed = opened(settings if kind != "python" else python(count=5)).fingerprint()
    assert changed != before


def test_what_no_encoder_has_is_refused():
    column = {"name": "a", "centre": 0.0, "scale": 1.0, "bends": False, "flags_missing": False}
    series = {"kind": "series", "columns": [column], "steps": 2, "marks_steps": True, "flags_absent": True}
    arrays = {"kind": "arrays", "record_shape": [2], "flags_absent": True, "divisor": 1.0}
    arrays |= {"means": [0.0, 0.0], "deviations": [1.0, 1.0]}
    images = {"kind": "images", "record_shape": [1, 2, 2], "flags_absent": True, "resizes": True}
    for good, junk in (
        (series, {"steps": 0}),
        (series, {"columns": []}),
        (series, {"columns": [column, column]}),
        (series, {"columns": [{**column, "scale": 0.0}]}),
        (series, {"columns": [{**column, "centre": float("nan")}]}),
        (arrays, {"record_shape": []}),
        (arrays, {"record_shape": [0]}),
        (arrays, {"means": [0.0]}),
        (arrays, {"deviations": [1.0, 0.0]}),
        (arrays, {"divisor": 0.0}),
        (arrays, {"means": [0.0, float("inf")]}),
        (images, {"record_shape": [2, 2]}),
        (images, {"record_shape": [2, 2, 2]}),
        (images, {"kind": "pictures"}),
        (images, {"factory": "os:system"}),
    ):
        assert encoder_from_dict(good)
        with pytest.raises(DataError, match="VFL-2"):
            encoder_from_dict({**good, **junk})
