"""The peers of the benchmarks, without a network and without an installed peer."""

import sys
import time
from pathlib import Path

import pytest
from benchmarks.peers.environment import environment
from benchmarks.peers.grpc_echo import echo_rates, measure_echo
from benchmarks.peers.supervision import PROCESSES, run_bounded


class Installer:
    """A fake of pip that counts its calls, and fails on demand."""

    def __init__(self):
        self.calls = 0
        self.broken = False

    def __call__(self, folder, requirements):
        folder.mkdir()
        self.calls += 1
        if self.broken:
            raise RuntimeError("no such package")


@pytest.fixture
def requirements(tmp_path):
    path = tmp_path / "requirements.txt"
    path.write_text("peer==1.0\n")
    return path


def test_an_environment_is_installed_once(tmp_path, requirements):
    install = Installer()
    first = environment("peer", requirements, tmp_path, install)
    second = environment("peer", requirements, tmp_path, install)
    assert first == second == tmp_path / "peer" / "bin" / "python"
    assert install.calls == 1


def test_other_requirements_are_installed_into_a_clean_environment(tmp_path, requirements):
    install = Installer()
    environment("peer", requirements, tmp_path, install)
    leftover = tmp_path / "peer" / "leftover"
    leftover.touch()
    requirements.write_text("peer==2.0\n")
    environment("peer", requirements, tmp_path, install)
    assert install.calls == 2
    assert not leftover.exists()


def test_a_failed_installation_is_begun_anew(tmp_path, requirements):
    install = Installer()
    install.broken = True
    with pytest.raises(RuntimeError, match="no such package"):
        environment("peer", requirements, tmp_path, install)
    install.broken = False
    environment("peer", requirements, tmp_path, install)
    assert install.calls == 2


def test_a_one_second_echo():
    rates = echo_rates(1000, 100, clients=2, window=2, seconds=1.0)
    assert len(rates) == 2
    assert min(rates) > 0


def test_an_echo_whose_server_cannot_start_fails_instead_of_waiting():
    with pytest.raises(RuntimeError, match="exit status 1"):
        measure_echo(1000, -1, clients=1, seconds=0.1)


DAEMON = "import os, sys; open('pid', 'w').write(str(os.getpid())); print('up', flush=True); sys.stdin.read()"
PARENT = """
import subprocess, sys
daemon = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1]], start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
daemon.stdout.readline()
if sys.argv[2] == "wait":
    daemon.wait()
"""


@pytest.mark.skipif(not PROCESSES.is_dir(), reason="needs /proc")
@pytest.mark.parametrize(("behaviour", "status"), [("leave", 0), ("wait", None)])
def test_a_bounded_run_leaves_no_process_behind(tmp_path, behaviour, status):
    command = [sys.executable, "-c", PARENT, DAEMON, behaviour]
    assert run_bounded(command, tmp_path, tmp_path / "log", limit=12.0) == status
    deadline = time.monotonic() + 10.0  # a killed process needs a moment to disappear
    while alive((tmp_path / "pid").read_text()):
        assert time.monotonic() < deadline


def alive(process):
    """Return whether a process still runs. A zombie (Z) does not."""
    try:
        return Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
