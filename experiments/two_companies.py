"""From two companies' files to predictions for new people, with the command line only.

python -m experiments.two_companies --data FOLDER [--out DIR]: Adult and credit default. Every party is a
process with its own folder. Ids are shuffled, and each company lacks some people and has others. The
predictions are compared with those of a model trained on the pooled table: AUC within 0.01, or exit code 1.
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
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
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from experiments.people import SOURCES, People
from vafl.config import read_config
from vafl.protocol.prediction_client import embed
from vafl.run.model_store import rebuild
from vafl.run.predict import Deployed
from vafl.transport.identity import SERVER

COMPANIES = ("bank", "shop")
EVERYONE = (SERVER, *COMPANIES)
SHARE = 0.9  # share of the people that each company knows
LIMIT = 300.0  # seconds for any command
CLOSE = 0.01
HELD_OUT = {"validation_fraction": 0.1, "test_fraction": 0.1}


def two_companies(people: People) -> People:
    """Return the table with names for people; the shop holds the columns of all other companies."""
    bank, *others = people.columns.values()
    known, new = _named(people.known, 0), _named(people.new, people.known.height)
    columns = {"bank": bank, "shop": [name for other in others for name in other]}
    return People(known, new, columns, people.categories)


def _named(table: pl.DataFrame, first: int) -> pl.DataFrame:
    people = pl.Series("person", [f"P{number:06d}" for number in range(first, first + table.height)])
    return table.with_columns(people)


def write_files(people: People, folder: Path) -> None:
    """Write each party's folder: its files, shuffled, and its configurations."""
    generator = np.random.default_rng(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for party in EVERYONE:
        own = folder / party
        own.mkdir(parents=True)
        columns = ["person", *people.columns.get(party, ["label"])]
        for stage, table in (("known", people.known), ("new", people.new)):
            share = 1.0 if party == SERVER or stage == "new" else SHARE
            lines = generator.permutation(table.height)[: round(share * table.height)]
            kept = [name for name in columns if name != "label" or stage == "known"]
            table[lines].select(kept).write_csv(own / f"{stage}.csv")
            document = _document(people, party, stage, address)
            (own / f"{stage}.toml").write_text(tomli_w.dumps(document))


def _document(people: People, party: str, stage: str, address: str) -> dict[str, Any]:
    table: dict[str, Any] = {
        "path": f"{stage}.csv",
        "id": "person",
        "alignment": f"{stage}.alignment.parquet",
    }
    if party == SERVER and stage == "known":
        table["label"] = "label"
    if own := [name for name in people.categories if name in people.columns.get(party, ())]:
        table["categories"] = own
    return {
        "data": {"name": "parties", "parties": list(COMPANIES), **HELD_OUT},
        "parties": {party: {"source": table}},
        "embedding": {"model": "mlp", "hidden": [32]},
        "model": {"head": "linear", "width": 16, "metric": "auc"},
        "schedule": {"batch_size": 256},
        "optimiser": {"name": "Adam", "step_size": 0.002},
        "stop": {"updates": 3000, "patience": 5},
        "evaluation": {"every": 200},
        "network": {"address": address, "certificates": "certs"},
    }


def together(
    folder: Path, *command: str, stage: str, own: Sequence[str] = (), server: Sequence[str] = ()
) -> None:
    """Run one command at all parties at the same time, each in its own folder, as separate hosts would."""
    processes = {}
    try:
        for party in EVERYONE:
            options = [*server] if party == SERVER else [*own]
            named = [option.replace("PARTY", party) for option in options]
            words = [word.replace("ROLE", "server" if party == SERVER else "client") for word in command]
            with (folder / party / "log.txt").open("ab") as log:
                processes[party] = subprocess.Popen(
                    [sys.executable, "-m", "vafl.cli", *words, f"{stage}.toml", *named],
                    cwd=folder / party,
                    stdout=log,
                    stderr=log,
                )
        for party, process in processes.items():
            if process.wait(LIMIT):
                log_text = (folder / party / "log.txt").read_text()[-2000:]
                raise RuntimeError(f"{command} failed at {party}: {log_text}")
    finally:
        for process in processes.values():
            process.kill()


def through_the_command_line(people: People, folder: Path) -> pl.DataFrame:
    """Run all steps from certificates to predictions, and return the scores."""
    write_files(people, folder)
    parties = [word for party in EVERYONE for word in ("--party", party)]
    subprocess.run([sys.executable, "-m", "vafl.cli", "certs", str(folder / "certs"), *parties], check=True)
    for party in EVERYONE:
        shutil.copytree(folder / "certs" / party, folder / party / "certs")
    who, whom = ("--party", "PARTY"), ("--party", SERVER)
    together(folder, "align", stage="known", own=who, server=whom)
    together(folder, "ROLE", stage="known", own=(*who, "--out", "run"), server=("--out", "run"))
    together(folder, "align", stage="new", own=who, server=whom)
    model = ("--model", "run")
    together(
        folder, "predict", stage="new", own=(*who, *model), server=(*whom, *model, "--out", "scores.csv")
    )
    return pl.read_csv(folder / SERVER / "scores.csv")


def pooled(people: People, folder: Path) -> np.ndarray[Any, Any]:
    """Return the new people's scores by the same model, trained on the pooled table of the same records."""
    sections: dict[str, Any] = {}
    for party in EVERYONE:
        document = _document(people, party, "known", "127.0.0.1:1")
        table = document["parties"][party]["source"]
        table |= {key: str(folder / party / table[key]) for key in ("path", "alignment")}
        sections[party] = {"source": table}
    document |= {"parties": sections, "rule": {"name": "centralised"}, "schedule": {"batch_size": 256}}
    path = folder / "pooled.toml"
    path.write_text(tomli_w.dumps(document))
    command = [sys.executable, "-m", "vafl.cli", "run", str(path), "--out", str(folder / "pooled")]
    subprocess.run(command, check=True, timeout=LIMIT)
    for table in sections.values():
        table |= {key: table[key].replace("known.", "new.") for key in ("path", "alignment")}
    sections[SERVER].pop("label")
    path.write_text(tomli_w.dumps(document))
    config, parts = read_config(path), []
    for party in COMPANIES:
        own = Deployed.load(config, party, folder / "pooled")
        parts.append(embed(rebuild(own.model), own.records.features))
    head = Deployed.load(config, SERVER, folder / "pooled")
    with torch.no_grad():
        outputs = rebuild(head.model)(torch.stack(parts).sum(0))[:, 0].numpy()
    return _labelled(people, head.records.ids, outputs)


def _labelled(people: People, ids: pl.Series, scores: Any) -> np.ndarray[Any, Any]:
    """Return scores and labels, [people, 2]."""
    found = pl.DataFrame({"person": ids, "score": scores}).join(people.new, on="person")
    return found.select("score", "label").to_numpy()


def logistic_regression(people: People, folder: Path) -> float:
    """Return the AUC of scikit-learn on the pooled table of the same records, an independent reference."""
    common = pl.read_parquet(folder / SERVER / "known.alignment.parquet")["id"]
    known = _frame(people.known.filter(pl.col("person").is_in(common.implode())))
    new, schema = _frame(people.new), people.known.schema
    columns = [name for own in people.columns.values() for name in own]
    words = [name for name in columns if name in people.categories or schema[name] == pl.String]
    numbers = [name for name in columns if name not in words]
    encode = make_column_transformer(
        (StandardScaler(), numbers), (OneHotEncoder(handle_unknown="ignore", min_frequency=20), words)
    )
    model = make_pipeline(encode, LogisticRegression(max_iter=1000)).fit(known, known["label"])
    return float(roc_auc_score(new["label"], model.predict_proba(new)[:, 1]))


def _frame(people: pl.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(people.drop("person").to_dict(as_series=False))


def compare(people: People, folder: Path) -> dict[str, float]:
    """Compare the AUC on people that no model has seen."""
    scores = through_the_command_line(people, folder)
    ours = _labelled(people, scores["id"], scores["p(1)"])
    theirs = pooled(people, folder)
    return {
        "federated": float(roc_auc_score(ours[:, 1], ours[:, 0])),
        "pooled": float(roc_auc_score(theirs[:, 1], theirs[:, 0])),
        "logistic regression": logistic_regression(people, folder),
        "people": len(ours),
    }


def main() -> int:
    """Run both tables; return exit code 1 if a federation falls short of its pooled model."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.two_companies", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of public data sets")
    parser.add_argument("--out", type=Path, default=Path("build/two_companies"))
    parser.add_argument("--only", choices=SOURCES)
    options = parser.parse_args()
    if options.out.resolve() == options.data.resolve():
        parser.error(
            f"--out is emptied first, and must not be the data sets' own folder. Found {options.out}."
        )
    results = {}
    for name, read in SOURCES.items():
        if options.only in (None, name):
            shutil.rmtree(options.out / name, ignore_errors=True)
            results[name] = compare(two_companies(read(options.data)), (options.out / name).resolve())
    (options.out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    shown = Table("data", *next(iter(results.values())))
    for name, figures in results.items():
        shown.add_row(name, *(f"{value:.4f}" if value < 1 else f"{value:,}" for value in figures.values()))
    Console().print(shown)
    short = [name for name, figures in results.items() if figures["federated"] < figures["pooled"] - CLOSE]
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
