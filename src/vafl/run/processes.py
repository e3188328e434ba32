"""Start, watch and stop the clients of a federation as processes on this machine."""

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

_STUCK = 60.0  # seconds without CPU use or disk access after which a process counts as stuck
_LOOK_EVERY = 0.5  # seconds between two checks of a process
_TOLD_EVERY = 15.0  # seconds between two log lines while this process waits

_CHILD = """import sys
from vafl.run.processes import end_with_parent
end_with_parent()
from vafl.cli import main
sys.exit(main())"""


def end_with_parent() -> None:
    """Interrupt this process when the process that started it ends.

    Standard input is a pipe from the parent. The operating system closes it when the parent ends, even if the
    parent is killed.
    """

    def wait() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent may have ignored it
    threading.Thread(target=wait, daemon=True).start()


class Progress:
    """Detects a process that makes no progress.

    A time limit would not do: on a busy machine, a healthy process may need minutes for a second of work.

    A process makes progress if it has used CPU time since the last check, waits for a CPU or waits for a
    disk. Linux reports this in /proc. On systems without /proc, every living process counts as making
    progress.
    """

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/stat")
        self._used = -1
        self._worked_at = time.monotonic()

    def is_stuck(self, patience: float) -> bool:
        """Return whether the process has made no progress for `patience` seconds. Call this regularly."""
        now = time.monotonic()
        try:
            # The process's name comes before, in parentheses. It may contain spaces and parentheses itself.
            fields = self._path.read_bytes().rpartition(b")")[2].split()
        except OSError:
            return False
        state, used = fields[0], int(fields[11]) + int(fields[12])
        if used != self._used or state in (b"R", b"D"):
            self._used, self._worked_at = used, now
        return now - self._worked_at > patience


class Clients:
    """The client processes of a federation on one machine.

    Each client runs in a separate process group, so Ctrl-C in a terminal reaches only this process, which
    then ends the run. The clients also end when this process ends; see `end_with_parent`.

    Args:
        path: the folder with config.toml. Logs go to its folder `logs`.
        command: the subcommand of `vafl` that each client runs, and its options.
    """

    def __init__(self, names: list[str], path: Path, command: list[str]) -> None:
        self._names, self._path, self._command = names, path, command
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._line = -1  # write end of the clients' standard input; open while this process lives

    def start(self, address: str) -> None:
        """Start every client. It connects to `address` and writes its output to logs/NAME.log."""
        make_private_folder(self._path / "logs")  # error messages may quote ids
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
        """Raise RunError if a client has failed.

        A client that was killed by a signal is not a failure here: the run treats it as absent.
        """
        for name, process in self._processes.items():
            if (process.poll() or 0) > 0:
                raise self._failed(name)

    def end(self, patience: float = _STUCK) -> None:
        """Wait for every client to end, as long as it makes progress.

        Args:
            patience: seconds without progress after which a client is killed.

        Raises:
            RunError: a client failed, or was killed because it was stuck.
        """
        for name, process in self._processes.items():
            self._wait(name, process, patience)
        self._hang_up()
        for name, process in self._processes.items():
            if process.returncode:
                raise self._failed(name)

    def kill(self) -> None:
        """Kill every client."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._hang_up()

    def _wait(self, name: str, process: subprocess.Popen[bytes], patience: float) -> None:
        progress, began, told = Progress(process.pid), time.monotonic(), 0.0
        while process.poll() is None:
            if progress.is_stuck(patience):
                log.error("%s has made no progress for %g s and has not ended; killing it", name, patience)
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
