"""Write run folders with all inputs of a report, without running anything."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from vafl.observe.evaluation import Evaluation

EVIL = "<script>alert(1)</script>"
_METRICS = {
    "two": {"auc": 0.8, "log_loss": 0.4, "accuracy": 0.75, "average_precision": 0.6, "brier": 0.1, "f1": 0.5},
    "several": {"accuracy": 0.6, "log_loss": 0.9, "macro_f1": 0.5},
    "numbers": {"r2": 0.7, "rmse": 1.5, "mae": 1.0},
}
_CLASSES = {"two": ["no", "yes"], "several": ["red", "green", "blue"], "numbers": []}
IMPORTANCE = {
    "metric": "auc",
    "rows": 300,
    "parties": {
        "bank": {"loss_increase": 0.2, "sd": 0.01, "headline_drop": 0.123},
        "shop": {"loss_increase": 0.05, "sd": 0.0, "headline_drop": None},
    },
    "features": {"bank": {"income": {"loss_increase": 0.15, "sd": 0.01, "headline_drop": 0.1}}},
}


def written(folder: Path, kind: str = "two", *, rows: int = 300, scored: bool = True, **summary: Any) -> Path:
    """Write a finished run with one kind of labels. `summary` replaces entries of summary.json."""
    folder.mkdir(parents=True)
    metrics, classes = _METRICS[kind], summary.get("classes", _CLASSES[kind])
    headline = next(iter(metrics))
    point = Evaluation(12.5, 600, 2_000_000, 500_000, 0.4, metrics[headline], metrics)
    (folder / "history.jsonl").write_text(json.dumps(asdict(point)) + "\n")
    known = {
        "data": "people.csv",
        "classes": classes,
        "rows": {"train": 3000, "validation": 100, "test": rows},
        "columns": {"bank": 5, "shop": None},
        "rule": "async",
        "updates": 600,
        "seconds": 12.5,
        "traffic": {
            "bank": {"bytes_up": 1_500_000, "bytes_down": 300_000},
            "shop": {"bytes_up": 500_000, "bytes_down": 200_000},
        },
        "simulated": True,
        "metric": {"name": headline, "value": metrics[headline]},
        "unanswered": {},
        "kept": {"updates": 400, "selected_by": "log_loss", "validation": metrics, "test": metrics},
        "baselines": {"trivial": {"test": dict.fromkeys(metrics, 0.5)}},
        "watched": "validation",
        "activations": {"bank": 300, "shop": 300},
        "labels": {"epsilon": None, "kept_with_probability": 1.0},
        "privacy": {"mode": "none", "secure_sum": False},
        "ended": "600 updates were made",
        "interrupted": False,
        "seed": 7,
        "versions": {"vafl": "0.1.0", "torch": "2.9"},
    }
    (folder / "summary.json").write_text(json.dumps(known | summary))
    (folder / "config.toml").write_text(
        '[data]\nname = "csv"\nlabel = "repaid"\n[embedding]\nmodel = "mlp"\n[model]\n'
    )
    if scored:
        scores(kind, rows, classes).write_parquet(folder / "scores.parquet")
    return folder


def scores(kind: str, rows: int, classes: list[str]) -> pl.DataFrame:
    """Return scores of validation and test rows, in the form that a run writes."""
    generator = np.random.default_rng(0)
    every = rows + 100
    part = ["validation"] * 100 + ["test"] * rows
    if kind == "numbers":
        labels = generator.lognormal(size=every)
        return pl.DataFrame({"part": part, "label": labels, "score": labels + generator.normal(size=every)})
    outputs = generator.normal(size=(every, len(classes)))
    places = (outputs + generator.gumbel(size=outputs.shape)).argmax(axis=1)
    shares = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    labels = [classes[place] for place in places]
    if kind == "two":
        return pl.DataFrame({"part": part, "label": labels, "score": shares[:, 1]})
    columns = {f"score_{place}": shares[:, place] for place in range(len(classes))}
    return pl.DataFrame({"part": part, "label": labels, **columns})
