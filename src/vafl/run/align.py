"""Align the parties' records before a run: as one party, or as all parties on one machine."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from vafl.config import Config
from vafl.data.alignment.rows import Alignment, check_writable
from vafl.data.labels import label_classes
from vafl.data.sources.base import Source
from vafl.data.sources.opening import open_source
from vafl.data.tables import open_table
from vafl.errors import ConfigError
from vafl.files import write_atomically
from vafl.observe.counting import CountProgress
from vafl.run.credentials import certified, check_certificates, load_credentials
from vafl.run.processes import Clients
from vafl.transport.alignment.client import AlignmentClient
from vafl.transport.alignment.compute_pool import cores
from vafl.transport.alignment.frames import PROTOCOL, AlignmentTerms
from vafl.transport.alignment.server import AlignmentServer
from vafl.transport.grpc.wire import run
from vafl.transport.identity import SERVER


def align_party(
    config: Config,
    party: str,
    console: Console,
    workers: int = 0,
    listening: Callable[[str], None] = lambda address: None,
    watch: Callable[[], None] = lambda: None,
) -> Path:
    """Take part in an alignment as one party, and return the path of the alignment file.

    Args:
        workers: number of worker processes; 0 uses one per core.
        listening: called with the server's address once clients can connect.
        watch: called repeatedly while the server waits for clients; an exception in it ends the wait.
    """
    source, path = _source(config, party), Path(config.sources[party].alignment)
    credentials, terms = load_credentials(config, party), _terms(config)
    workers = workers or cores()

    def keep(alignment: Alignment) -> None:
        alignment.write(path)

    ids = source.ids()
    with CountProgress(console, "ids") as progress:
        if party == SERVER:
            table = open_table(config.sources, party)
            classes = label_classes(table, config.data.task) if table.settings.label else None
            server = AlignmentServer(
                *(ids, classes, terms, config.network, credentials, workers, progress, keep),
                label=table.settings.label,
                with_local=bool(table.features),
            )
            aligned = run(server.serve(listening, watch))
        else:
            client = AlignmentClient(party, ids, terms, config.network, credentials, workers, progress, keep)
            aligned = run(client.run())
    console.print(f"{len(aligned.ids):,} of {len(ids):,} records are among the {aligned.rows:,} rows: {path}")
    if party == SERVER and aligned.with_local:
        console.print(f"the other columns of this table are features of the run: {len(source.features)}")
    return path


def align_all(config: Config, console: Console, workers: int = 0) -> None:
    """Align data that are all on this machine.

    The server runs in this process and each client in a separate process. They connect over loopback.

    Args:
        workers: number of worker processes of each party; 0 divides the cores among the parties.
    """
    for party in (SERVER, *config.data.parties):
        _source(config, party)  # fail before any process is started
    check_certificates(config, config.data.parties)
    with TemporaryDirectory(prefix="vafl-align-") as temporary:
        folder = Path(temporary)
        config = certified(config, list(config.data.parties), folder)
        write_atomically(folder / "config.toml", config.to_toml().encode())
        share = workers or max(1, cores() // (1 + len(config.data.parties)))
        clients = Clients(list(config.data.parties), folder, ["align", "--workers", str(share)])
        try:
            align_party(config, SERVER, console, share, clients.start, clients.check)
        except BaseException:
            clients.kill()
            raise
        clients.end()


def _source(config: Config, party: str) -> Source:
    parties = (SERVER, *config.data.parties)
    if config.data.name != "parties":
        raise ConfigError(
            "VFL-7011",
            f'alignment is for data.name = "parties", with a source for each party. Found '
            f'"{config.data.name}". Other data need no alignment.',
        )
    if party not in parties:
        raise ConfigError(
            "VFL-7012", f'--party must name a party of this run: {", ".join(parties)}. Found "{party}".'
        )
    if party not in config.sources:
        raise ConfigError(
            "VFL-7013",
            f"{party} needs a section [parties.{party}.source] in the configuration. Found none. "
            "Add one that describes its data.",
        )
    check_writable(Path(config.sources[party].alignment))
    return open_table(config.sources, party) if party == SERVER else open_source(config.sources, party)


def _terms(config: Config) -> AlignmentTerms:
    return AlignmentTerms(PROTOCOL, config.network.run_id, list(config.data.parties), config.data.records)
