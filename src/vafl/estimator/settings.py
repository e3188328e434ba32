"""From an estimator's flat parameters to the configuration of a run."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vafl.config import Config, from_document
from vafl.errors import ConfigError

# A name of the data makes the defaults of `vafl run` on a table those of the estimator. Nothing is read.
_TABLE = {"name": "csv", "path": "X", "label": "y"}
# Of other embeddings than `tabular`: logistic (or ridge) regression, if nothing else is set.
_OTHER_DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {"head": "bias", "combine": "sum"},
    "schedule": {"batch_size": 32, "epochs": 30.0},
    "optimiser": {"name": "Adam", "step_size": 0.01, "l2": 1e-3},
}
_SECTIONS = {
    "model": ("embedding", "width", "hidden", "head", "head_hidden", "combine", "metric", "class_weight"),
    "rule": ("t", "delay_bound"),
    "schedule": ("batch_size", "epochs", "refresh"),
    "optimiser": ("step_size", "l2"),
}
_OPEN = ("batch_size", "epochs")  # 0 leaves them open, as None does the others


def make_config(parameters: Mapping[str, Any], *, seed: int, rows: int, held_out: bool) -> Config:
    """Return the configuration of a fit on so many training rows.

    Args:
        held_out: whether there are rows that training can be stopped by.

    Raises:
        ConfigError: A parameter is out of range, of the wrong type, or misspelt.
    """
    known = {name: _plain(value) for name, value in parameters.items()}
    if not isinstance(known["epochs"], int | float) or not 0 <= known["epochs"] < math.inf:
        raise ConfigError(
            "VFL-8521", f"epochs must be a positive number, or 0 for automatic. Found {known['epochs']!r}."
        )
    document: dict[str, Any] = {
        section: {name: known[name] for name in names if not _is_open(name, known[name])}
        for section, names in _SECTIONS.items()
    }
    document["rule"]["name"] = known["rule"]
    if known["optimiser"] is not None:
        document["optimiser"] |= {"name": known["optimiser"], "options": {}}
    document["delays"] = known["delays"] if isinstance(known["delays"], dict) else {"kind": known["delays"]}
    document["stop"] = {"updates": 0} if held_out else {"updates": 0, "patience": 0}
    document["evaluation"] = {"every": 0}
    if known["embedding"] == "tabular":
        document["data"] = _TABLE
    else:
        document |= {name: {**own, **document[name]} for name, own in _OTHER_DEFAULTS.items()}
    if isinstance(size := document["schedule"].get("batch_size"), int):
        document["schedule"]["batch_size"] = min(size, rows)
    return from_document({"seed": seed, **document})


def _is_open(name: str, value: Any) -> bool:
    return value is None or (name in _OPEN and value == 0)


def _plain(value: Any) -> Any:
    """Searches over parameters try numpy's numbers; a configuration holds Python's."""
    return value.item() if isinstance(value, np.generic) else value
