"""Finding the common records before a run: the server's part, a client's part, and both on one machine."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from vafl.config import Config
from vafl.data.alignment.rows import Alignment, check_writable
from vafl.data.labels import label_classes
from vafl.data.tables import Table, open_table
from vafl.errors import ConfigError
from vafl.files import write_atomically
from vafl.observe.counting import CountProgress
from vafl.run.credentials import certified, check_certificates, load_credentials
from vafl.run.processes import Clients
from vafl.transport.alignment.client import AlignmentClient
from vafl.transport.alignment.compute_pool import cores
from vafl.transport.alignment.frames import PROTOCOL, Terms
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
    """One party's part of an alignment; gives the file it has written.

    Args:
        workers: processes that compute; 0 is one for each core.
        listening: told the server's address once it can be dialled.
        watch: called now and then while the server waits for clients; what it raises ends the wait.
    """
    table, path = _table(config, party), Path(config.tables[party].alignment)
    credentials, terms = load_credentials(config, party), _terms(config)
    workers = workers or cores()

    def keep(alignment: Alignment) -> None:
        alignment.write(path)

    ids = table.ids()
    with CountProgress(console, "ids") as progress:
        if party == SERVER:
            classes = label_classes(table, config.data.task) if table.settings.label else None
            server = AlignmentServer(
                *(ids, classes, terms, config.network, credentials, workers, progress, keep),
                label=table.settings.label,
                with_local=bool(table.features),
            )
            found = _run(server.serve(listening, watch))
        else:
            client = AlignmentClient(party, ids, terms, config.network, credentials, workers, progress, keep)
            found = _run(client.run())
    console.print(f"{len(found.ids):,} of {len(ids):,} records are among the {found.rows:,} rows: {path}")
    if party == SERVER and found.with_local:
        console.print(f"the other columns of this table are features of the run: {len(table.features)}")
    return path


def align_all(config: Config, console: Console, workers: int = 0) -> None:
    """The server here, each client as a process of its own, over loopback: for tables on one machine.

    Args:
        workers: processes that compute at each party; 0 shares the cores out.
    """
    for party in (SERVER, *config.data.parties):
        _table(config, party)  # fails before anything is started
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


def _table(config: Config, party: str) -> Table:
    parties = (SERVER, *config.data.parties)
    if config.data.name != "tables":
        raise ConfigError(
            "VFL-7011",
            f'alignment is for data.name = "tables", a file for each party. Found "{config.data.name}".',
        )
    if party not in parties:
        raise ConfigError(
            "VFL-7012", f'"{party}" is no party of this run. Its parties: {", ".join(parties)}.'
        )
    if party not in config.tables:
        raise ConfigError(
            "VFL-7013", f"{party} needs a section [tables.{party}] with path and id of its table."
        )
    check_writable(Path(config.tables[party].alignment))
    return open_table(config.tables, party)


def _terms(config: Config) -> Terms:
    return Terms(PROTOCOL, config.network.run_id, list(config.data.parties), config.data.records)


def _run(work: Coroutine[Any, Any, Alignment]) -> Alignment:
    found: list[Alignment] = []

    async def main() -> None:
        found.append(await work)

    run(main())
    return found[0]
