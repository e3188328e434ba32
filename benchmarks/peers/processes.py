"""Processes of a measurement, controlled by lines of text. None outlives the block that started it."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Process = subprocess.Popen[str]


@contextlib.contextmanager
def started(module: str, *arguments: str) -> Iterator[Process]:
    """Run a module of this repository in a new interpreter until the block ends."""
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def hear(process: Process) -> str:
    """Return the process's next line. Raise RuntimeError if it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a measured process died with exit status {process.wait()}; see its words above")
    return line


def tell(process: Process, line: str = "go") -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
