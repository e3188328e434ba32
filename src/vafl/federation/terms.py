"""The terms that a party brings to a run, for all to agree on."""

from dataclasses import asdict, replace
from pathlib import Path

from vafl.build import make_schedule, widths
from vafl.config import Config
from vafl.errors import RunFolderError
from vafl.plan import Plan
from vafl.runtime.checkpoint import load_facts
from vafl.runtime.codec import Codec
from vafl.runtime.grpc.wire import PROTOCOL, Terms, schedule_digest

_NETWORK_TERMS = ("protocol", "encoding")
STATE = "state"  # in a run folder: each party's own folder for what it must not forget


def over_network(config: Config) -> Config:
    """The configuration as it is meant between processes: there, a window that is left open is wider."""
    return config if config.network.real_delays else replace(config, rule=config.rule.pipelined())


def rows_at_once(config: Config, width: int) -> int:
    """How many rows of embeddings fit into one message."""
    codec = Codec(config.network.encoding, config.network.largest_message)
    return codec.most_rows(width, masked=config.privacy.secure_sum)


def require_same_run(folder: Path, terms: Terms) -> None:
    """Raises RunFolderError unless the checkpoint there is of a run on these terms: what it holds means other
    rows, or other clients, elsewhere. The network's terms may change: those parties agree on anew."""
    before = load_facts(folder).get("terms", {})
    now = {name: value for name, value in asdict(terms).items() if name not in _NETWORK_TERMS}
    differing = [
        f"{name} {before.get(name)!r} then, {now[name]!r} now"
        for name in now
        if before.get(name) != now[name]
    ]
    if differing:
        raise RunFolderError(
            f'--resume goes on with the run in "{folder}", on its terms. Different: {"; ".join(differing)}. '
            "Resume with the seed, the data, the clients and the schedule that it began with, or begin anew: "
            "--overwrite, or another --out. Nothing was changed."
        )


def make_terms(plan: Plan) -> Terms:
    """What the parties of this run must agree on, as this party sees it."""
    config, clients = plan.config, len(plan.data.parties)
    schedules = [make_schedule(config, plan.data.rows, index) for index in range(clients)]
    return Terms(
        protocol=PROTOCOL,
        run_id=config.network.run_id,
        records=plan.data.rows + len(plan.data.test_labels),
        record_digest=plan.data.record_digest,
        width=widths(plan)[0],
        clients=clients,
        schedule_digest=schedule_digest(schedules) if config.schedule.seed == "shared" else "private",
        encoding=config.network.encoding,
        secure_sum=config.privacy.secure_sum,
    )
