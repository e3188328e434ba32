"""Settings of sources: defaults, ranges, and what is declared as a path."""

import dataclasses

import pytest

from vafl.conversion import make
from vafl.data.source_settings import (
    ArraySettings,
    ImageSettings,
    PythonSettings,
    SeriesSettings,
    TableSettings,
)
from vafl.errors import ConfigError
from vafl.scope import declaration_of

GOOD = {
    TableSettings: {"path": "a.csv", "id": "id"},
    SeriesSettings: {"path": "a.csv", "id": "id", "time": "day"},
    ImageSettings: {"path": "photos"},
    ArraySettings: {"path": "a.npy", "ids": "ids.txt"},
    PythonSettings: {"factory": "package.module:Factory"},
}


@pytest.mark.parametrize(
    ("kind", "wrong", "code"),
    [
        (SeriesSettings, {"time": ""}, "VFL-2301"),
        (SeriesSettings, {"wide": {"pulse": ["hr_*"]}}, "VFL-2301"),
        (SeriesSettings, {"time": "id"}, "VFL-2302"),
        (SeriesSettings, {"id": ""}, "VFL-2302"),
        (SeriesSettings, {"steps": -1}, "VFL-2303"),
        (SeriesSettings, {"time": "", "wide": {"a": ["b"]}, "features": ["b"]}, "VFL-2304"),
        (SeriesSettings, {"time": "", "wide": {"a": []}}, "VFL-2305"),
        (SeriesSettings, {"separator": ""}, "VFL-2250"),
        (ImageSettings, {"id": "id"}, "VFL-2311"),
        (ImageSettings, {"id": "id", "column": "id"}, "VFL-2311"),
        (ImageSettings, {"size": [28]}, "VFL-2312"),
        (ImageSettings, {"size": [28, 0]}, "VFL-2312"),
        (ImageSettings, {"size": [28, 1 << 20]}, "VFL-2312"),
        (ImageSettings, {"channels": 2}, "VFL-2313"),
        (ArraySettings, {"path": "a.pkl"}, "VFL-2321"),
        (ArraySettings, {"ids": ""}, "VFL-2322"),
        (ArraySettings, {"tensor": "x"}, "VFL-2323"),
        (ArraySettings, {"scale": "minmax"}, "VFL-1037"),
        (PythonSettings, {"factory": "module"}, "VFL-2331"),
        (PythonSettings, {"factory": "os:system('x')"}, "VFL-2331"),
        (PythonSettings, {"kind": "table"}, "VFL-1037"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(kind, wrong, code):
    with pytest.raises(ConfigError, match=code):
        make(kind, {**GOOD[kind], **wrong})


@pytest.mark.parametrize("kind", GOOD)
def test_files_and_folders_are_declared_as_paths(kind):
    made = make(kind, GOOD[kind])
    paths = {field.name for field in dataclasses.fields(kind) if declaration_of(field).is_path}
    assert paths == {"path", "ids", "alignment", "cache"} & set(vars(made))
    assert make(kind, {**GOOD[kind], "kind": made.kind}) == made
