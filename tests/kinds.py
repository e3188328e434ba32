"""A label holder and a client for each kind of source, whose records together decide the label."""

from dataclasses import asdict

import numpy as np
import polars as pl
from PIL import Image

from tests.data.sources.making import write_array, write_series, write_table
from vafl.config import from_document
from vafl.data.source_settings import ImageSettings, PythonSettings

KINDS = ("table", "series", "images", "arrays", "python")  # each is also the name of its client
MODELS = {
    "table": {"model": "tabular", "hidden": [8]},
    "series": {"model": "lstm", "hidden": [4]},
    "images": {"model": "cnn", "hidden": [4, 4]},
    "arrays": {"model": "mlp", "hidden": [8]},
    "python": {"model": "linear"},
}


class Gauge:
    """A party's own code: one number for each person, from a file."""

    shape = (2,)

    def __init__(self, path):
        self._values = np.load(path)

    def ids(self):
        return [f"P{int(number):03d}" for number in self._values[:, 0]]

    def read(self, positions):
        return self._values[positions, 1:]


def write_kinds(folder, people=120, seed=0, share=0.9):
    """Write the parties' data, and return party -> its source.

    Each client has a signal for a share of the people. The label is whether a person's signals sum up to more
    than 0.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chance = np.random.default_rng(seed)
    names = [f"P{number:03d}" for number in range(people)]
    signals = chance.normal(size=(people, len(KINDS)))

    def some():
        return chance.permutation(people)[: round(share * people)]

    labels = ["yes" if signal > 0 else "no" for signal in signals.sum(1)]
    own, held = signals[:, 0], some()
    holder = write_table(folder, names, "labels", label=labels)
    table = write_table(
        folder, [names[n] for n in held], number=own[held], word=np.resize(["a", "b"], len(held))
    )
    held = some()
    lines = [(names[n], step, signals[n, 1], step) for n in held for step in range(n % 2, 3)]
    series = write_series(folder, lines)
    (folder / "images").mkdir(exist_ok=True)
    for n in some():
        grey = np.clip(128 + 50 * signals[n, 2], 0, 255)
        Image.new("L", (6, 4), int(grey)).save(folder / "images" / f"{names[n]}.png")
    held = some()
    noise = chance.normal(size=len(held))
    arrays = write_array(folder, [names[n] for n in held], np.stack([signals[held, 3], noise], 1))
    held = some()
    np.save(folder / "gauge.npy", np.stack([held, signals[held, 4], np.ones(len(held))], 1))
    gauge = PythonSettings(f"{__name__}:Gauge", {"path": str(folder / "gauge.npy")})
    holder = {**asdict(holder), "label": "label"}
    sources = {"table": table, "series": series, "images": ImageSettings(str(folder / "images"))}
    sources |= {"arrays": arrays, "python": gauge}
    return {"server": holder, **{name: asdict(source) for name, source in sources.items()}}


def kinds_document(folder, *parties, sources=None, **sections):
    """Return a configuration document for these clients; for one of each kind if none is given.

    Args:
        sources: party -> its source; None writes new data into the folder.
    """
    clients = parties or KINDS
    sources = write_kinds(folder) if sources is None else sources
    for name, source in sources.items():
        source["alignment"] = str(folder / f"{name}.alignment.parquet")
        source["cache"] = str(folder / f"{name}.cache")
    whole = {
        "data": {"name": "parties", "parties": list(clients), "records": "labelled"},
        "model": {"head": "tabular", "combine": "concat", "width": 4, "head_hidden": [8]},
        "parties": {name: {"source": sources[name]} for name in ("server", *clients)},
        "schedule": {"batch_size": 16},
        "optimiser": {"name": "AdamW", "step_size": 0.01},
        "stop": {"updates": 60, "patience": 0},
        "evaluation": {"every": 50},
    }
    for name in clients:
        whole["parties"][name]["embedding"] = dict(MODELS[name])  # tests may change it
    for name, values in sections.items():
        whole[name] = {**whole.get(name, {}), **values}
    return whole


def kinds_configuration(folder, *parties, **options):
    """Return the same as a Config."""
    return from_document(kinds_document(folder, *parties, **options))


def ids_of(folder):
    """Return the ids of the people that the label holder knows."""
    return pl.read_csv(folder / "labels.csv")["id"].to_list()
