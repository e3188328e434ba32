"""Run a peer with a time limit, and leave none of its processes behind.

Peers start daemons in other sessions, where a process group does not reach them. So each run has a mark in
its environment, which every descendant inherits. At the end, all processes with that mark are killed.
"""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

MARK = "BENCHMARK_RUN"
PROCESSES = Path("/proc")
DEATH_SECONDS = 10.0


def run_bounded(command: Sequence[str | Path], folder: Path, log: Path, limit: float) -> int | None:
    """Run a command in a folder that is also its home and its temporary folder.

    Args:
        command: The program and its arguments.
        folder: Where it runs.
        log: Where its output goes.
        limit: Seconds after which it is killed.

    Returns:
        Its exit status, or None if the limit ended it.
    """
    mark = uuid.uuid4().hex
    surroundings = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder), MARK: mark}
    surroundings.pop("PYTHONPATH", None)  # the peer has other packages
    try:
        with log.open("w") as output:
            ended = subprocess.run(
                command,
                cwd=folder,
                env=surroundings,
                stdout=output,
                stderr=output,
                timeout=limit,
                check=False,
            )
        return ended.returncode
    except subprocess.TimeoutExpired:
        return None
    finally:
        _kill_marked(f"{MARK}={mark}".encode())


def _kill_marked(mark: bytes) -> None:
    deadline = time.monotonic() + DEATH_SECONDS
    while marked := [process for process in PROCESSES.glob("[0-9]*") if _carries(process, mark)]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes that outlived SIGKILL: {[process.name for process in marked]}")
        for process in marked:
            try:
                os.kill(int(process.name), signal.SIGKILL)
            except ProcessLookupError:
                continue  # it has ended already
        time.sleep(0.02)


def _carries(process: Path, mark: bytes) -> bool:
    try:
        return mark in (process / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return False
