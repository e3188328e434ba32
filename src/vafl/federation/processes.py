"""The clients of a federation as processes on this machine."""

import json
import subprocess
import sys
from pathlib import Path

from vafl.errors import RunError


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
