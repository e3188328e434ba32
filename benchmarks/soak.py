"""python -m benchmarks.soak [--updates N] [--out FILE]: does a long run keep its memory and speed?

`vafl up` trains on iris with one column per client. Messages are tiny, so a million updates take minutes. The
script samples the memory of every process. Exit code 1 means that memory or time per update grew.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.harness import write_entries

PROCESSES = Path("/proc")
EVERY_SECONDS = 2.0
GROWTH_ALLOWED = 0.02  # growth of a process's memory, from the second tenth of the run to the last
SLOWING_ALLOWED = 1.25  # seconds per update, the last tenth of the run over the first
CONFIG = """
[data]
name = "iris"
[partition]
clients = 4
[schedule]
batch_size = 8
[stop]
updates = {updates}
[evaluation]
every = {every}
[network]
address = "127.0.0.1:0"
"""

Sample = tuple[float, dict[str, int]]


def soak(updates: int, folder: Path) -> dict[str, Any]:
    """Run, and return the samples and the verdict."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "soak.toml"
    config.write_text(CONFIG.format(updates=updates, every=max(1, updates // 100)), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "vafl.cli",
        "up",
        str(config),
        "--out",
        str(folder / "run"),
        "--overwrite",
    ]
    with (
        (folder / "log.txt").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL) as server,
    ):
        samples = _watch(server, folder / "run" / "history.jsonl", updates)
    if server.returncode:
        raise RuntimeError(f"the run ended with exit code {server.returncode}: see {folder / 'log.txt'}")
    if not samples:
        raise RuntimeError(f"{updates:,} updates were over before anything was seen: take more")
    points = _history(folder / "run" / "history.jsonl")
    return {"updates": updates, **memory_verdict(samples), **time_verdict(points)}


def memory_verdict(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the resident bytes over the run, and whether any process grew after its first tenth."""
    tenth = max(1, len(samples) // 10)
    found = {}
    for name in samples[len(samples) // 2][1]:
        series = [(at, sizes[name]) for at, sizes in samples if name in sizes]
        early, late = series[tenth : 2 * tenth] or series, series[-tenth:]
        before, after = (fmean(size for _, size in part) for part in (early, late))
        found[name] = {
            "first_bytes": before,
            "last_bytes": after,
            "growth": after / before - 1,
            "bytes_per_second": _slope(series[tenth:] or series),
        }
    return {
        "memory": found,
        "memory_flat": all(one["growth"] <= GROWTH_ALLOWED for one in found.values()),
        "memory_samples": [[round(at, 1), sizes] for at, sizes in samples],
    }


def time_verdict(points: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the seconds per 1,000 updates between evaluations, and whether they grew."""
    taken = [
        1000 * (late["seconds"] - early["seconds"]) / (late["updates"] - early["updates"])
        for early, late in pairwise(points)
        if late["updates"] > early["updates"]
    ]
    tenth = max(1, len(taken) // 10)
    first, last = median(taken[:tenth]), median(taken[-tenth:])
    return {
        "seconds": points[-1]["seconds"],
        "seconds_per_1000": taken,
        "first_tenth_seconds_per_1000": first,
        "last_tenth_seconds_per_1000": last,
        "slowing": last / first,
        "time_flat": last / first <= SLOWING_ALLOWED,
    }


def _watch(server: "subprocess.Popen[bytes]", history: Path, updates: int) -> list[Sample]:
    """Return samples of every process's memory, from the first evaluation to the end of the run."""
    samples: list[Sample] = []
    begin = time.monotonic()
    while server.poll() is None:
        time.sleep(EVERY_SECONDS)
        done = _history(history)[-1:]
        if done and done[0]["updates"] < updates:
            samples.append((time.monotonic() - begin, _sizes(server.pid)))
            size = sum(samples[-1][1].values()) / 2**20
            print(
                f"\r{done[0]['updates']:>10,} updates, {size:,.0f} MiB", end="", file=sys.stderr, flush=True
            )
    print(file=sys.stderr)
    return samples


def _history(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _sizes(server: int) -> dict[str, int]:
    """Return the resident bytes of the server and its clients, by party."""
    sizes = {}
    for process in PROCESSES.glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().split("\0")
            if process.name == str(server):
                sizes["server"] = _resident(process)
            elif int((process / "stat").read_text().rpartition(")")[2].split()[1]) == server:
                sizes[words[words.index("--party") + 1]] = _resident(process)
        except (OSError, ValueError, KeyError):
            continue  # it has just ended, or is not a client yet
    return sizes


def _resident(process: Path) -> int:
    fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def _slope(series: Sequence[tuple[float, int]]) -> float:
    """Return the slope of the least-squares line through the points."""
    at, size = fmean(at for at, _ in series), fmean(size for _, size in series)
    spread = sum((one - at) ** 2 for one, _ in series)
    return sum((one - at) * (other - size) for one, other in series) / spread if spread else 0.0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="A long run, watched.")
    parser.add_argument("--updates", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=Path("build/soak.json"), metavar="FILE")
    options = parser.parse_args(arguments)
    seen = soak(options.updates, options.out.with_suffix(""))
    write_entries(options.out, seen)
    print(_sentence(seen))
    return 0 if seen["memory_flat"] and seen["time_flat"] else 1


def _sentence(seen: Mapping[str, Any]) -> str:
    grown = max(one["growth"] for one in seen["memory"].values())
    verdict = "flat" if seen["memory_flat"] and seen["time_flat"] else "NOT FLAT"
    return (
        f"{seen['updates']:,} updates in {seen['seconds']:.0f} s: {verdict}. Memory grew by {grown:.2%} at "
        f"most (allowed: {GROWTH_ALLOWED:.0%}); the last tenth took {seen['slowing']:.2f} times as long as "
        f"the first (allowed: {SLOWING_ALLOWED})."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
