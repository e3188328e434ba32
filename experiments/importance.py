"""Federated permutation importance against the same measure of the pooled table.

python -m experiments.importance --data FOLDER [--out DIR] [--updates N]: Adult, split between three parties.
The model is trained with the defaults for tables. Importance is measured once by requests to the clients, as
`vafl importance` does, and once by scikit-learn, which permutes the columns of one pooled table for the same
model. The ranks must agree: a Spearman correlation of 0.9 or more, or exit code 1.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import tomli_w
import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from sklearn.base import BaseEstimator
from sklearn.inspection import permutation_importance
from sklearn.metrics import log_loss

from experiments.people import SOURCES, People
from vafl.arrays import Array, Doubles
from vafl.config import read_config
from vafl.data.encoding import Encoder
from vafl.data.tables import open_table
from vafl.names import SERVER
from vafl.observe.importance import Importance
from vafl.protocol.prediction_client import embed
from vafl.run.importance import measure_locally
from vafl.run.launch import launch
from vafl.run.model_store import rebuild
from vafl.run.plan import encoder_of
from vafl.run.predict import Deployed
from vafl.run.prediction_records import held_out

AGREEMENT = 0.9
REPEATS = 10
ROWS = 5_000


def write_tables(people: People, folder: Path) -> Path:
    """Write a table for each party and a configuration that leaves everything to the defaults."""
    known = people.known.with_columns(
        person=pl.Series([f"P{number:06d}" for number in range(people.known.height)])
    )
    owners = {SERVER: ["label"], **people.columns}
    for party, columns in owners.items():
        known.select("person", *columns).write_csv(folder / f"{party}.csv")
    tables: dict[str, Any] = {party: {"path": f"{party}.csv", "id": "person"} for party in owners}
    tables[SERVER]["label"] = "label"
    data = {"name": "parties", "parties": list(people.columns)}
    path = folder / "run.toml"
    parties = {party: {"source": table} for party, table in tables.items()}
    path.write_text(tomli_w.dumps({"data": data, "parties": parties}))
    return path


class Pooled(BaseEstimator):  # type: ignore[misc]
    """The trained model as scikit-learn sees it: one estimator of all parties' raw columns."""

    def __init__(self, parties: Sequence[Deployed], server: Deployed) -> None:
        self.parties, self.server = parties, server
        self.tables = [open_table(own.config.sources, own.party) for own in parties]
        self.encoders = [encoder_of(own.model) for own in parties]
        self.models = [rebuild(own.model) for own in parties]
        self.head = rebuild(server.model)

    def fit(self, table: pd.DataFrame, labels: Array) -> "Pooled":
        return self

    @torch.no_grad()
    def chance(self, table: pd.DataFrame) -> Doubles:
        """Return the probability of the second class, [rows]."""
        batch, parts = pl.DataFrame(table.to_dict("list")), []
        for own, encoder, model in zip(self.tables, self.encoders, self.models, strict=True):
            assert isinstance(encoder, Encoder)
            parts.append(embed(model, torch.from_numpy(encoder.encode(own, batch))))
        chance: Doubles = torch.sigmoid(self.head(torch.cat(parts, 1))[:, 0]).double().numpy()
        return chance


def pooled_importance(path: Path, run: Path, people: People, rows: int) -> dict[str, float]:
    """Return column -> increase of the log loss, by scikit-learn on the pooled test rows."""
    config = read_config(path)
    parties = [Deployed.load(config, party, run) for party in people.columns]
    server = Deployed.load(config, SERVER, run)
    tested, labels = held_out(server.config, server.model)
    chosen = np.sort(np.random.default_rng(0).permutation(len(tested))[:rows])
    ids = server.records.ids.gather(tested[chosen])
    columns = [name for own in people.columns.values() for name in own]
    whole = pl.DataFrame({"person": ids})
    for party in people.columns:
        own = pl.read_csv(path.parent / f"{party}.csv", infer_schema=False)
        whole = whole.join(own, on="person", how="left", maintain_order="left")
    found = permutation_importance(
        Pooled(parties, server),
        pd.DataFrame(whole.select(columns).to_dict(as_series=False)),
        labels[chosen].numpy(),
        scoring=lambda model, table, truth: -log_loss(truth, model.chance(table)),
        n_repeats=REPEATS,
        random_state=1,
    )
    return dict(zip(columns, found["importances_mean"].tolist(), strict=True))


def compare(federated: Importance, pooled: dict[str, float], out: Path, console: Console) -> float:
    """Print and write both measures; return the Spearman correlation of the columns' ranks."""
    own = {name: measured for columns in federated.features.values() for name, measured in columns.items()}
    names = sorted(own, key=lambda name: -pooled[name])
    table = Table("column", "federated", "sd", "pooled", box=None)
    for name in names:
        table.add_row(name, f"{own[name].loss_increase:.4f}", f"{own[name].sd:.4f}", f"{pooled[name]:.4f}")
    console.print(table)
    pairs = [(own[name].loss_increase, pooled[name]) for name in names]
    agreement = float(spearmanr(*zip(*pairs, strict=True)).statistic)
    parties = {party: measured.loss_increase for party, measured in federated.parties.items()}
    figures = {"spearman": agreement, "columns": dict(zip(names, pairs, strict=True)), "parties": parties}
    (out / "agreement.json").write_text(json.dumps(figures, indent=2) + "\n")
    console.print(f"rank agreement of {len(names)} columns (Spearman): {agreement:.3f}")
    return agreement


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.importance")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("build/importance"), metavar="DIR")
    parser.add_argument("--updates", type=int, default=0, help="train for so many updates; 0: the default")
    options = parser.parse_args(argv)
    console, people = Console(), SOURCES["adult"](options.data)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, run = write_tables(people, folder), folder / "run"
        trained = read_config(path, [f"stop.updates={options.updates}"])
        launch(trained, run, console)
        config = read_config(path)
        federated = measure_locally(config, lambda party: config, run, console, repeats=REPEATS, rows=ROWS)
        options.out.mkdir(parents=True, exist_ok=True)
        federated.write(options.out)
        pooled = pooled_importance(path, run, people, ROWS)
    return 0 if compare(federated, pooled, options.out, console) >= AGREEMENT else 1


if __name__ == "__main__":
    sys.exit(main())
