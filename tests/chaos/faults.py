"""A federation whose network is slow, loses packets, or is partitioned for a while."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.history import read_history
from tests.chaos.kills import outcome, training
from tests.chaos.parties import Failed, Parties
from tests.chaos.wires import Wires
from vafl.transport.identity import SERVER

CLIENTS = 4


def wide_area(updates: int) -> dict:
    """Return a configuration for distant hosts: async, with some uploads in flight."""
    return training(
        updates,
        CLIENTS,
        pause=0.1,
        rule={"name": "async", "window": 4},
        optimiser={"step_size": 0.5},
    )


@dataclass(frozen=True)
class Fault:
    """A fault of the network.

    Attributes:
        delay: seconds that every packet takes, during the whole run.
        loss: share of packets that never arrive, during the whole run.
        cut: the party that is cut off for `seconds`, once the run is under way.
    """

    delay: float = 0.0
    loss: float = 0.0
    cut: str = ""
    seconds: float = 30.0


def endure(folder: Path, document: dict, fault: Fault, limit: float) -> dict:
    """Run the federation under the fault; return what was done and the outcome."""
    names = [SERVER, *(f"client-{number}" for number in range(1, CLIENTS + 1))]
    with Wires(names) as wires, Parties(folder, document, wires.place(), limit) as parties:
        if fault.delay or fault.loss:
            wires.shape(fault.delay, fault.loss)
        parties.start_all()
        parties.until(lambda: parties.updates() >= 100, "100 updates")
        began = time.monotonic()
        found = _cut_off(parties, wires, fault) if fault.cut else {"network": wires.shaped_by}
        parties.until_over()
        return {
            **found,
            "seconds": time.monotonic() - began,
            "metric": parties.metric(),
            **outcome(read_history(parties.trace)),
        }


def _cut_off(parties: Parties, wires: Wires, fault: Fault) -> dict:
    """Cut a party off for a while; return who makes updates during and after that time."""
    before = time.time()
    wires.cut(fault.cut)
    parties.rest(fault.seconds)
    wires.mend(fault.cut)
    after = time.time()
    if parties.over():
        raise Failed("the run was over before the partition was: give it more updates")
    parties.until_over()
    during, later = _uploads(parties, before, after), _uploads(parties, after, time.time())
    cut = [parties.clients.index(fault.cut)] if fault.cut != SERVER else range(CLIENTS)
    if not all(client in later for client in cut):
        raise Failed(f"{fault.cut} was cut off for {fault.seconds:g} s and nobody heard of it again")
    if fault.cut != SERVER and not all(client in during for client in set(range(CLIENTS)) - set(cut)):
        raise Failed(f"{fault.cut} was cut off, and not all of the others went on: updates of {set(during)}")
    return {
        "partition": {"of": fault.cut, "seconds": after - before},
        "updates_during_the_partition": len(during),
        "updates_after_it": len(later),
    }


def _uploads(parties: Parties, begin: float, end: float) -> list[int]:
    """Return the clients whose uploads the steps of that time used."""
    lines = map(json.loads, parties.trace.read_text().splitlines())
    steps = [line for line in lines if line["what"] == "step" and begin <= line["at"] <= end]
    return [client for step in steps for client, _ in step["uploads"]]
