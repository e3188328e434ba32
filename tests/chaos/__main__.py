"""`python -m tests.chaos`: run real federations under faults and attacks, and write the results.

The command fails if a scenario fails. It also fails if this machine cannot run a scenario, unless
--allow-skips is given.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.chaos.abuse import FLAT, abuse
from tests.chaos.faults import Fault, endure, wide_area
from tests.chaos.kills import BOUND, Plan, kill_and_resume, training, undisturbed
from tests.chaos.parties import Failed, Place
from tests.chaos.peers import PEERS, Mistreatment, roll_back, running, survive
from tests.chaos.wires import Unable
from vafl.transport.identity import SERVER

WITHIN = 0.01  # allowed difference to the undisturbed run's metric
LIMIT = 300.0  # seconds for any single wait; a longer one counts as a hang


@dataclass(eq=False)
class Scenarios:
    """All scenarios. Each returns what was done, the outcome, and what is wrong with it."""

    folder: Path
    plan: Plan = field(default_factory=Plan)
    kill_updates: int = 10_000
    fault_updates: int = 3000
    peer_updates: int = 3000
    messages: int = 100_000

    def named(self) -> dict[str, Callable[[], dict]]:
        faults = {
            "latency": Fault(delay=0.2),
            "loss": Fault(loss=0.05),
            "client partition": Fault(cut="client-2"),
            "server partition": Fault(cut=SERVER),
        }
        return {
            "kills": self.kills,
            **{name: partial(self.fault, name, fault) for name, fault in faults.items()},
            "abuse": self.abuse,
            **{name: partial(self.peer, name, mistreat) for name, mistreat in PEERS.items()},
        }

    def kills(self) -> dict:
        document = training(self.kill_updates)
        expected = undisturbed(self.folder / "kills-undisturbed", document, Place.here(), LIMIT)
        found = kill_and_resume(self.folder / "kills", document, self.plan, LIMIT)
        broken = found["longest_delay"] > BOUND or found["unknown_cells_used"]
        wrong = [f"delay bound {BOUND} was broken"] * bool(broken)
        return {**found, "delay_bound": BOUND, **_compare(found, expected, wrong)}

    def fault(self, name: str, fault: Fault) -> dict:
        document = wide_area(self.fault_updates)
        found = endure(self.folder / name.replace(" ", "-"), document, fault, LIMIT)
        return {**found, **_compare(found, self._undisturbed_network, [])}

    @cached_property
    def _undisturbed_network(self) -> float:
        document = wide_area(self.fault_updates)
        return float(endure(self.folder / "network-undisturbed", document, Fault(), LIMIT)["metric"])

    def peer(self, name: str, mistreat: Mistreatment) -> dict:
        document = running(self.peer_updates, private=mistreat is roll_back)
        found = survive(self.folder / name.replace(" ", "-"), document, mistreat, LIMIT)
        expected = self._calm(json.dumps(document))
        return {**found, **_compare(found, expected, found["wrong"])}

    @cache  # noqa: B019 - there is one object, which lives as long as the process
    def _calm(self, document: str) -> float:
        """Return the metric of this run without any fault."""
        folder = Path(tempfile.mkdtemp(dir=self.folder)) / "undisturbed"
        return undisturbed(folder, json.loads(document), Place.here(), LIMIT)

    def abuse(self) -> dict:
        found = abuse(self.folder / "abuse", self.messages, LIMIT)
        wrong = [f"{found['state_changes']} state changes"] * bool(found["state_changes"])
        wrong += [f"memory grew by {found['memory_grown']:,} bytes"] * (found["memory_grown"] > FLAT)
        wrong += [
            f"{each['certificate']} was not refused" for each in found["certificates"] if not each["refused"]
        ]
        return {**found, "wrong": wrong}


def _compare(found: dict, expected: float, wrong: list[str]) -> dict:
    """Compare an outcome with the undisturbed run, and with what must never happen."""
    gap = found["metric"] - expected
    wrong = [*wrong, *[f"{gap:+.4f} to the undisturbed run"] * (abs(gap) > found.get("tolerated", WITHIN))]
    for name in ("durable_uploads_lost", "uploads_applied_twice"):
        wrong += [f"{found[name]} {name.replace('_', ' ')}"] * bool(found[name])
    return {"undisturbed_metric": expected, "gap": gap, "wrong": wrong}


def run(name: str, scenario: Callable[[], dict]) -> dict:
    """Run a scenario and return its verdict, even if it raises."""
    began = time.monotonic()
    try:
        found = scenario()
        found["verdict"] = "failed" if found["wrong"] else "passed"
    except Unable as reason:
        found = {"verdict": "skipped", "wrong": [str(reason)]}
    except Failed as reason:
        found = {"verdict": "failed", "wrong": [str(reason)]}
    return {"scenario": name, **found, "seconds_in_all": time.monotonic() - began}


def table(results: list[dict]) -> Table:
    """Return a table of what was done to each federation, and the outcome."""
    shown = Table("scenario", "verdict", "done", "lost", "twice", "gap", "seconds", title="chaos")
    colours = {"passed": "green", "skipped": "yellow", "failed": "red"}
    for found in results:
        verdict = found["verdict"]
        shown.add_row(
            found["scenario"],
            f"[{colours[verdict]}]{verdict}[/]",
            "; ".join(found["wrong"])[:300] or _done(found),
            str(found.get("durable_uploads_lost", "-")),
            str(found.get("uploads_applied_twice", "-")),
            f"{found['gap']:+.4f}" if "gap" in found else "-",
            f"{found['seconds_in_all']:.0f}",
        )
    return shown


def _done(found: dict) -> str:
    if "done" in found:
        return str(found["done"])
    if "kills" in found:
        clients, server = found["kills"]["clients"], found["kills"]["server"]
        delays = f"longest delay {found['longest_delay']} of {found['delay_bound']}"
        return f"{clients} kills of clients, {server} of the server, {delays}"
    if "partition" in found:
        meanwhile = found["updates_during_the_partition"]
        return f"{found['partition']['seconds']:.0f} s, {meanwhile} updates meanwhile"
    if "messages_tried" in found:
        grown = found["memory_grown"] / 2**20
        return f"{found['messages_tried']:,} messages, {found['state_changes']} changes, {grown:+.1f} MB"
    return f"by {found['network']}"


def main() -> int:
    """Run the chosen scenarios; return 0 only if none failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/chaos.json"))
    names = list(Scenarios(Path()).named())
    parser.add_argument("--only", action="append", choices=names, help="this scenario; may be given again")
    parser.add_argument("--allow-skips", action="store_true", help="what cannot be run here is no failure")
    parser.add_argument("--keep", type=Path, help="keep configurations, logs and traces in this folder")
    options = parser.parse_args()
    console, results = Console(), []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        scenarios = Scenarios(options.keep or Path(temporary)).named()
        for name in options.only or scenarios:
            console.print(f"{name} ...")
            results.append(run(name, scenarios[name]))
            report = {"python": platform.python_version(), "kernel": platform.release(), "scenarios": results}
            options.out.write_text(json.dumps(report, indent=2) + "\n")
            console.print(f"{name}: {results[-1]['verdict']}")
    console.print(table(results))
    bad = {"failed"} if options.allow_skips else {"failed", "skipped"}
    return int(any(found["verdict"] in bad for found in results))


if __name__ == "__main__":
    sys.exit(main())
