"""Run NVFlare's DH-PSI in its environment, and read when its sites began and ended."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.environment import environment
from benchmarks.peers.supervision import run_bounded

HERE = Path(__file__).resolve().parent
START_SECONDS = 120.0
SECONDS_PER_ID = 0.01  # five times the measured time


@dataclass(frozen=True)
class PSITime:
    """The time of an intersection.

    Attributes:
        seconds: from when the first site was asked for its ids to when the last one had saved the result.
        from_start_seconds: from the first process's start to the last one's end.
        detail: how it was run.
    """

    seconds: float
    from_start_seconds: float
    detail: dict[str, Any]


def measure_psi(ids: int) -> PSITime:
    """Intersect the ids of two sites, half of them common. Install NVFlare first if it is missing."""
    python = environment("nvflare-psi", HERE / "requirements.txt")
    limit = int(START_SECONDS + ids * SECONDS_PER_ID)
    with tempfile.TemporaryDirectory(prefix="nvflare-") as name:
        folder = Path(name)
        log, marks = folder / "log.txt", folder / "marks.txt"
        begin = time.perf_counter()
        status = run_bounded([python, HERE / "job.py", folder, str(ids), str(limit)], folder, log, limit)
        from_start = time.perf_counter() - begin
        lines = [line.split() for line in marks.read_text().splitlines()] if marks.is_file() else []
        saved = [line for line in lines if line[1] == "saved"]
        if [int(line[2]) for line in saved] != [ids // 2] * 2:
            raise RuntimeError(
                f"NVFlare must find {ids // 2} common ids at both sites. Exit status {status}, marks "
                f"{lines}. Its last words:\n{log.read_text()[-2000:]}"
            )
    how = "DhPSIRecipe in SimEnv: a server and two site processes, loopback TCP without TLS"
    return PSITime(
        float(saved[-1][0]) - float(lines[0][0]), from_start, {"how": how, "versions": _versions()}
    )


def _versions() -> list[str]:
    pinned = (HERE / "requirements.txt").read_text().split()
    return [name for name in pinned if name.startswith(("nvflare=", "openmined_psi="))]
