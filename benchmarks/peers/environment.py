"""A virtual environment for each peer under build/peers, installed once from pinned requirements.

Peers need other versions than vafl, and a gigabyte of dependencies, so they have separate environments.
Progress goes to standard error, because standard output is for measurements.
"""

import hashlib
import shutil
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable
from pathlib import Path

ENVIRONMENTS = Path(__file__).resolve().parents[2] / "build" / "peers"
LIMIT_SECONDS = 1800.0
TOLD = ("Collecting ", "Installing ", "Successfully ", "ERROR")

Installer = Callable[[Path, Path], None]


def pip_install(folder: Path, requirements: Path) -> None:
    """Create a virtual environment and install the requirements. pip's log is in the folder."""
    venv.create(folder, with_pip=True)
    log = folder / "install.log"
    pip = [str(_interpreter(folder)), "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "install", "-r", str(requirements)]
    with (
        log.open("w") as written,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        guard = threading.Timer(LIMIT_SECONDS, process.kill)
        guard.start()
        try:
            for line in process.stdout or ():
                written.write(line)
                if line.startswith(TOLD):
                    _tell("  " + line.split(" (")[0].strip()[:100])
            process.wait()
        finally:
            guard.cancel()
    if process.returncode != 0:
        raise RuntimeError(
            f"pip could not install {requirements}: exit status {process.returncode}, see {log}"
        )


def environment(
    name: str, requirements: Path, root: Path = ENVIRONMENTS, install: Installer = pip_install
) -> Path:
    """Return the interpreter of a peer's environment. Create it if it is missing, unfinished or out of date.

    Args:
        name: The environment's folder under `root`.
        requirements: A pip requirements file with pinned versions.
        root: The folder of all environments.
        install: Fills the folder of a new environment.
    """
    folder = root / name
    stamp = folder / "installed"
    wanted = hashlib.sha256(sys.version.encode() + requirements.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return _interpreter(folder)
    _tell(f"installing {name} into {folder} (once)")
    begin = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    install(folder, requirements)
    stamp.write_text(wanted)  # last, so that an interrupted installation starts over
    _tell(f"installed {name} in {time.monotonic() - begin:.0f} s")
    return _interpreter(folder)


def _interpreter(folder: Path) -> Path:
    return folder / "bin" / "python"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
