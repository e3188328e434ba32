"""One party of a live federation turns hostile. None of its messages has an effect, and the run continues.

The rule is `sync`, so the others wait while the hostile party makes no valid upload, and the server's state
does not change. Any change during the attack would be the attack's effect. Then the party behaves again, and
the run must end with exactly the parameters of an undisturbed run.
"""

import json
import random
import socket
import time
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.chaos.certificates import impostors, refused
from tests.chaos.frames import Armoury
from tests.chaos.parties import Failed, Parties, Place
from tests.chaos.turncoat import Turncoat
from vafl.config import Config, read_config
from vafl.run.agreement import STATE, make_terms
from vafl.run.assembly import build, make_client
from vafl.run.client import ClientState
from vafl.run.plan import make_plan
from vafl.transport.grpc.terms import RunTerms
from vafl.transport.grpc.wire import CLAIM
from vafl.transport.identity import SERVER, Credentials, issue

NAME, INDEX = "client-4", 3
ROUNDS = 20  # rounds in which it behaves
LARGEST, NORM = 1 << 20, 1e4
FLAT = 32 << 20  # bytes by which the server's memory may grow during the attack
QUIET = 2.0  # seconds without a change after which nothing is under way any more


def waiting_run(updates: int) -> dict:
    """Return the configuration of a run in which a step needs all parties."""
    return {
        "data": {"name": "digits"},
        "partition": {"clients": INDEX + 1},
        "rule": {"name": "sync"},
        "schedule": {"refresh": "none"},
        "stop": {"updates": updates},
        "evaluation": {"every": 100_000},
        "network": {"checkpoint_every": 10, "largest_message": LARGEST, "largest_norm": NORM},
    }


def abuse(folder: Path, messages: int, limit: float, seed: int = 0) -> dict:
    """Attack a live server with this many messages; return what was done and the outcome."""
    with Parties(folder, waiting_run(2 * ROUNDS), Place.here(), limit, states=True) as parties:
        config, turncoat = _begin(parties)
        weapons = Armoury(make_plan(config), turncoat.client, turncoat.said, NORM, seed).weapons()
        parties.until(lambda: _quiet_for(parties) > QUIET, "the server's state to stand still")
        memory, states, began = [], len(_changes(parties)), time.monotonic()
        while turncoat.tried.total() < 0.97 * messages:
            turncoat.attack(list(islice(weapons, messages // 30)))
            memory.append(_memory(parties))  # the first round includes what the server allocates once
            parties.check_alive()
        _knock_on_every_door(parties, turncoat, messages // 100)
        memory.append(_memory(parties))
        seconds = time.monotonic() - began
        parties.rest(QUIET)
        changes = len(_changes(parties)) - states
        certificates = []
        for impostor in impostors(parties):
            parties.rest(1.5)  # after a flood the server logs one refusal a second
            certificates.append(refused(parties, impostor))
        _come_to_reason(parties, turncoat)
        return {
            "messages": dict(turncoat.tried),
            "messages_tried": turncoat.tried.total(),
            "answers": dict(turncoat.answers),
            "certificates": certificates,
            "seconds": seconds,
            "state_changes": changes,
            "memory": memory,
            "memory_grown": memory[-1] - memory[0],
            "same_parameters_as_undisturbed": _same_parameters(parties, config),
        }


def _begin(parties: Parties) -> tuple[Config, Turncoat]:
    """Start a run and stop in the middle of a round, where all wait for the party that turns hostile."""
    for party in (SERVER, *parties.clients):
        if party != NAME:
            parties.start(party)
    parties.until(lambda: "listening" in parties.log(SERVER), "the server")
    config = read_config(parties.folder / "run.toml")
    plan = make_plan(config)
    credentials = Credentials.load(parties.folder / "certs" / NAME, NAME)
    client = make_client(plan, INDEX, with_held_out=True)
    turncoat = Turncoat(config.network.address, credentials, client, make_terms(plan).to_bytes())
    turncoat.behave(ROUNDS)
    return config, turncoat


def _knock_on_every_door(parties: Parties, turncoat: Turncoat, times: int) -> None:
    """Send messages that end the stream, or that the server does not even admit."""
    turncoat.knock("oversized", times // 2, [*turncoat.beginning, bytes(LARGEST + 1)])
    turncoat.knock("without terms", times, [b"{}" * 100])
    turncoat.knock("wrong party", times, turncoat.beginning, metadata=((CLAIM, "client-1"),))
    stranger = Credentials.load(issue(parties.folder / "certs", "trudy"), "trudy")
    turncoat.knock("stranger", times, turncoat.beginning, credentials=stranger)
    host, _, port = parties.place.address.rpartition(":")
    chance = random.Random(0)
    for _ in range(times // 2):
        with socket.create_connection((host, int(port)), timeout=10) as plain:
            plain.sendall(chance.randbytes(chance.randrange(1, 2000)))
        turncoat.tried["no TLS"] += 1


def _come_to_reason(parties: Parties, turncoat: Turncoat) -> None:
    """Start the hostile party's regular client, and wait for the end of the run."""
    terms = RunTerms.from_bytes(turncoat.terms)
    ClientState(turncoat.client, parties.folder / NAME / STATE / NAME, 1, terms, resume=False)
    parties.start(NAME, resume=True)
    parties.until_over()


def _same_parameters(parties: Parties, config: Config) -> bool:
    """Return whether all models equal those of an undisturbed run."""
    expected = build(config)
    expected.train()
    models = dict(zip(parties.clients, expected.models, strict=True)) | {SERVER: expected.head}
    for name, model in models.items():
        found = load_file(parties.folder / name / "models" / name / "model.safetensors")
        for key, tensor in model.state_dict().items():
            if not torch.allclose(found[key], tensor, rtol=1e-4, atol=1e-6):
                raise Failed(f"{name}'s {key} is not what it would have been without the attack")
    return True


def _changes(parties: Parties) -> list[dict]:
    lines = map(json.loads, parties.trace.read_text().splitlines())
    return [line for line in lines if line["what"] == "state"]


def _quiet_for(parties: Parties) -> float:
    changes = _changes(parties)
    return time.time() - changes[-1]["at"] if changes else 0.0


def _memory(parties: Parties) -> int:
    """Return the resident bytes of the server process."""
    status = Path(f"/proc/{parties.processes[SERVER].pid}/status").read_text()
    return 1024 * int(status.split("VmRSS:")[1].split()[0])
