"""The terms that a party brings to a run, for all to agree on."""

from dataclasses import replace

from vafl.build import make_schedule, widths
from vafl.config import Config
from vafl.plan import Plan
from vafl.runtime.codec import Codec
from vafl.runtime.grpc.wire import PROTOCOL, Terms, schedule_digest

STATE = "state"  # in a run folder: each party's own folder for what it must not forget


def over_network(config: Config) -> Config:
    """The configuration as it is meant between processes: there, a window that is left open is wider."""
    return config if config.network.real_delays else replace(config, rule=config.rule.pipelined())


def rows_at_once(config: Config, width: int) -> int:
    """How many rows of embeddings fit into one message."""
    codec = Codec(config.network.encoding, config.network.largest_message)
    return codec.most_rows(width, masked=config.privacy.secure_sum)


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
