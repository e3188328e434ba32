"""From an estimator's flat parameters to the configuration of a run."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from vafl.config import Config, from_document
from vafl.errors import ConfigError
from vafl.protocol.rules import Rule

_EVALUATIONS = 10  # points of a history; each costs a pass over the rows it is measured on
_SECTIONS = {
    "model": ("embedding", "width", "hidden", "head", "head_hidden", "combine", "metric"),
    "rule": ("t", "delay_bound"),
    "schedule": ("batch_size", "refresh"),
    "optimiser": ("step_size", "l2"),
}


def make_config(parameters: Mapping[str, Any], *, seed: int, rows: int, clients: int) -> Config:
    """The configuration of a fit on so many training rows of so many clients.

    Raises:
        ConfigError: a parameter is out of range, of the wrong type, or misspelt.
    """
    known = {name: _plain(value) for name, value in parameters.items()}
    document: dict[str, Any] = {
        section: {name: known[name] for name in names} for section, names in _SECTIONS.items()
    }
    document["rule"]["name"] = known["rule"]
    document["optimiser"]["name"] = known["optimiser"]
    document["delays"] = known["delays"] if isinstance(known["delays"], dict) else {"kind": known["delays"]}
    return _sized(from_document({"seed": seed, **document}), known["epochs"], rows, clients)


def _sized(config: Config, epochs: Any, rows: int, clients: int) -> Config:
    """Batches no larger than the data, and as many updates as make the epochs, on average over clients."""
    if not isinstance(epochs, int | float) or not 0 < epochs < math.inf:
        raise ConfigError(f"epochs must be a positive number. Found {epochs!r}.")
    batch_size = min(config.schedule.batch_size, rows)
    activations = epochs * math.ceil(rows / batch_size) * clients
    updates = math.ceil(activations / Rule.of(config.rule, clients).quorum)
    return replace(
        config,
        schedule=replace(config.schedule, batch_size=batch_size),
        stop=replace(config.stop, updates=updates),
        evaluation=replace(config.evaluation, every=math.ceil(updates / _EVALUATIONS)),
    )


def _plain(value: Any) -> Any:
    """Searches over parameters try numpy's numbers; a configuration holds Python's."""
    return value.item() if isinstance(value, np.generic) else value
