"""A whole federation on one machine says at once why it cannot begin (test_demo.py: how one goes well)."""

import io
import os
import signal
import time

import pytest
from rich.console import Console

from vafl.config import from_document
from vafl.errors import RunError
from vafl.federation.processes import Clients
from vafl.federation.up import up
from vafl.runtime.identity import SERVER, issue, make_authority


def configuration(**network):
    return from_document(
        {
            "data": {"name": "iris"},
            "stop": {"updates": 40},
            "network": {"address": "127.0.0.1:0", "join_timeout": 100.0, **network},
        }
    )


def quiet():
    return Console(file=io.StringIO())


def test_a_client_that_cannot_begin_ends_the_run_at_once(tmp_path):
    make_authority(tmp_path / "certs")
    for party in (SERVER, "client-1"):
        issue(tmp_path / "certs", party)
    began = time.monotonic()
    with pytest.raises(RunError, match=r"client-2 ended with exit code 2. .*client-2.log\" ends: .*error"):
        up(configuration(certificates=str(tmp_path / "certs")), tmp_path / "run", quiet())
    assert time.monotonic() - began < 90  # without waiting for everyone to join
    assert "window = 2" in (tmp_path / "run" / "config.toml").read_text()  # as it is meant between processes


def test_a_client_that_was_killed_is_left_to_the_runs_rules(tmp_path):
    clients = Clients(["client-1"], tmp_path, ["client", "--out", str(tmp_path)])
    (tmp_path / "config.toml").write_text("")
    clients.start("127.0.0.1:1")
    os.kill(clients._processes["client-1"].pid, signal.SIGKILL)
    clients._processes["client-1"].wait()
    clients.check()
