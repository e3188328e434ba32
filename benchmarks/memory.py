"""Measure the memory of a run beyond its data and its table."""

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import Figure, benchmark
from benchmarks.simulator import random_data
from vafl.config import Config
from vafl.config.run_settings import StopSettings
from vafl.protocol.schedule import ScheduleSettings
from vafl.run.assembly import build
from vafl.simulation.simulator import Simulator

REPEATS = 5


@benchmark(target=1.2)
def sim_memory() -> Figure:
    """Peak resident memory above that of the imports, over table and data: MNIST's shape, look-ahead."""
    command = [sys.executable, "-m", "benchmarks.memory"]
    printed = [
        subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(REPEATS)
    ]
    pairs = [tuple(map(int, line.split())) for line in printed]
    held = pairs[0][1]
    return Figure([peak / held for peak, _ in pairs], {"table_and_data_mb": round(held / 1e6, 1)})


def main() -> None:
    """Run once in this process. Print the peak memory above the imports, and the bytes of table and data."""
    imported = _resident("VmRSS")
    data = random_data(60_000, [(112,)] * 7, test_rows=10_000)
    config = Config(schedule=ScheduleSettings(batch_size=600), stop=StopSettings(updates=300))
    run = build(config, data)
    run.train()
    assert isinstance(run.runtime, Simulator)
    print(_resident("VmHWM") - imported, run.runtime.server.table.nbytes + data.nbytes)


def _resident(field: str) -> int:
    """Return this process's memory in bytes: VmRSS is the current value, VmHWM the peak."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise OSError(f"the kernel does not tell {field}.")
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
