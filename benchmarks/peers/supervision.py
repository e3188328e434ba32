"""Runs a peer within a time limit and leaves none of its processes behind, wherever they moved to.

Peers start daemons in sessions of their own, out of reach of a process group. Each run therefore carries a
mark in its environment, which every descendant inherits; at the end whatever still carries it is killed.
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
    """Run a command in a folder that is also its home and temporary folder.

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
    surroundings.pop("PYTHONPATH", None)  # the peer has packages of its own
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
                continue  # it was quicker
        time.sleep(0.02)


def _carries(process: Path, mark: bytes) -> bool:
    try:
        return mark in (process / "environ").read_bytes().split(b"\0")
    except OSError:  # gone meanwhile, or another user's
        return False
