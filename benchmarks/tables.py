"""A table of a million rows and 200 columns of mixed types, from three CSV files to a trained model.

The commands are those of the guide: `vafl init`, then `vafl up`, which starts every party as a process.
"""

import re
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.harness import Figure, benchmark
from vafl.run.model_store import open_model

ROWS = 1_000_000
COLUMNS = {"server": 40, "bank": 80, "shop": 80}
_CHUNK = 100_000
_RUNTIME = 400_000_000  # bytes allowed for Python, torch and the buffers of a process
_LIMIT = 7200.0  # seconds before a hanging run is killed
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


@benchmark(target=1.0)
def table_million_memory() -> Figure:
    """Peak resident memory of a client, over 1.5 times its encoded features and 400 MB."""
    _, peaks, codes = _measured()
    clients = {party: peak for party, peak in peaks.items() if party != "server"}
    allowed = {party: 1.5 * ROWS * codes[party] * 4 + _RUNTIME for party in clients}
    worst = max(clients[party] / allowed[party] for party in clients)
    megabytes = {f"{party}_mb": round(peak / 1e6) for party, peak in peaks.items()}
    return Figure([worst], {**megabytes, "allowed_mb": round(max(allowed.values()) / 1e6)})


@benchmark(target=1800.0, unit="s")
def table_million_seconds() -> Figure:
    """Time of `vafl init` and `vafl up`, from the files to the report."""
    seconds, *_ = _measured()
    return Figure([seconds], {"rows": ROWS, "columns": sum(COLUMNS.values())})


@cache
def _measured() -> tuple[float, dict[str, int], dict[str, int]]:
    """Measure the seconds of both commands, each process's peak memory in bytes, and its encoded columns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tables(folder, ROWS)
        tables = [word for party in COLUMNS for word in ("--table", f"{party}={folder / f'{party}.csv'}")]
        began = time.monotonic()
        _vafl("init", *tables, "--id", "person", "--label", "label", "--out", str(folder / "run.toml"))
        peaks = _up(folder)
        seconds = time.monotonic() - began
        clients = [party for party in COLUMNS if party != "server"]
        codes = {party: open_model(folder / "run", party).manifest.features[0] for party in clients}
        return seconds, peaks, codes


def _vafl(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "vafl.cli", *words], check=True, stdout=sys.stderr)


def _up(folder: Path) -> dict[str, int]:
    """Run `vafl up` to its end and return each process's peak memory by party."""
    command = [sys.executable, "-m", "vafl.cli", "up", str(folder / "run.toml"), "--out", str(folder / "run")]
    peaks: dict[str, int] = {}
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        deadline = time.monotonic() + _LIMIT
        while process.poll() is None:
            for party, peak in _peaks_below(process.pid):
                peaks[party] = max(peak, peaks.get(party, 0))
            if time.monotonic() > deadline:
                process.kill()
                raise TimeoutError(f"`vafl up` has not ended in {_LIMIT:.0f} s")
            time.sleep(0.5)
    if process.returncode:
        raise RuntimeError(f"`vafl up` failed with exit code {process.returncode}")
    return peaks


def _peaks_below(parent: int) -> list[tuple[str, int]]:
    """Return the peak memory of `vafl up`, which is the server, and of each process it started, by party."""
    found = []
    for pid in [parent, *_children(parent)]:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            match = _PEAK.search(Path(f"/proc/{pid}/status").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        if match is not None:
            party = words[words.index("--party") + 1] if "--party" in words else "server"
            found.append((party, int(match[1]) * 1024))
    return found


def _children(parent: int) -> list[int]:
    listed = Path(f"/proc/{parent}/task/{parent}/children")
    try:
        return [int(pid) for pid in listed.read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def write_tables(folder: Path, rows: int) -> None:
    """Write each party's CSV: numbers with heavy tails and gaps, counts, categories, dates, flags.

    The label follows from a number and a category of every party, with noise.
    """
    chance = np.random.default_rng(0)
    files = {party: (folder / f"{party}.csv").open("wb") for party in COLUMNS}
    try:
        for start in range(0, rows, _CHUNK):
            count = min(_CHUNK, rows - start)
            score = chance.normal(size=count)
            for party, columns in COLUMNS.items():
                frame, own = _columns(chance, count, columns)
                score += own
                ids = pl.Series("person", [f"P{row:08d}" for row in range(start, start + count)])
                frame = frame.insert_column(0, ids)
                if party == "server":
                    held, label_file = frame, files[party]
                else:
                    frame.write_csv(files[party], include_header=start == 0)
            label = pl.Series("label", np.where(score > 0, "yes", "no"))
            held.with_columns(label).write_csv(label_file, include_header=start == 0)
    finally:
        for file in files.values():
            file.close()


def _columns(
    chance: np.random.Generator, rows: int, columns: int
) -> tuple[pl.DataFrame, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Return a party's columns, and what they add to the label's score."""
    found: dict[str, pl.Series] = {}
    score = np.zeros(rows)
    for place in range(columns):
        kind = ("normal", "tail", "count", "category", "many", "date", "flag", "gaps")[place % 8]
        name = f"{kind} {place}"
        if kind in ("normal", "tail", "gaps"):
            values = chance.normal(size=rows).round(4)
            if place < 2:
                score += values
            if kind == "tail":
                values = np.exp(2 * values).round(4)
            series = pl.Series(values)
            if kind == "gaps":
                series = pl.select(pl.when(pl.Series(chance.random(rows) > 0.3)).then(series)).to_series()
        elif kind == "count":
            series = pl.Series(chance.poisson(3, rows))
        elif kind == "flag":
            series = pl.Series(chance.random(rows) > 0.8)
        elif kind == "date":
            days = chance.integers(0, 3650, rows)
            series = pl.select(pl.date(2010, 1, 1) + pl.duration(days=pl.lit(pl.Series(days)))).to_series()
        else:
            levels = 12 if kind == "category" else 5000
            numbers = chance.zipf(1.3, rows) % levels
            if kind == "category":
                score += np.where(numbers == 1, 0.5, -0.2)
            series = pl.Series(numbers).cast(pl.String)
            series = "level " + series
        found[name] = series
    return pl.DataFrame(found), score
