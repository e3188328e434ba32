"""A whole federation on one machine: this process serves, and each client is a process of its own."""

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


def up(config: Config, path: Path, console: Console, *, overwrite: bool = False) -> RecordedRun:
    """Runs server and clients over loopback until the run is over; the run folder is `path`.

    Without network.certificates, or where that folder is not there, an authority and a certificate for each
    party are made in path/certs: for loopback only.
    """
    names = _client_names(config)
    check_certificates(config, names)
    clients = Clients(names, path, ["client", "--out", str(path)])
    served = ServerRun(
        config,
        path,
        console,
        overwrite=overwrite,
        prepare=lambda: certified(_aligned(config, path), names, path),
        watch=clients.check,
    )
    try:
        recorded = served.run(clients.start)
    except KeyboardInterrupt:
        if (path / SUMMARY).is_file():  # the run ended in order, and the clients save their models
            clients.end()
        else:
            clients.kill()
        raise
    except BaseException:
        clients.kill()
        raise
    clients.end()
    report_run(served.config, path)  # again: by now the clients' models and ledgers are in place
    return recorded


def _client_names(config: Config) -> list[str]:
    if config.data.is_tabular:
        return list(tables_of(config)[0].parties)
    return [party.name for party in make_plan(config).data.parties]


def _aligned(config: Config, path: Path) -> Config:
    """Where the tables were not aligned: their ids are joined here, so that no client reads another's."""
    if config.data.name != "tables" or any(Path(own.alignment).is_file() for own in config.tables.values()):
        return config
    folder = (path / ALIGNMENTS).resolve()
    folder.mkdir(exist_ok=True)
    tables = dict(config.tables)
    for name, alignment in join(config.data, config.tables).items():
        file = folder / f"{name}.alignment.parquet"
        alignment.write(file)
        tables[name] = replace(tables[name], alignment=str(file))
    return replace(config, tables=tables)
