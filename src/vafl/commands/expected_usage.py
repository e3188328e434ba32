"""The run of a configuration as each client will live through it: its activations and its uploads."""

import math
from collections.abc import Sequence
from typing import Any

from vafl.config import Config
from vafl.errors import ConfigError
from vafl.privacy.analysis.exposure import ExpectedUsage
from vafl.protocol.rules import Rule
from vafl.protocol.schedule import parse_refresh
from vafl.run.plan import Plan


def courses_of(plan: Plan, epochs: float | None = None) -> list[ExpectedUsage]:
    """One course a client; so many epochs for each, or what stop and delays let expect.

    Only where every step takes every client is the number of activations known beforehand, but for an upload
    or two that a client on a network makes before it hears that the run has ended.
    """
    config, rows, clients = plan.config, plan.data.rows, len(plan.data.parties)
    if config.rule.name == "centralised":
        raise ConfigError("VFL-9041", 'rule.name "centralised" uploads nothing: no record leaves its party.')
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
        ExpectedUsage(activations=own, others=tuple(counts[:index] + counts[index + 1 :]), **common)
        for index, own in enumerate(counts)
    ]


def expected_activations(config: Config, clients: int) -> list[float]:
    """Each client's, by its mean gap: a step takes a turn of each of t clients, no client two of one step."""
    steps, together = float(config.stop.updates), Rule.of(config.rule, clients).quorum
    paces = _paces(config, clients)
    if config.stop.seconds and math.isfinite(sum(paces)):
        steps = min(steps, config.stop.seconds * sum(paces) / together)
    if not math.isfinite(sum(paces)):
        paces = [1.0] * clients
    return _shared_out(steps * together, paces, steps)


def _paces(config: Config, clients: int) -> list[float]:
    """Activations a second."""
    return [1 / gap if gap else math.inf for gap in config.delays.mean_gaps(clients)]


def _shared_out(total: float, paces: Sequence[float], most: float) -> list[float]:
    """`total` in proportion to the paces, none above `most`; total is at most that of all."""
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
    """At the start, at every interval and at the end."""
    steps, every = sum(counts) / Rule.of(config.rule, len(counts)).quorum, config.evaluation.every
    if config.evaluation.every_seconds:
        seconds = config.stop.seconds or sum(counts) / sum(_paces(config, len(counts)))
        return 2 + math.floor(seconds / config.evaluation.every_seconds)
    return 2 + math.floor(max(0.0, steps - 1) / every)
