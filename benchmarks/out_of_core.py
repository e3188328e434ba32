"""Train on a source four times larger than the memory that the process may use.

A control group limits the memory of the process, page cache included: the kernel must drop pages of the
source and of the feature cache to stay below the limit, and ends the process if it cannot. Without the right
to create a control group, RLIMIT_DATA limits the memory that the process allocates.
"""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.harness import Figure, benchmark
from vafl.config import Config
from vafl.config.run_settings import EvaluationSettings, StopSettings
from vafl.data.aligned import load_tables
from vafl.data.settings import DataSettings
from vafl.data.source_settings import ArraySettings, SourceSettings, TableSettings
from vafl.protocol.schedule import ScheduleSettings
from vafl.run.assembly import build

LIMIT = 600_000_000  # bytes of memory
TIMES = 4  # size of the source in limits
COLUMNS = 1200  # float32
ROWS = TIMES * LIMIT // (4 * COLUMNS)
_UPDATES, _BATCH = 400, 512
_WRITTEN = 10_000  # rows written at once
_GROUPS = Path("/sys/fs/cgroup")
_SECONDS = 3600.0  # before a hanging process is killed


@benchmark(target=1.0)
def out_of_core_memory() -> Figure:
    """Peak memory that a process allocated over its limit, while it trained on a source of 4 limits."""
    with tempfile.TemporaryDirectory() as name, _limited() as (group, setting):
        folder = Path(name)
        write_source(folder, ROWS)
        began = time.monotonic()
        done, allocated, resident = _watched(folder, group)
        detail = {
            "source_mb": round((folder / "numbers.npy").stat().st_size / 1e6),
            "cache_mb": round(sum(path.stat().st_size for path in (folder / "cache").iterdir()) / 1e6),
            "limit_mb": round(LIMIT / 1e6),
            "limit": setting,
            "peak_allocated_mb": round(allocated / 1e6),
            "peak_resident_mb": round(resident / 1e6),  # with pages of files, which the kernel may drop
            "peak_group_mb": round(_peak_of(group) / 1e6) if group else None,
            "seconds": round(time.monotonic() - began),
            **done,
        }
        return Figure([allocated / LIMIT], detail)


def write_source(folder: Path, rows: int) -> None:
    """Write numbers.npy, ids.txt and labels.csv, and drop them from the page cache."""
    chance = np.random.default_rng(0)
    direction = chance.normal(size=COLUMNS).astype(np.float32)
    path = folder / "numbers.npy"
    header = {"descr": "<f4", "fortran_order": False, "shape": (rows, COLUMNS)}
    with (
        path.open("wb") as numbers,
        (folder / "ids.txt").open("w") as ids,
        (folder / "labels.csv").open("w") as labels,
    ):
        np.lib.format.write_array_header_1_0(numbers, header)
        labels.write("id,label\n")
        for start in range(0, rows, _WRITTEN):
            block = chance.standard_normal((min(_WRITTEN, rows - start), COLUMNS), dtype=np.float32)
            block.tofile(numbers)
            score = block @ direction
            for number, positive in enumerate(score > 0, start):
                ids.write(f"P{number:07d}\n")
                labels.write(f"P{number:07d},{'yes' if positive else 'no'}\n")
        numbers.flush()
        os.fsync(numbers.fileno())
        # Pages in the cache would count as this process's memory, and the other one would use them for free.
        os.posix_fadvise(numbers.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _limited() -> Iterator[tuple[Path | None, str]]:
    """Create a control group with the limit; None if that is not allowed."""
    for folder, setting in ((_GROUPS / "memory", "memory.limit_in_bytes"), (_GROUPS, "memory.max")):
        group = folder / f"vafl-bench-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / setting).write_text(str(LIMIT))
            yield group, setting
            return
        except OSError:
            continue
        finally:
            group.rmdir()  # its process has ended
    yield None, "RLIMIT_DATA"


def _watched(folder: Path, group: Path | None) -> tuple[dict[str, float], int, int]:
    """Run `main` in a process. Return what it printed, and its peaks of allocated and resident memory."""
    command = [sys.executable, "-m", "benchmarks.out_of_core", str(folder), str(group or "")]
    peaks = {"RssAnon": 0, "VmHWM": 0}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + _SECONDS
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
            except (FileNotFoundError, ProcessLookupError):
                status = ""
            for field, peak in peaks.items():
                found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
                peaks[field] = max(peak, int(found[1]) * 1024 if found else 0)
            if time.monotonic() > deadline:
                process.kill()
                raise TimeoutError(f"the training has not ended in {_SECONDS:.0f} s")
            time.sleep(0.02)
        printed = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise RuntimeError(f"the training failed with exit code {process.returncode}")
    done: dict[str, float] = json.loads(printed.splitlines()[-1])
    return done, peaks["RssAnon"], peaks["VmHWM"]


def _peak_of(group: Path) -> int:
    """Return the most memory that the group used, page cache included; 0 if the kernel does not tell."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (group / name).is_file():
            return int((group / name).read_text())
    return 0


def main(folder: Path, group: str) -> None:
    """Load the source, train, and print the seconds of both and the accuracy as JSON."""
    if group:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    numbers, ids, cache = (str(folder / name) for name in ("numbers.npy", "ids.txt", "cache"))
    sources: dict[str, SourceSettings] = {
        "server": TableSettings(str(folder / "labels.csv"), "id", label="label"),
        "sensors": ArraySettings(numbers, ids, cache=cache),
    }
    began = time.monotonic()
    settings = DataSettings("parties", parties=("sensors",), test_fraction=0.1)
    data = load_tables(settings, sources, seed=0)
    loaded = time.monotonic()
    config = Config(
        schedule=ScheduleSettings(batch_size=_BATCH),
        stop=StopSettings(updates=_UPDATES),
        evaluation=EvaluationSettings(every=_UPDATES),
    )
    last = build(config, data).train()[-1]
    trained = time.monotonic()
    done = {"load_seconds": loaded - began, "train_seconds": trained - loaded, "accuracy": last.metric or 0.0}
    print(json.dumps({key: round(value, 3) for key, value in done.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
