"""Convert an estimator's flat parameters to the configuration of a run."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vafl.config import Config, from_document
from vafl.errors import ConfigError

# With this section, the configuration has the defaults of `vafl run` on a table. The path is never read.
_TABLE = {"name": "csv", "path": "X", "label": "y"}
# Defaults for embeddings other than `tabular`: logistic or ridge regression.
_OTHER_DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {"head": "bias", "combine": "sum"},
    "schedule": {"batch_size": 32, "epochs": 30.0},
    "optimiser": {"name": "Adam", "step_size": 0.01, "l2": 1e-3},
}
_SECTIONS = {
    "model": ("width", "head", "head_hidden", "combine", "metric", "class_weight"),
    "embedding": ("hidden",),
    "rule": ("t", "delay_bound"),
    "schedule": ("batch_size", "epochs", "refresh"),
    "optimiser": ("step_size", "l2"),
}
_ZERO_IS_DEFAULT = ("batch_size", "epochs")  # 0 chooses the default, as None does for other parameters


def make_config(parameters: Mapping[str, Any], *, seed: int, rows: int, held_out: bool) -> Config:
    """Return the configuration of a fit.

    Args:
        parameters: the estimator's parameters, by name.
        rows: the number of training rows, which bounds the batch size.
        held_out: whether there are held-out rows, so that training can stop early.

    Raises:
        ConfigError: a parameter is out of range, of the wrong type, or misspelt.
    """
    # Parameter searches try NumPy scalars; a configuration needs Python's numbers.
    values = {
        name: value.item() if isinstance(value, np.generic) else value for name, value in parameters.items()
    }
    if not isinstance(values["epochs"], int | float) or not 0 <= values["epochs"] < math.inf:
        raise ConfigError(
            "VFL-8521", f"epochs must be a positive number, or 0 for automatic. Found {values['epochs']!r}."
        )
    document: dict[str, Any] = {
        section: {name: values[name] for name in names if not _is_default(name, values[name])}
        for section, names in _SECTIONS.items()
    }
    document["rule"]["name"] = values["rule"]
    document["embedding"]["model"] = values["embedding"]
    if values["optimiser"] is not None:
        document["optimiser"] |= {"name": values["optimiser"], "options": {}}
    delays = values["delays"]
    document["delays"] = delays if isinstance(delays, dict) else {"kind": delays}
    document["stop"] = {"updates": 0} if held_out else {"updates": 0, "patience": 0}
    document["evaluation"] = {"every": 0}
    if values["embedding"] == "tabular":
        document["data"] = _TABLE
    else:
        document |= {name: {**defaults, **document[name]} for name, defaults in _OTHER_DEFAULTS.items()}
    if isinstance(size := document["schedule"].get("batch_size"), int):
        document["schedule"]["batch_size"] = min(size, rows)
    return from_document({"seed": seed, **document})


def _is_default(name: str, value: Any) -> bool:
    """Return whether the value leaves the choice to the configuration's default."""
    return value is None or (name in _ZERO_IS_DEFAULT and value == 0)
