"""Predict each client's activations and uploads in a configured run."""

import math
from collections.abc import Sequence
from typing import Any

from vafl.config import Config
from vafl.errors import ConfigError
from vafl.privacy.analysis.exposure import ExpectedUsage
from vafl.protocol.rules import Rule
from vafl.protocol.schedule import parse_refresh
from vafl.run.plan import Plan


def expected_usages(plan: Plan, epochs: float | None = None) -> list[ExpectedUsage]:
    """Return the expected usage of each client.

    The number of activations is known in advance only if every step needs every client. Even then, a client
    on a network may make an upload or two before it learns that the run has ended.

    Args:
        plan: the run.
        epochs: passes of each client over its rows; None derives the activations from `stop` and `delays`.

    Raises:
        ConfigError: the rule is centralised, which uploads nothing.
    """
    config, rows, clients = plan.config, plan.data.rows, len(plan.data.parties)
    if config.rule.name == "centralised":
        raise ConfigError(
            "VFL-9041",
            'rule.name "centralised" uploads nothing, so there is nothing to protect. Choose another rule.',
        )
    if epochs is None:
        counts = expected_activations(config, clients)
    else:
        counts = [epochs * math.ceil(rows / config.schedule.batch_size)] * clients
    known = epochs is not None or (
        Rule.of(config.rule, clients).quorum == clients and not config.stop.seconds
    )
    name, size = parse_refresh(config.schedule.refresh)
    common: dict[str, Any] = {
        "rows": rows,
        "batch_size": config.schedule.batch_size,
        "kind": config.schedule.kind,
        "refresh": "none" if config.rule.name == "sync" else name,
        "refresh_rows": size,
        "full_start": config.rule.start == "upload",
        "delay_bound": config.rule.delay_bound > 0,
        "local_steps": config.rule.local_steps,
        "held_out": plan.data.parts.validation or plan.data.parts.test,
        "evaluations": _evaluations(config, counts),
        "expected": not known or config.evaluation.every_seconds > 0,
    }
    return [
        ExpectedUsage(activations=count, others=tuple(counts[:index] + counts[index + 1 :]), **common)
        for index, count in enumerate(counts)
    ]


def expected_activations(config: Config, clients: int) -> list[float]:
    """Return the expected activations of each client, from the mean gaps between its activations.

    A step takes one activation from each of t different clients, so a client has at most one per step.
    """
    steps, together = float(config.stop.updates), Rule.of(config.rule, clients).quorum
    paces = _paces(config, clients)
    if config.stop.seconds and math.isfinite(sum(paces)):
        steps = min(steps, config.stop.seconds * sum(paces) / together)
    if not math.isfinite(sum(paces)):
        paces = [1.0] * clients
    return _shared_out(steps * together, paces, steps)


def _paces(config: Config, clients: int) -> list[float]:
    """Return each client's activations per second; infinite without delays."""
    return [1 / gap if gap else math.inf for gap in config.delays.mean_gaps(clients)]


def _shared_out(total: float, paces: Sequence[float], most: float) -> list[float]:
    """Share out `total` in proportion to the paces, with at most `most` for each.

    Clients that would exceed `most` get exactly that, and the others share the rest. `total` is at most
    `most` times the number of clients.
    """
    full: set[int] = set()
    while len(full) < len(paces):
        left = total - most * len(full)
        slow = sum(pace for index, pace in enumerate(paces) if index not in full)
        counts = [most if i in full else left * pace / slow for i, pace in enumerate(paces)]
        above = {index for index, count in enumerate(counts) if count > most}
        if not above:
            return counts
        full |= above
    return [most] * len(paces)


def _evaluations(config: Config, counts: Sequence[float]) -> int:
    """Return the number of evaluations: at the start, at every interval and at the end."""
    steps, every = sum(counts) / Rule.of(config.rule, len(counts)).quorum, config.evaluation.every
    if config.evaluation.every_seconds:
        seconds = config.stop.seconds or sum(counts) / sum(_paces(config, len(counts)))
        return 2 + math.floor(seconds / config.evaluation.every_seconds)
    return 2 + math.floor(max(0.0, steps - 1) / every)
