"""The clients of a federation as processes on this machine."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from vafl.errors import RunError
from vafl.files import make_private_folder

_LESS_URGENT = 10  # steps of Unix's niceness: about a tenth of a core that both want

_CHILD = """import sys
from vafl.federation.processes import end_with_parent, yield_to_the_server
yield_to_the_server()
end_with_parent()
from vafl.cli import main
sys.exit(main())"""


def yield_to_the_server() -> None:
    """Makes this process, a client, less urgent than the server on its machine, which all clients wait for.

    With equal rights the server waits for clients that it has just answered, until none is left that has
    anything to do, and a core idles."""
    os.nice(_LESS_URGENT)


def end_with_parent() -> None:
    """Interrupts this process when its standard input ends: whoever started it is gone, however it went."""

    def wait() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been ignored in the parent
    threading.Thread(target=wait, daemon=True).start()


class Clients:
    """The client processes of a federation on one machine.

    A terminal's Ctrl-C is for this process alone, which ends the run in order: the clients are in groups of
    their own. They end with it all the same.

    Args:
        path: the folder with config.toml; logs go there too.
        command: what each does, a subcommand of `vafl` and its options.
    """

    def __init__(self, names: list[str], path: Path, command: list[str]) -> None:
        self._names, self._path, self._command = names, path, command
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._line = -1  # open as long as this process lives

    def start(self, address: str) -> None:
        """Starts every client, dialling `address`; what it says goes to logs/NAME.log."""
        make_private_folder(self._path / "logs")  # errors may quote ids
        stdin, self._line = os.pipe()
        for name in self._names:
            command = [sys.executable, "-c", _CHILD, *self._command, str(self._path / "config.toml")]
            options = ["--party", name, "--set", f"network.address={json.dumps(address)}"]
            with (self._path / "logs" / f"{name}.log").open("wb") as log:
                self._processes[name] = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    [*command, *options], stdout=log, stderr=log, stdin=stdin, process_group=0
                )
        os.close(stdin)

    def check(self) -> None:
        """Raises RunError if a client has given up; one that was killed is left to the run's rules."""
        for name, process in self._processes.items():
            if (process.poll() or 0) > 0:
                raise self._failed(name)

    def end(self, grace: float) -> None:
        """Waits for the clients to end, so long for each, and kills those that do not; then raises RunError
        if they had time and one did not end well."""
        for process in self._processes.values():
            try:
                process.wait(grace)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._line >= 0:
            os.close(self._line)
            self._line = -1
        for name, process in self._processes.items():
            if grace and process.returncode:
                raise self._failed(name)

    def _failed(self, name: str) -> RunError:
        log, code = self._path / "logs" / f"{name}.log", self._processes[name].returncode
        tail = log.read_text(errors="replace")[-500:].strip()
        return RunError(f'{name} ended with exit code {code}. "{log}" ends: {tail}')
