"""Run a federation on one machine: the server in this process, each client in a separate process."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from vafl.config import Config
from vafl.data.aligned import join
from vafl.observe.record import ALIGNMENTS, SUMMARY, RecordedRun
from vafl.run.credentials import certified, check_certificates
from vafl.run.launch import report_run
from vafl.run.plan import make_plan, tables_of
from vafl.run.processes import Clients
from vafl.run.server import ServerRun


def up(
    config: Config, path: Path, console: Console, *, overwrite: bool = False, earlier: Path | None = None
) -> RecordedRun:
    """Run the server and all clients over loopback, and return the recorded run.

    If network.certificates is not set or the folder does not exist, create an authority and a certificate for
    each party in path/certs. They are valid for loopback only.

    Args:
        path: the run folder.
        earlier: the folder of a run whose models all parties start with.
    """
    names = _client_names(config)
    check_certificates(config, names)
    start = [] if earlier is None else ["--from", str(earlier)]
    clients = Clients(names, path, ["client", "--out", str(path), *start])
    served = ServerRun(
        config,
        path,
        console,
        overwrite=overwrite,
        prepare=lambda: certified(_aligned(config, path), names, path),
        watch=clients.check,
        earlier=earlier,
    )
    try:
        recorded = served.run(clients.start)
    except KeyboardInterrupt:
        if (path / SUMMARY).is_file():
            # The run ended after an evaluation, so the clients are saving their models.
            clients.end()
        else:
            clients.kill()
        raise
    except BaseException:
        clients.kill()
        raise
    clients.end()
    # Write the report again, now that the clients have saved their models and ledgers.
    report_run(served.config, path)
    return recorded


def _client_names(config: Config) -> list[str]:
    if config.data.is_tabular:
        return list(tables_of(config)[0].parties)
    return [party.name for party in make_plan(config).data.parties]


def _aligned(config: Config, path: Path) -> Config:
    """Return the configuration with alignment files; join the ids of the parties if there are none yet.

    Joining them in this process means that no client process reads the data of another.
    """
    sources = config.sources
    if config.data.name != "parties" or any(Path(table.alignment).is_file() for table in sources.values()):
        return config
    folder = (path / ALIGNMENTS).resolve()
    folder.mkdir(exist_ok=True)
    for name, alignment in join(config.data, sources).items():
        file = folder / f"{name}.alignment.parquet"
        alignment.write(file)
        sources[name] = replace(sources[name], alignment=str(file))
    return config.with_sources(sources)
