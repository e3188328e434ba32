"""Run NVFlare's SplitNN in its environment, and read what its parties measured."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.environment import environment
from benchmarks.peers.supervision import run_bounded

HERE = Path(__file__).resolve().parent
BATCH = 64
START_SECONDS = 120.0  # NVFlare takes 20 to 40 s to start and stop; this allows for a busy machine


@dataclass(frozen=True)
class SplitNNRate:
    """The rates with arrays passed as in NVFlare's SplitNN example.

    Attributes:
        steps_per_second: Training steps per second after warm-up.
        samples_per_second: The same in samples.
        detail: How it was run, the versions, and the rate with the arrays packed into bytes by hand.
    """

    steps_per_second: float
    samples_per_second: float
    detail: dict[str, Any]


def measure_splitnn(seconds: float = 10.0) -> SplitNNRate:
    """Train for this many seconds with each way of passing arrays. Install NVFlare first if it is missing."""
    python = environment("nvflare", HERE / "requirements.txt")
    limit = int(START_SECONDS + 2 * seconds)
    with tempfile.TemporaryDirectory(prefix="nvflare-") as name:
        folder = Path(name)
        log, result = folder / "log.txt", folder / "result.json"
        status = run_bounded([python, HERE / "job.py", folder, str(seconds), str(limit)], folder, log, limit)
        if not result.is_file():
            ending = f"did not end within {limit} s" if status is None else f"ended with exit status {status}"
            raise RuntimeError(
                f"NVFlare measured nothing: it {ending}. Its last words:\n{log.read_text()[-2000:]}"
            )
        measured = json.loads(result.read_text())
    rate = measured["rates"]["documented"]
    detail = {
        "packed_steps_per_second": measured["rates"]["packed"],
        "how": "Collab API in SimEnv: a server and two site processes, loopback TCP without TLS, float16",
        "measured_seconds": seconds,
        "batch": BATCH,
        "versions": measured["versions"],
    }
    return SplitNNRate(rate, rate * BATCH, detail)
