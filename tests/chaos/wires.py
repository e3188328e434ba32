"""Parties in separate network namespaces, with faults on the links between them.

Each party's namespace has one link to a hub, which is also a namespace, so the machine's own network is not
changed. A bridge in the hub joins the links, and `tc netem` delays and drops packets. If the kernel has no
netem, tests/chaos/forwarder.py replaces the bridge and does the same.
"""

import os
import subprocess
import sys
from contextlib import suppress

from tests.chaos.parties import ROOT, Place

PORT = 7443
_BRIDGE = "hub"


class Unable(Exception):
    """This machine cannot create network namespaces; the text says why."""


class Wires:
    """The network of some parties, by name. Use as a context manager, which removes it."""

    def __init__(self, parties: list[str]):
        self._parties = list(parties)
        self._mark = f"vafl{os.getpid()}"
        self._hub = f"{self._mark}-hub"
        self._forwarder: subprocess.Popen | None = None
        self.shaped_by = ""

    def __enter__(self) -> "Wires":
        try:
            self._add(self._hub)
            _run("ip", "-n", self._hub, "link", "add", _BRIDGE, "type", "bridge")
            _run("ip", "-n", self._hub, "link", "set", _BRIDGE, "up")
            for number, party in enumerate(self._parties, 1):
                self._connect(party, number)
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            raise Unable(f"no network namespaces here: {getattr(error, 'stderr', error)}".strip()) from error
        return self

    def __exit__(self, *raised: object) -> None:
        if self._forwarder:
            self._forwarder.terminate()
            self._forwarder.wait()
        for space in (self._hub, *map(self._space, self._parties)):
            with suppress(OSError, subprocess.CalledProcessError):
                _run("ip", "netns", "delete", space)

    def place(self) -> Place:
        """Return the place of each party, for `Parties`. The first party is the server."""
        prefixes = {party: ["ip", "netns", "exec", self._space(party)] for party in self._parties}
        return Place(f"10.77.0.1:{PORT}", prefixes)

    def cut(self, party: str) -> None:
        """Cut a party off: packets to and from it are lost from now on, without any notification."""
        _run("ip", "-n", self._hub, "link", "set", self._port(party), "nomaster")

    def mend(self, party: str) -> None:
        _run("ip", "-n", self._hub, "link", "set", self._port(party), "master", _BRIDGE)

    def shape(self, delay: float, loss: float) -> None:
        """Delay every packet between two parties by `delay` seconds, and drop a share `loss` of them."""
        netem = ["netem", "delay", f"{1000 * delay:g}ms", "loss", f"{100 * loss:g}%", "limit", "100000"]
        try:
            for party in self._parties:
                _run("tc", "-n", self._hub, "qdisc", "add", "dev", self._port(party), "root", *netem)
            self.shaped_by = "tc netem"
        except subprocess.CalledProcessError:
            self._forward(delay, loss)
            self.shaped_by = "a forwarder in user space (this kernel has no netem)"

    def _forward(self, delay: float, loss: float) -> None:
        for party in self._parties:
            self.cut(party)
        ports = [self._port(party) for party in self._parties]
        command = [sys.executable, "-m", "tests.chaos.forwarder", str(delay), str(loss), *ports]
        self._forwarder = subprocess.Popen(["ip", "netns", "exec", self._hub, *command], cwd=ROOT)

    def _connect(self, party: str, number: int) -> None:
        space, port = self._space(party), self._port(party)
        self._add(space)
        _run(
            "ip", "-n", self._hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space
        )
        # One packet at a time, as on a real wire. Otherwise many would be delayed or lost together.
        _run("ip", "-n", space, "link", "set", "eth0", "gso_max_segs", "1")
        _run("ip", "-n", space, "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
        _run("ip", "-n", space, "link", "set", "eth0", "up")
        _run("ip", "-n", self._hub, "link", "set", port, "up", "master", _BRIDGE)

    def _add(self, space: str) -> None:
        _run("ip", "netns", "add", space)

    def _space(self, party: str) -> str:
        return f"{self._mark}-{party}"

    def _port(self, party: str) -> str:
        return f"port{self._parties.index(party)}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
