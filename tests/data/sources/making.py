"""Small sources of every kind, made in a folder."""

import numpy as np
import polars as pl
from PIL import Image

from vafl.data.source_settings import (
    ArraySettings,
    ImageSettings,
    PythonSettings,
    SeriesSettings,
    TableSettings,
)
from vafl.data.sources.opening import open_source
from vafl.data.tables import POSITION


def opened(settings, party="bank"):
    return open_source({party: settings}, party)


def wanted(*ids, start=0):
    """Return the records with these ids as rows from `start` on."""
    rows = pl.Series(range(start, start + len(ids)), dtype=pl.Int64)
    return pl.DataFrame({"id": list(map(str, ids)), POSITION: rows}, schema_overrides={"id": pl.String})


def fitted(source, training, **options):
    given = {"form": "dense", "scale": True, "public": False, "flags_absent": False}
    return source.fit(training, **{**given, **options})


def pixels(number, channels=1, height=4, width=6):
    """Return the bytes [height, width, channels] of a picture; each number has another one."""
    chance = np.random.default_rng(number)
    return chance.integers(0, 256, (height, width, channels), dtype=np.uint8)


def write_images(folder, ids, **shape):
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(ids):
        content = pixels(number, **shape)
        Image.fromarray(content[..., 0] if content.shape[2] == 1 else content).save(folder / f"{name}.png")
    return ImageSettings(str(folder))


def write_array(folder, ids, array, **settings):
    np.save(folder / "array.npy", array)
    (folder / "ids.txt").write_text("".join(f"{name}\n" for name in ids))
    return ArraySettings(str(folder / "array.npy"), str(folder / "ids.txt"), **settings)


def write_series(folder, lines, **settings):
    """Write lines (id, time, values) with the columns a, b, ... as a long CSV."""
    names = "abcdefgh"[: len(lines[0]) - 2]
    rows = [",".join("" if value is None else str(value) for value in line) for line in lines]
    (folder / "series.csv").write_text("\n".join([",".join(["id", "time", *names]), *rows, ""]))
    return SeriesSettings(str(folder / "series.csv"), "id", "time", **settings)


def write_table(folder, ids, party="table", **columns):
    pl.DataFrame({"id": ids, **columns}).write_csv(folder / f"{party}.csv")
    return TableSettings(str(folder / f"{party}.csv"), "id")


class Records:
    """What a party's own code may look like."""

    def __init__(self, count=5, shape=(2,), wrong=""):
        self.shape, self._count, self._wrong = shape, count, wrong

    def ids(self):
        return {"ids": 3, "kinds": ["a", 1], "twice": ["a", "a"]}.get(
            self._wrong, [f"P{number}" for number in range(self._count)]
        )

    def read(self, positions):
        if self._wrong == "fails":
            raise KeyError("lost")
        if self._wrong == "text":
            return "text"
        found = np.array([np.full(self.shape, place, dtype=np.float32) for place in positions])
        if self._wrong == "nan":
            found[0] = np.nan
        return found[:-1] if self._wrong == "short" else found


def python(name="Records", **options):
    return PythonSettings(f"{Records.__module__}:{name}", options)


number = 7  # no factory


def incomplete():
    """Return an object without `read`."""
    return Image
