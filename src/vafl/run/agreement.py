"""The agreement: the settings that all parties of a run must have in common."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from vafl.config import Config
from vafl.config.agreement import changeable, shared_settings, training_settings
from vafl.errors import RunFolderError
from vafl.run.assembly import make_schedule, widths
from vafl.run.checkpoint import load_facts
from vafl.run.plan import Plan, sized
from vafl.transport.codec import Codec
from vafl.transport.grpc.terms import RunTerms, differing, flat_settings, schedule_digest
from vafl.transport.grpc.wire import PROTOCOL

_RENEGOTIATED = ("protocol", "encoding")  # entries of an agreement that a resumed run may change
STATE = "state"  # in a run folder: each party's own folder for what it must not forget


def over_network(config: Config) -> Config:
    """Return the configuration as parties in separate processes use it.

    An automatic window (`rule.window`) is wider there, so that a client computes while its messages travel.
    """
    return config if config.network.real_delays else replace(config, rule=config.rule.pipelined())


def rows_at_once(config: Config, width: int) -> int:
    """Return how many rows of embeddings of `width` fit into one message."""
    codec = Codec(config.network.encoding, config.network.largest_message)
    return codec.most_rows(width, masked=config.privacy.secure_sum)


def require_same_run(folder: Path, terms: RunTerms) -> None:
    """Check that a checkpoint belongs to a run with this agreement.

    A checkpoint is only valid for the same rows, clients and models. The network, the rule, the optimiser and
    the stop criteria may change: the parties compare those again when they connect.

    Raises:
        RunFolderError: the agreement in the checkpoint differs.
    """
    facts = load_facts(folder).get("terms", {})
    before = facts.pop("settings", {}) | {name: repr(value) for name, value in facts.items()}
    may_differ = (*_RENEGOTIATED, *changeable())
    kept, now = (
        {name: value for name, value in entries.items() if not name.startswith(may_differ)}
        for entries in (before, terms.entries())
    )
    if different := differing(kept, now):
        differences = "; ".join(f"{name} was {then}, is now {value}" for name, then, value in different)
        raise RunFolderError(
            "VFL-7001",
            f'--resume needs the settings that the run in "{folder}" started with. Different: {differences}. '
            "Restore its [model], seed, data, clients, schedule and privacy, or start a new run with "
            "--overwrite or another --out. Nothing was changed.",
        )


def make_terms(plan: Plan) -> RunTerms:
    """Return this party's view of the settings that all parties of the run must agree on."""
    config, clients = over_network(plan.config), len(plan.data.parties)
    schedules = [make_schedule(config, plan.data.rows, index) for index in range(clients)]
    return RunTerms(
        protocol=PROTOCOL,
        run_id=config.network.run_id,
        records=plan.data.parts.total,
        record_digest=plan.data.record_digest,
        widths=widths(plan),
        clients=clients,
        schedule_digest=schedule_digest(schedules) if config.schedule.seed == "shared" else "private",
        encoding=config.network.encoding,
        settings=flat_settings(_common(config, plan.data.rows, clients)),
        from_earlier_run=plan.from_earlier_run,
    )


def _common(config: Config, rows: int, clients: int) -> dict[str, Any]:
    """Return the settings that must be equal at all parties.

    They are the settings of the model, of the steps (rule, schedule, optimiser) and of the choice of the
    final model (stop.patience).

    A cosine schedule falls to 0 at the planned update K, which vafl derives from `stop` and `schedule`. An
    error about a difference must name settings that users can find in their files. So K is left out and
    stop.updates is compared instead. It is 0 if schedule.epochs determines it, because schedule.epochs is
    compared already.
    """
    training = training_settings(config)
    if config.optimiser.schedule == "cosine" and config.optimiser.constants == {"K": config.stop.updates}:
        training["optimiser"]["constants"] = {}
        by_epochs = sized(replace(config, stop=replace(config.stop, updates=0)), rows, clients).stop.updates
        training["stop"]["updates"] = 0 if config.stop.updates == by_epochs else config.stop.updates
    return shared_settings(config) | training
