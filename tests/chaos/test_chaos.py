"""The chaos scenarios on a small scale; `make chaos` runs them in full."""

import json

import pytest

from tests.chaos.__main__ import run
from tests.chaos.certificates import impostors, refused
from tests.chaos.history import read_history
from tests.chaos.kills import BOUND, Plan, kill_and_resume, training
from tests.chaos.parties import Failed, Parties, Place
from tests.chaos.wires import Unable, Wires
from vafl.transport.identity import SERVER


@pytest.mark.slow
def test_a_federation_outlives_a_few_kills(tmp_path):
    """Kills of a client in the middle of the run, and of the server while that client starts again."""
    plan = Plan(clients=1, server=1, pause=(0.0, 0.1), progress=(50, 100), seed=10)
    document = training(300, clients=2, pause=0.01, evaluation={"every": 1000})
    document["network"]["checkpoint_every"] = 20
    found = kill_and_resume(tmp_path / "run", document, plan, limit=240)
    assert found["kills"] == {"clients": 1, "server": 1}
    assert found["updates"] == 300
    assert found["durable_uploads_lost"] == found["uploads_applied_twice"] == 0
    assert found["longest_delay"] <= BOUND
    assert found["unknown_cells_used"] == 0
    assert found["metric"] > 0.8


def test_a_live_server_refuses_every_wrong_certificate_and_both_sides_say_why(tmp_path):
    with Parties(tmp_path / "run", training(100, clients=2), Place.here(), limit=240) as parties:
        parties.start(SERVER)
        parties.until(lambda: "listening" in parties.log(SERVER), "the server")
        for impostor in impostors(parties):
            found = refused(parties, impostor)
            assert found["refused"], found


def test_a_machine_without_namespaces_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Unable, match="no network namespaces here"), Wires([SERVER]):
        pass


# --- the checks of a trace must find errors that are there ---


def life(iteration=0, activations=(0, 0)):
    return {"what": "life", "iteration": iteration, "activations": list(activations)}


def step(iteration, client, activation, delay=0, unknown=0):
    uploads = [[client, activation]]
    return {"what": "step", "iteration": iteration, "uploads": uploads, "delay": delay, "unknown": unknown}


def told(*counts):
    return {"what": "durable", "told": list(counts)}


def joined(client, *given_up):
    return {"what": "join", "client": client, "given_up": list(given_up)}


def skipped(client, activation):
    return {"what": "skipped", "client": client, "activation": activation, "reason": ""}


BEGINNING = [life(), step(0, 0, 0), step(1, 1, 0), told(1, 1), step(2, 0, 1)]
CRASHED = [*BEGINNING, life(2, (1, 1))]


def history(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_history(path)


def test_what_a_crash_undid_may_be_done_again(tmp_path):
    found = history(tmp_path, *CRASHED, joined(0), step(2, 0, 1), told(2, 1))
    assert [each["iteration"] for each in found.steps] == [0, 1, 2]
    assert (found.undone, found.lives, found.twice, found.lost) == (1, 2, [], set())


@pytest.mark.parametrize(
    ("lines", "lost"),
    [
        ([*BEGINNING, life(1, (1, 1))], {(1, 0)}),  # the step is undone
        ([*BEGINNING, life(2, (1, 0))], {(1, 0)}),  # the count is
        ([*BEGINNING, told(3, 1)], {(0, 2)}),  # reported as durable, and no step was made
        ([*BEGINNING, life(3, (3, 1))], {(0, 2)}),  # in the checkpoint, and no step was made
        ([*CRASHED, joined(1, 0)], {(1, 0)}),  # reported as durable, and given up
        ([*CRASHED, joined(0, 1), told(2, 1)], set()),  # given up before it was reported
        ([*BEGINNING, skipped(1, 1), told(2, 2)], set()),
        ([*BEGINNING, skipped(1, 0)], set()),  # the step was made, its answer was lost
    ],
)
def test_a_durable_upload_that_is_lost_is_found(tmp_path, lines, lost):
    assert history(tmp_path, *lines).lost == lost


def test_an_upload_applied_twice_is_found(tmp_path):
    assert history(tmp_path, *CRASHED, step(2, 1, 0)).twice == [(1, 0)]


def test_delays_are_found_in_steps_that_were_undone_too(tmp_path):
    found = history(tmp_path, *BEGINNING, step(3, 1, 1, delay=31, unknown=2), life(2, (1, 1)))
    assert (found.longest_delay, found.unknown_cells) == (31, 2)


@pytest.mark.parametrize(
    ("outcome", "verdict"), [({"wrong": []}, "passed"), ({"wrong": ["a gap"]}, "failed")]
)
def test_verdicts(outcome, verdict):
    assert run("a scenario", lambda: outcome)["verdict"] == verdict


@pytest.mark.parametrize(("error", "verdict"), [(Failed("hang"), "failed"), (Unable("no root"), "skipped")])
def test_verdicts_of_what_could_not_be_brought_to_an_end(error, verdict):
    def scenario():
        raise error

    assert run("a scenario", scenario)["verdict"] == verdict
