"""A whole federation on one machine: this process serves, and each client is a process of its own."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from vafl.build import make_plan
from vafl.config import Config
from vafl.data.aligned import join
from vafl.errors import RunError
from vafl.federation.server import ServerRun
from vafl.observe.record import ALIGNMENTS, RecordedRun
from vafl.runtime.identity import SERVER, issue, make_authority

_GRACE = 20.0  # seconds for clients to end by themselves


def up(config: Config, path: Path, console: Console, *, overwrite: bool = False) -> RecordedRun:
    """Runs server and clients over loopback until the run is over; the run folder is `path`.

    Without network.certificates, an authority and a certificate for each party are made in path/certs.
    """
    names = _client_names(config)
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
    except BaseException:
        clients.end(0.0)
        raise
    clients.end(_GRACE)
    return recorded


def _client_names(config: Config) -> list[str]:
    if config.data.name == "tables":
        return list(config.data.parties)
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


def certified(config: Config, names: list[str], path: Path) -> Config:
    """The configuration with certificates, made in path/certs if it has none and needs them."""
    if config.network.security == "plaintext" or config.network.certificates:
        return config
    folder = path / "certs"
    make_authority(folder)
    for name in (SERVER, *names):
        issue(folder, name)
    return replace(config, network=replace(config.network, certificates=str(folder.resolve())))


class Clients:
    """The client processes of a federation on one machine.

    Args:
        path: the folder with config.toml; logs go there too.
        command: what each does, a subcommand of `vafl` and its options.
    """

    def __init__(self, names: list[str], path: Path, command: list[str]) -> None:
        self._names, self._path, self._command = names, path, command
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, address: str) -> None:
        """Starts every client, dialling `address`; what it says goes to logs/NAME.log."""
        (self._path / "logs").mkdir(exist_ok=True)
        for name in self._names:
            command = [sys.executable, "-m", "vafl.cli", *self._command, str(self._path / "config.toml")]
            options = ["--party", name, "--set", f"network.address={json.dumps(address)}"]
            with (self._path / "logs" / f"{name}.log").open("wb") as log:
                self._processes[name] = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    [*command, *options], stdout=log, stderr=log, stdin=subprocess.DEVNULL
                )

    def check(self) -> None:
        """Raises RunError if a client has given up; one that was killed is left to the run's rules."""
        for name, process in self._processes.items():
            if (process.poll() or 0) > 0:
                raise self._failed(name)

    def end(self, grace: float) -> None:
        """Waits for the clients to end; kills those that do not, and says so."""
        for name, process in self._processes.items():
            try:
                process.wait(grace)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if grace and process.returncode:
                raise self._failed(name)

    def _failed(self, name: str) -> RunError:
        log, code = self._path / "logs" / f"{name}.log", self._processes[name].returncode
        tail = log.read_text(errors="replace")[-500:].strip()
        return RunError(f'{name} ended with exit code {code}. "{log}" ends: {tail}')
