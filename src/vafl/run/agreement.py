"""The terms that a party brings to a run, for all to agree on."""

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
from vafl.transport.grpc.wire import PROTOCOL, Agreement, differing, schedule_digest, settled

_RENEGOTIATED = ("protocol", "encoding")  # entries of an agreement that a resumed run may change
STATE = "state"  # in a run folder: each party's own folder for what it must not forget


def over_network(config: Config) -> Config:
    """The configuration as it is meant between processes: there, a window that is left open is wider."""
    return config if config.network.real_delays else replace(config, rule=config.rule.pipelined())


def rows_at_once(config: Config, width: int) -> int:
    """How many rows of embeddings fit into one message."""
    codec = Codec(config.network.encoding, config.network.largest_message)
    return codec.most_rows(width, masked=config.privacy.secure_sum)


def require_same_run(folder: Path, terms: Agreement) -> None:
    """Raises RunFolderError unless the checkpoint there is of a run on these terms: what it holds means other
    rows, clients or models elsewhere. The network, and how training goes on, may change: on those the parties
    agree anew."""
    facts = load_facts(folder).get("terms", {})
    before = facts.pop("settings", {}) | {name: repr(value) for name, value in facts.items()}
    kept, now = (
        {
            name: value
            for name, value in entries.items()
            if not name.startswith((*_RENEGOTIATED, *changeable()))
        }
        for entries in (before, terms.entries())
    )
    if found := differing(kept, now):
        differences = "; ".join(f"{name} {then} then, {value} now" for name, then, value in found)
        raise RunFolderError(
            "VFL-7001",
            f'--resume goes on with the run in "{folder}", on its terms. Different: {differences}. '
            "Resume with the [model], the seed, the data, the clients, the schedule and the privacy that it "
            "began with, or begin anew: --overwrite, or another --out. Nothing was changed.",
        )


def make_terms(plan: Plan) -> Agreement:
    """What the parties of this run must agree on, as this party sees it."""
    config, clients = over_network(plan.config), len(plan.data.parties)
    schedules = [make_schedule(config, plan.data.rows, index) for index in range(clients)]
    return Agreement(
        protocol=PROTOCOL,
        run_id=config.network.run_id,
        records=plan.data.parts.total,
        record_digest=plan.data.record_digest,
        width=widths(plan)[0],
        clients=clients,
        schedule_digest=schedule_digest(schedules) if config.schedule.seed == "shared" else "private",
        encoding=config.network.encoding,
        settings=settled(_common(config, plan.data.rows, clients)),
    )


def _common(config: Config, rows: int, clients: int) -> dict[str, Any]:
    """Return the settings that must be the same at all parties: those of the model, and those that decide who
    steps when and how, and which model is kept in the end.

    A cosine schedule falls to 0 at the planned update K, which vafl derives from `stop` and `schedule`. A
    refusal must name settings that users can find in their files. So K is left out, and stop.updates is
    compared in its place: 0 if schedule.epochs decides, which is compared anyway.
    """
    training = training_settings(config)
    if config.optimiser.schedule == "cosine" and config.optimiser.constants == {"K": config.stop.updates}:
        training["optimiser"]["constants"] = {}
        by_epochs = sized(replace(config, stop=replace(config.stop, updates=0)), rows, clients).stop.updates
        training["stop"]["updates"] = 0 if config.stop.updates == by_epochs else config.stop.updates
    return shared_settings(config) | training
