"""The clients of a federation as processes on this machine."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from vafl.errors import RunError
from vafl.files import make_private_folder

log = logging.getLogger(__name__)

_STUCK = 60.0  # seconds in which a process has used no CPU and waited for no disk
_LOOK_EVERY = 0.5  # seconds between two looks at a process
_TOLD_EVERY = 15.0  # seconds between two notes about what this process waits for

_CHILD = """import sys
from vafl.run.processes import end_with_parent
end_with_parent()
from vafl.cli import main
sys.exit(main())"""


def end_with_parent() -> None:
    """Interrupt this process when its standard input ends, because the process that started it is gone."""

    def wait() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been ignored in the parent
    threading.Thread(target=wait, daemon=True).start()


class Progress:
    """Whether a process still works. Time alone cannot tell: on a busy machine a sound process may take
    minutes to do what usually takes a second.

    A process works if it has used CPU time since the last look, waits for a CPU or waits for a disk. Linux
    reports this in /proc. Where there is no /proc, a living process counts as working.
    """

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/stat")
        self._used = -1
        self._worked_at = time.monotonic()

    def is_stuck(self, patience: float) -> bool:
        """Whether the process has done nothing for `patience` seconds, as far as regular calls can tell."""
        now = time.monotonic()
        try:
            fields = self._path.read_bytes().rpartition(b")")[2].split()  # the name before may hold anything
        except OSError:
            return False
        state, used = fields[0], int(fields[11]) + int(fields[12])
        if used != self._used or state in (b"R", b"D"):
            self._used, self._worked_at = used, now
        return now - self._worked_at > patience


class Clients:
    """The client processes of a federation on one machine.

    Each client runs in its own process group, so a terminal's Ctrl-C reaches only this process, which ends
    the run in order. The clients still end when this process does.

    Args:
        path: the folder with config.toml, and with the logs.
        command: the subcommand of `vafl` that each client runs, and its options.
    """

    def __init__(self, names: list[str], path: Path, command: list[str]) -> None:
        self._names, self._path, self._command = names, path, command
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._line = -1  # open as long as this process lives

    def start(self, address: str) -> None:
        """Start every client; it dials `address` and writes its output to logs/NAME.log."""
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
        """Raise RunError if a client has failed. The run's own rules deal with one that was killed."""
        for name, process in self._processes.items():
            if (process.poll() or 0) > 0:
                raise self._failed(name)

    def end(self, patience: float = _STUCK) -> None:
        """Wait for every client to end, as long as it works.

        Args:
            patience: seconds after which a client that does nothing is killed.

        Raises:
            RunError: a client failed, or was stuck.
        """
        for name, process in self._processes.items():
            self._wait(name, process, patience)
        self._hang_up()
        for name, process in self._processes.items():
            if process.returncode:
                raise self._failed(name)

    def kill(self) -> None:
        """End every client at once."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._hang_up()

    def _wait(self, name: str, process: subprocess.Popen[bytes], patience: float) -> None:
        progress, began, told = Progress(process.pid), time.monotonic(), 0.0
        while process.poll() is None:
            if progress.is_stuck(patience):
                log.error("%s does nothing, and did not end: it is killed", name)
                process.kill()
            elif (waited := time.monotonic() - began) - told > _TOLD_EVERY:
                told = waited
                log.info("the run is over; waiting for %s to save its model and end", name)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_EVERY)

    def _hang_up(self) -> None:
        if self._line >= 0:
            os.close(self._line)
            self._line = -1

    def _failed(self, name: str) -> RunError:
        log, code = self._path / "logs" / f"{name}.log", self._processes[name].returncode
        tail = log.read_text(errors="replace")[-500:].strip()
        return RunError("VFL-7191", f'{name} ended with exit code {code}. "{log}" ends: {tail}')
