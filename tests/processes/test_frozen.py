"""Frozen processes (SIGSTOP): their sockets stay open and their kernel still acknowledges every packet."""

import signal
import time

import pytest

from tests.machine import CONFIG, PARTIES, Machine

HEARTBEAT = 1.0
SOON = 20 * HEARTBEAT  # three heartbeats, and time for a busy machine; gRPC alone takes 60 s
IRIS = '[data]\nname = "iris"\n'


@pytest.fixture
def machine(tmp_path):
    config = CONFIG.replace("heartbeat = 2.0", f"heartbeat = {HEARTBEAT}")
    made = Machine(tmp_path, config + IRIS)
    yield made
    for process in made.processes.values():
        process.send_signal(signal.SIGCONT)
    made.end()


def test_either_side_notices_a_frozen_peer_within_the_documented_time_and_goes_on_when_it_thaws(machine):
    for party in ("server", *PARTIES):
        machine.start(party)
    machine.progress(50)

    def freeze(party, watcher, words):
        """Freeze a party; return the seconds until the watcher's log has these words once more."""
        before, began = machine.log(watcher).count(words), time.monotonic()
        machine.processes[party].send_signal(signal.SIGSTOP)
        machine.until(lambda: machine.log(watcher).count(words) > before, f"{words!r} in {watcher}'s log")
        return time.monotonic() - began

    assert freeze("client-1", "server", "client-1 is gone") < SOON
    machine.progress(50)  # the others continue
    machine.processes["client-1"].send_signal(signal.SIGCONT)
    machine.until(lambda: machine.log("server").count("client-1 is here") == 2, "the client back")
    assert freeze("server", "client-2", "out of reach") < SOON
    machine.processes["server"].send_signal(signal.SIGCONT)
    machine.progress(50)
