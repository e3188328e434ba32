"""Kill clients and the server with SIGKILL at any moment, and restart each immediately with --resume."""

import random
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.chaos.history import History, read_history
from tests.chaos.parties import Failed, Parties, Place
from vafl.transport.identity import SERVER

BOUND = 30


def training(updates: int, clients: int = 4, pause: float = 0.05, **sections) -> dict:
    """Return a configuration: logistic regression on digits, slow enough that there is time for kills."""
    document = {
        "data": {"name": "digits"},
        "partition": {"clients": clients},
        "rule": {"name": "async", "delay_bound": BOUND, "window": 2},
        "schedule": {"batch_size": 64},
        "optimiser": {"step_size": 0.3},
        "stop": {"updates": updates},
        "evaluation": {"every": 500},
        "network": {"checkpoint_every": 50, "heartbeat": 2.0, "patience": 240.0, "real_delays": True},
        "delays": {"kind": "fixed", "seconds": [pause] * clients},
    }
    return {**document, **sections}


@dataclass(frozen=True)
class Plan:
    """How often each party is killed.

    About every other kill hits a run that has recovered. The others follow each other so fast that parties
    die while they start, join, or wait for a party that does.
    """

    clients: int = 50
    server: int = 10
    pause: tuple[float, float] = (1.0, 4.0)
    progress: tuple[int, int] = (1, 120)
    seed: int = 0

    def carry_out(self, parties: Parties) -> dict:
        """Kill and restart parties; return what was done."""
        chance, kills, hits = random.Random(self.seed), Counter(), 0
        victims = [chance.choice(parties.clients) for _ in range(self.clients)] + [SERVER] * self.server
        chance.shuffle(victims)
        for victim in victims:
            before = parties.updates()
            parties.rest(chance.uniform(*self.pause))
            if chance.random() < 0.5:
                enough = before + chance.randint(*self.progress)
                parties.until(partial(_reached, parties, enough), f"update {enough}")
            if parties.over():
                raise Failed(f"the run was over after {kills.total()} kills: give it more updates")
            hits += parties.updates() > before
            parties.kill(victim)
            parties.start(victim, resume=True)
            kills["server" if victim == SERVER else "clients"] += 1
        return {"kills": dict(kills), "kills_of_a_run_under_way": hits}


def _reached(parties: Parties, updates: int) -> bool:
    return parties.updates() >= updates or parties.over()


def undisturbed(folder: Path, document: dict, place: Place, limit: float) -> float:
    """Return the metric of the same run without kills."""
    with Parties(folder, document, place, limit) as parties:
        parties.start_all()
        parties.until_over()
        return parties.metric()


def kill_and_resume(folder: Path, document: dict, plan: Plan, limit: float) -> dict:
    """Run the federation, kill by plan, and return what was done and the outcome."""
    with Parties(folder, document, Place.here(), limit) as parties:
        parties.start_all()
        parties.until(lambda: parties.updates() > 0, "the first update")
        began = time.monotonic()
        done = plan.carry_out(parties)
        parties.until_over()
        history = read_history(parties.trace)
        return {
            **done,
            "seconds": time.monotonic() - began,
            "metric": parties.metric(),
            **outcome(history),
        }


def outcome(history: History) -> dict:
    """Return what the server's trace shows."""
    return {
        "updates": len(history.steps),
        "updates_undone_by_crashes": history.undone,
        "uploads_given_up": len(history.given_up),
        "durable_uploads_lost": len(history.lost),
        "uploads_applied_twice": len(history.twice),
        "longest_delay": history.longest_delay,
        "unknown_cells_used": history.unknown_cells,
    }
